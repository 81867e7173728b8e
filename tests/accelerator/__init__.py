"""A simulated accelerator: four devices with asynchronous streams in the memory of the host.

``load()`` makes it the accelerator of this process, with devices ``sim:0`` to ``sim:3``. Call it
before the first backward pass, because autograd counts devices only once. Each stream is a thread
that runs kernels of the CPU later, in their order; see ``csrc`` for the rest.

Events with timing measure the time of devices that have a core each, and never wait for the host.
A kernel takes the time for which its thread computes, or a given time.
"""

import atexit
from contextlib import contextmanager

import torch

from tests.accelerator.build import extension, reason
from tests.accelerator.module import make, on

__all__ = [
    'clear_races',
    'detection',
    'is_available',
    'is_loaded',
    'is_ordered',
    'load',
    'no_race',
    'on',
    'races',
    'reason',
    'set_copy_time',
    'set_delays',
    'set_memory_limit',
    'sleep',
]

_loaded = None


def is_available():
    """Return whether it can be loaded, or is loaded already."""
    return is_loaded() or not reason()


def is_loaded():
    """Return whether it is the accelerator of this process."""
    return _loaded is not None


def load():
    """Make it the accelerator of this process, and give the device module, ``torch.sim``."""
    global _loaded
    if _loaded is None:
        if reason():
            raise RuntimeError(reason())
        torch.utils.rename_privateuse1_backend('sim')
        _loaded = extension()
        torch._register_device_module('sim', make(_loaded))
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        atexit.register(_end)
    return torch.sim


def _end():
    """Let queued kernels end, because the objects that they use are about to be freed."""
    if not _loaded.is_forked():
        set_delays(0, 0)
        for device in range(_loaded.device_count):
            try:
                _loaded.synchronize(device)
            except Exception:
                pass  # the result is not needed any more


def set_delays(seed=0, max_microseconds=0):
    """Let each kernel begin later by a random time, another one for another seed."""
    _loaded.set_delays(seed, max_microseconds)


def set_copy_time(microseconds=0):
    """Let copies from one device to another take longer by so much."""
    _loaded.set_copy_time(microseconds)


def set_memory_limit(bytes):
    """Let allocations fail beyond so many bytes on a device."""
    _loaded.set_memory_limit(bytes)


def sleep(microseconds):
    """Queue a kernel that does nothing for so long on the current stream."""
    _loaded.sleep(microseconds)


@contextmanager
def detection(lines=True):
    """Look for races within the context; give a function that tells those found so far."""
    _loaded.clear_races()
    _loaded.detect(True, lines)
    try:
        yield races
    finally:
        _loaded.detect(False, False)


@contextmanager
def no_race():
    """Fail if there was a race within the context."""
    with detection():
        yield
        for device in range(_loaded.device_count):
            _loaded.synchronize(device)
        assert not races(), '\n\n'.join(races())


def races():
    """Return the races that the detector found, as texts."""
    return _loaded.races()


def is_ordered(before, after):
    """Tell, within :func:`detection`, whether one event is known to be over at another one."""
    return _loaded.is_ordered(before.event_id, after.event_id)


def clear_races():
    """Forget the races that it found."""
    _loaded.clear_races()
