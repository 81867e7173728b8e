"""The simulated accelerator of the tests, as devices to measure on."""

import click
import torch

#: The type of its devices.
SIMULATED = 'sim'

#: Their name.
NAME = 'simulated accelerator'


def is_simulated(device: torch.device | str) -> bool:
    """Return whether a device is one of them."""
    return str(device).startswith(SIMULATED)


def is_on_host(device: torch.device) -> bool:
    """Return whether the memory of a device is the host's."""
    return device.type == 'cpu' or is_simulated(device)


def load() -> list[torch.device]:
    """Make it the accelerator of this process, and give its devices.

    Raises:
        click.BadParameter: It cannot be had.
    """
    other = torch.accelerator.current_accelerator(check_available=True)
    if other is not None and not is_simulated(other):
        raise click.BadParameter(
            f"{SIMULATED!r}: there is one accelerator in a process, here '{other.type}'"
        )
    try:
        from tests import accelerator
    except ImportError:
        raise click.BadParameter(
            f'{SIMULATED!r} is the {NAME} of the tests, which are not here: run this in a '
            'checkout of the sources'
        ) from None
    try:
        accelerator.load()
    except RuntimeError as error:
        raise click.BadParameter(f'{SIMULATED!r}: {str(error).splitlines()[0]}') from None
    return [torch.device(SIMULATED, k) for k in range(torch.accelerator.device_count())]
