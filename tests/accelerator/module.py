"""The device module ``torch.sim``, the counterpart of ``torch.cuda``."""

import types
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def on(stream):
    """Make a stream, and its device, current within the context."""
    device = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device)


def make(extension):
    """Return a module over the built extension."""
    module = types.ModuleType('torch.sim', 'A simulated accelerator.')
    for part in (_devices, _streams, _memory, _random, _autocast):
        vars(module).update(part(extension))
    return module


def _index(device):
    """Return the index of a device, a number or nothing."""
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _devices(extension):
    _initialized = True  # Where this is missing, torch.utils.checkpoint keeps no random state.

    def is_available():
        return True

    def is_initialized():
        return True

    def device_count():
        return extension.device_count

    def current_device():
        return torch.accelerator.current_device_index()

    def set_device(device):
        torch.accelerator.set_device_index(_index(device))

    def device(device):
        return torch.accelerator.device_index(_index(device))

    def synchronize(device=None):
        extension.synchronize(_index(device))

    def get_device_name(device=None):
        return 'simulated accelerator'

    def _is_in_bad_fork():
        return extension.is_forked()

    def _lazy_init():
        pass

    return locals()


def _streams(extension):
    def current_stream(device=None):
        return torch.accelerator.current_stream(_index(device))

    def default_stream(device=None):
        current = torch.accelerator.current_stream(_index(device))
        return torch.Stream(
            stream_id=0, device_index=current.device_index, device_type=current.device_type
        )

    def set_stream(stream):
        torch.accelerator.set_stream(stream)

    def stream(stream):
        return nullcontext() if stream is None else on(stream)

    class Stream:
        """Make a stream: a name of :class:`torch.Stream`."""

        def __new__(cls, device=None, priority=0):
            return torch.Stream(torch.device('sim', _index(device)), priority=priority)

    class Event:
        """Make an event: a name of :class:`torch.Event`."""

        def __new__(cls, enable_timing=False):
            return torch.Event('sim', enable_timing=enable_timing)

    return locals()


def _memory(extension):
    names = [
        'memory_allocated',
        'max_memory_allocated',
        'memory_reserved',
        'max_memory_reserved',
        'reset_peak_memory_stats',
        'memory_stats',
        'empty_cache',
    ]
    return {name: getattr(torch.accelerator, name) for name in names}


def _random(extension):
    default_generators = tuple(map(extension.default_generator, range(extension.device_count)))

    def get_rng_state(device='sim'):
        return default_generators[_index(device)].get_state()

    def set_rng_state(state, device='sim'):
        default_generators[_index(device)].set_state(state)

    def get_rng_state_all():
        return [generator.get_state() for generator in default_generators]

    def set_rng_state_all(states):
        for generator, state in zip(default_generators, states):
            generator.set_state(state)

    def manual_seed(seed):
        default_generators[_index(None)].manual_seed(seed)

    def manual_seed_all(seed):
        for generator in default_generators:
            generator.manual_seed(seed)

    def seed():
        return default_generators[_index(None)].seed()

    def initial_seed():
        return default_generators[_index(None)].initial_seed()

    return locals()


def _autocast(extension):
    def get_amp_supported_dtype():
        return [torch.float16, torch.bfloat16]

    def is_bf16_supported():
        return True

    return locals()
