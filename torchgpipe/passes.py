"""Which pass over a checkpointed cell a thread is in: the first one, or a recomputation."""
import threading
from contextlib import contextmanager
from typing import Iterator

__all__ = ['enable_checkpointing', 'enable_recomputing', 'is_checkpointing', 'is_recomputing',
           'pass_state']


class _PassState(threading.local):
    checkpointing = False
    recomputing = False


#: This thread's answers to :func:`is_checkpointing` and :func:`is_recomputing`.
pass_state = _PassState()


def is_checkpointing() -> bool:
    """Tell whether this thread is in the first pass over a checkpointed micro-batch.

    >>> is_checkpointing()
    False
    """
    return pass_state.checkpointing


def is_recomputing() -> bool:
    """Tell whether this thread is in a recomputation during backward.

    A layer with a side effect (a counter, running statistics) asks this to have it once only.

    >>> is_recomputing()
    False
    """
    return pass_state.recomputing


@contextmanager
def enable_checkpointing() -> Iterator[None]:
    """Make :func:`is_checkpointing` true within the context."""
    before = pass_state.checkpointing
    pass_state.checkpointing = True
    try:
        yield
    finally:
        pass_state.checkpointing = before


@contextmanager
def enable_recomputing() -> Iterator[None]:
    """Make :func:`is_recomputing` true within the context."""
    before = pass_state.checkpointing, pass_state.recomputing
    pass_state.checkpointing, pass_state.recomputing = False, True
    try:
        yield
    finally:
        pass_state.checkpointing, pass_state.recomputing = before
