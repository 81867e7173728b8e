"""Kinds of devices: the CPU, accelerators and devices without data.

Only this file and ``engine.streams`` check the type of a device. For tensors, other files use
``is_cpu`` and ``is_meta``. An accelerator is a device that PyTorch treats as one and that has
streams: CUDA, XPU, or another backend. A process has one kind of accelerator.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import Tensor

#: A device, or the name or index of one.
Device = torch.device | int | str

CPU = torch.device('cpu')


def parse_device(device: Device) -> torch.device:
    """Return the named device, whether or not it exists on this machine.

    Raises:
        ValueError: There is no such kind of device.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f'unknown device {device!r}: {reason}') from None


def is_cpu(device: Device) -> bool:
    """Return whether a device is the CPU, whose work is done when a call returns.

    >>> is_cpu('cpu:1'), is_cpu('cuda:0')
    (True, False)
    """
    return torch.device(device).type == 'cpu'


def has_data(device: torch.device) -> bool:
    """Return whether tensors on a device have values, and not only shapes."""
    return device.type != 'meta'


def has_streams(device: torch.device) -> bool:
    """Return whether a device is an accelerator."""
    return device.type == _kind()


def has_own_state(device: torch.device) -> bool:
    """Return whether a device has its own queue and random generator."""
    return not is_cpu(device) and has_data(device)


def accelerator() -> str | None:
    """Return the type of device that has streams here, such as ``'cuda'``, or ``None``."""
    # PyTorch also names an accelerator that it was built for but that does not exist here.
    if not torch.accelerator.is_available():
        return None
    return _kind()


def _kind() -> str | None:
    device = torch.accelerator.current_accelerator()
    # A Mac's GPU has one queue, and PyTorch does not have streams for it.
    if device is None or device.type == 'mps':
        return None
    return device.type


def accelerators() -> list[torch.device]:
    """Return all devices that have streams."""
    kind = accelerator()
    if kind is None:
        return []
    return _all_devices(kind)


def _all_devices(kind: str) -> list[torch.device]:
    return [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


def current_device() -> torch.device:
    """Return the calling thread's current device among the accelerators."""
    return torch.device(str(accelerator()), torch.accelerator.current_device_index())


#: The type of a device, and its index or another number.
DeviceKey = tuple[str, int]


def memory_key(device: torch.device) -> DeviceKey:
    """Return the key of a device's memory. All CPU devices share one memory.

    >>> memory_key(torch.device('cpu:1')), memory_key(torch.device('cuda'))
    (('cpu', 0), ('cuda', 0))
    """
    if is_cpu(device):
        return 'cpu', 0
    return device.type, device.index or 0


def memory_of(device: Device) -> torch.device:
    """Return the device of tensors in its memory: ``cpu`` for any CPU device."""
    return CPU if is_cpu(device) else torch.device(device)


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until each device has finished its queued work."""
    for device in dict.fromkeys(devices):
        if has_own_state(device):
            torch.accelerator.synchronize(device)


def forked_rng(devices: Sequence[torch.device] | None = None) -> AbstractContextManager[None]:
    """Restore the random generators of the CPU and of devices after the context.

    By default, these are all devices on this machine.

    >>> with forked_rng():
    ...     _ = torch.manual_seed(0)
    """
    if devices is None:
        # Unlike :func:`accelerators`, with a Mac's GPU, which has a generator without streams.
        current = torch.accelerator.current_accelerator(check_available=True)
        devices = [] if current is None else _all_devices(current.type)
    # `fork_rng` always includes the CPU.
    devices = [*filter(has_own_state, devices)]
    device_type = devices[0].type if devices else 'cpu'
    return torch.random.fork_rng(devices, device_type=device_type)


def rng_states(devices: Iterable[torch.device]) -> dict[str, Tensor]:
    """Return the states of the generators of the CPU and of devices, by names."""
    states = {'cpu': torch.get_rng_state()}
    for name, device in _generators(devices):
        states[name] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_rng_states(
    devices: Iterable[torch.device],
    states: Mapping[str, Tensor],
) -> None:
    """Set the generators of the CPU and of devices to the given states."""
    if 'cpu' in states:
        torch.set_rng_state(states['cpu'])
    for name, device in _generators(devices):
        if name in states:
            torch.get_device_module(device).set_rng_state(states[name], device)


def _generators(devices: Iterable[torch.device]) -> Iterator[tuple[str, torch.device]]:
    """Yield the devices that have their own generators, each with a name for its state.

    The name has the position among these devices, not the index of the device.
    """
    unique = {*filter(has_own_state, devices)}
    for k, device in enumerate(sorted(unique, key=str)):
        yield f'{device.type}{k}', device


@cache
def autocast_types(accelerator: torch.device | None) -> tuple[str, ...]:
    """Return the device types with autocast, including the current accelerator's type."""
    types = ['cpu', 'cuda', 'xpu', 'mps']
    if accelerator is not None and accelerator.type not in types:
        types.append(accelerator.type)
    return tuple(filter(torch.amp.is_autocast_available, types))
