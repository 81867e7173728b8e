"""The position of a thread: its layer and line, and whether it waits for other ranks.

Another thread reads it from the frames of the thread, so it costs the thread nothing.
"""
import gc
import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch.distributed as dist

from torchgpipe.distributed.start import NotBegun
from torchgpipe.engine.cell import Sequential

__all__ = ['Whereabouts', 'is_from_others', 'whereabouts']

#: Modules that wait for other ranks if they have the innermost frame, and modules in these that
#: compute on shards.
_WAITING = ('torch.distributed.', 'torchgpipe.distributed.', 'torchgpipe.shard.')
_COMPUTING = ('torch.distributed.tensor',)

#: Modules that only pass calls on.
_PASSED = ('torch._ops', 'torch._library', 'torch.autograd', 'torch.overrides', 'torch.utils',
           'contextlib')

#: Packages whose lines do not help a reader: PyTorch, and Python's locks and connections.
_UNSAID = {'torch', *sys.stdlib_module_names}

#: Words in errors of a connection to another rank, where these do not have their own type.
_BACKENDS = ('gloo', 'NCCL')


class Whereabouts(NamedTuple):
    """Where a thread is.

    Args:
        waits: Whether it waits for other ranks.
        text: The layer, if it is known, and the line.
    """

    waits: bool
    text: str


def whereabouts(thread: int, layer: bool = False) -> Whereabouts:
    """Return where a thread is.

    Args:
        thread: Its number.
        layer: Whether to look for the layer. This keeps the locals of a frame alive until the
            frame ends, so it is for threads that are stuck.
    """
    if not thread:  # It has begun nothing yet.
        return Whereabouts(False, '')
    innermost = frame = _frames().get(thread)
    waits, line, name = False, '', ''
    decided = False
    while frame is not None:
        # Python 3.11 may return another object for a frame that ended meanwhile.
        names: object = frame.f_globals
        module = str(names.get('__name__', '')) if isinstance(names, dict) else _PASSED[0]
        if not decided and not module.startswith(_PASSED):
            decided = True
            waits = module.startswith(_WAITING) and not module.startswith(_COMPUTING)
        if not line and module.partition('.')[0] not in _UNSAID:
            line = _line(frame)
        if layer and not name and frame.f_code is Sequential.forward.__code__:
            name = _layer(frame)
        frame = frame.f_back
    if innermost is None:
        return Whereabouts(False, 'no line, as its thread has ended')
    return Whereabouts(waits, name + (line or _line(innermost)))


def _frames() -> dict[int, FrameType]:
    """Return the frame of each thread.

    Before Python 3.12, a garbage collection may begin in this call, which holds a lock that a
    thread needs to end. A finalizer that joins such a thread, such as a watch's, would deadlock.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if enabled:
            gc.enable()


def _line(frame: FrameType) -> str:
    code = frame.f_code
    return f'{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}'


def _layer(frame: FrameType) -> str:
    partition, layer = frame.f_locals.get('self'), frame.f_locals.get('module')
    names = [] if partition is None or layer is None else [
        name for name, each in partition._modules.items() if each is layer]
    return f"layer '{names[0]}', " if names else ''


def is_from_others(error: BaseException) -> bool:
    """Return whether an error only reports that another rank, or the connection, has failed."""
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, (dist.DistError, NotBegun)) or (
                isinstance(each, RuntimeError) and any(name in str(each) for name in _BACKENDS)
                and _raised_in(each).startswith(_WAITING)):
            return True
        each = each.__cause__
    return False


def _raised_in(error: BaseException) -> str:
    """Return the name of the module that raised an error, or called the code that did."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return '' if last is None else str(last.tb_frame.f_globals.get('__name__', ''))
