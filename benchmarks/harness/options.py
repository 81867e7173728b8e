"""The options that all experiments have in common, and the simulated accelerator of the tests."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import click
import torch

from benchmarks.harness.experiment import Experiment, Setting
from torchgpipe.base.devices import accelerator, accelerators, current_device
from torchgpipe.schedule import make

#: The type of the devices of the tests' simulated accelerator, and their name.
SIMULATED = 'sim'
NAME = 'simulated accelerator'


def is_simulated(device: torch.device | str) -> bool:
    """Return whether a device is simulated."""
    return str(device).startswith(SIMULATED)


def is_on_host(device: torch.device) -> bool:
    """Return whether the memory of a device is the host's."""
    return device.type == 'cpu' or is_simulated(device)


def load() -> list[torch.device]:
    """Make the simulated accelerator the one of this process, and return its devices.

    Raises:
        click.BadParameter: There is another accelerator, or no source checkout.
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


#: Gives a command an option.
Decorator = Callable[[Callable[..., None]], Callable[..., None]]

output_option = click.option(
    '--output', default='results', metavar='DIR', help='The folder for results and pictures.'
)

scale_option = click.option(
    '--scale',
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    callback=lambda context, parameter, value: _refuse_nan(value),
    help='Fraction of the full size of batches and images, of at least 64².',
)

DTYPES = {name: getattr(torch, name) for name in ('float32', 'float64', 'bfloat16', 'float16')}


@dataclass(frozen=True)
class Options:
    """The user's options."""

    settings: tuple[Setting, ...]
    devices: tuple[torch.device, ...]
    scale: float
    epochs: int
    skip_epochs: int
    dtype: torch.dtype
    compile: bool
    seed: int
    output: str
    #: By which GPipe.step trains, if not by the plain call.
    schedule: str | None = None

    @property
    def autocast(self) -> torch.dtype | None:
        """Return the data type for automatic mixed precision, if that was asked for."""
        return self.dtype if self.dtype.itemsize < 4 else None

    def place(self, setting: Setting) -> list[torch.device]:
        """Return a device for each partition, again from the first where there are too few."""
        if not self.devices:
            return choose_devices(len(setting))
        return [self.devices[j % len(self.devices)] for j in range(len(setting))]


def choose_devices(n: int, schedule: str | None = None) -> list[torch.device]:
    """Return n accelerators, again from the first where there are fewer, or n CPU workers.

    Args:
        n: The number of partitions.
        schedule: The name of one. Where it has several partitions on a device, these are two.

    Raises:
        ValueError: It cannot have as many partitions.
    """
    available = accelerators()
    numbers = range(n) if schedule is None else places(schedule, n)
    if not available:
        return [torch.device('cpu', number) for number in numbers]
    return [available[number % len(available)] for number in numbers]


def places(schedule: str, n: int) -> list[int]:
    """Return the number of each partition's device; two partitions, where one has several.

    >>> places('zb-v', 4), places('1f1b', 2)
    ([0, 1, 1, 0], [0, 1])
    """
    v = len(make(schedule, 1, 1).stages[0])
    if n % v:
        raise ValueError(f'{schedule!r} has {v} partitions on each device, but there are {n}')
    stages = make(schedule, n // v, 1).stages
    device_of = {}
    for device, on_device in enumerate(stages):
        for stage in on_device:
            device_of[stage] = device
    return [device_of[stage] for stage in range(n)]


def equal_balance(layers: int, n: int) -> list[int]:
    """Return the number of layers of each partition, the first ones larger by one layer."""
    return [len(part) for part in torch.arange(layers).tensor_split(n)]


def parse_devices(context: Any, parameter: Any, value: str | None) -> tuple[Any, ...]:
    """Read devices like cuda:0,cuda:1 and see that they are there; sim is sim:0,…,sim:3."""
    devices: list[torch.device] = []
    names = value.split(',') if value else []
    for name in map(str.strip, names):
        if is_simulated(name):
            simulated = load()
            if name == SIMULATED:
                devices += simulated
                continue
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
        except (AssertionError, RuntimeError) as error:
            raise click.BadParameter(f'{name!r}: {str(error).splitlines()[0]}') from None
        if device.type not in ('cpu', accelerator()):
            raise click.BadParameter(f'{name!r} is neither a CPU nor an accelerator with streams')
        is_current = device.type != 'cpu' and device.index is None
        devices.append(current_device() if is_current else device)
    return tuple(devices)


def _refuse_nan(value: float) -> float:
    if value != value:
        raise click.BadParameter('it is not a number')
    return value


def experiment_options(
    experiment: Experiment,
    epochs: int = 3,
    skip_epochs: int = 1,
    epoch: str = '10,000 samples; --scale takes a fraction of the steps too',
) -> Decorator:
    """Return a decorator that gives a command the options of all experiments."""
    names = [setting.name for setting in experiment.settings]
    options: list[Decorator] = [
        click.option(
            '--setting',
            'settings',
            type=click.Choice([*names, 'all']),
            multiple=True,
            default=('all',),
            help='Which line of the table; may be given several times.',
        ),
        click.option(
            '--devices',
            callback=parse_devices,
            metavar='D,D,…',
            help='Where partitions go, again from the first if there are too few; sim '
            'simulates four accelerators. [default: all that there are, or cpu:0, '
            'cpu:1, …]',
        ),
        scale_option,
        click.option(
            '--epochs',
            type=click.IntRange(1),
            default=epochs,
            help=f'Passes over the data: {epoch}.',
        ),
        click.option(
            '--skip-epochs',
            type=click.IntRange(0),
            default=lambda: min(skip_epochs, _epochs_of_context() - 1),
            show_default=str(skip_epochs),
            help='How many of these come first and do not count.',
        ),
        click.option(
            '--dtype',
            type=click.Choice(list(DTYPES)),
            default='float32',
            help='float16 and bfloat16: mixed precision, by autocast.',
        ),
        click.option('--compile', is_flag=True, help='Compile each partition (torch.compile).'),
        click.option(
            '--seed',
            type=click.IntRange(0, 2**32 - 1),
            default=0,
            help='For parameters, data and dropout.',
        ),
        output_option,
    ]

    return all_options(options)


def all_options(options: Sequence[Decorator]) -> Decorator:
    """Return a decorator that gives options to a command, in their order."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def count_option(name: str, default: int, help: str, least: int = 1) -> Decorator:
    """Return an option for a whole number."""
    return click.option(name, type=click.IntRange(least), default=default, help=help)


def distinct(context: Any, parameter: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the values of an option that may be repeated, each once."""
    return tuple(dict.fromkeys(values))


def choices_option(name: str, variable: str, choices: Iterable[str], help: str = '') -> Decorator:
    """Return an option for some of several names, by default for all of them."""
    names = [*choices]
    return click.option(
        name,
        variable,
        type=click.Choice(names),
        multiple=True,
        default=names,
        callback=distinct,
        help=f'{help} May be given several times.'.strip(),
    )


def _epochs_of_context() -> int:
    """Return --epochs, which was parsed before: of one epoch none can be skipped."""
    return int(click.get_current_context().params['epochs'])


def take_options(
    experiment: Experiment,
    settings: tuple[str, ...],
    epochs: int,
    skip_epochs: int,
    dtype: str,
    **options: Any,
) -> Options:
    """Return the options, after a check of those that depend on each other."""
    if skip_epochs >= epochs:
        raise click.BadParameter(
            f'{skip_epochs} of {epochs} epochs leave nothing to measure',
            param_hint='--skip-epochs',
        )
    chosen = experiment.settings
    if 'all' not in settings:
        chosen = tuple(setting for setting in chosen if setting.name in settings)
    return Options(chosen, epochs=epochs, skip_epochs=skip_epochs, dtype=DTYPES[dtype], **options)
