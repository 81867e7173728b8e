"""Which pass over a checkpointed cell a thread is in: the first one, or a recomputation."""
import threading
from contextlib import AbstractContextManager

__all__ = ['enable_checkpointing', 'enable_recomputing', 'is_checkpointing', 'is_recomputing',
           'pass_state']


class _PassState(threading.local):

    def __init__(self) -> None:
        # Each thread has its own, which is what compiled code looks at again when it is called.
        self.checkpointing = False
        self.recomputing = False
        #: Whether a layer has asked. Then it deals with its own attributes.
        self.asked = False


#: This thread's answers to :func:`is_checkpointing` and :func:`is_recomputing`.
pass_state = _PassState()


def is_checkpointing() -> bool:
    """Tell whether this thread is in the first pass over a checkpointed micro-batch.

    Another pass will follow in backward. Threads do not see each other's answers.

    >>> is_checkpointing()
    False
    """
    pass_state.asked = True
    return pass_state.checkpointing


def is_recomputing() -> bool:
    """Tell whether this thread is in a recomputation during backward.

    A layer with a side effect asks this to have it once only. Its attributes are left as it sets
    them then; those of layers in partitions where no one asks are put back, as buffers always are.

    >>> is_recomputing()
    False
    """
    pass_state.asked = True
    return pass_state.recomputing


class _Pass:
    """A context that sets this thread's answers; by hand, as each cell enters it twice."""

    __slots__ = ('_answers', '_before')

    def __init__(self, checkpointing: bool, recomputing: bool) -> None:
        self._answers = checkpointing, recomputing

    def __enter__(self) -> None:
        self._before = pass_state.checkpointing, pass_state.recomputing
        pass_state.checkpointing, pass_state.recomputing = self._answers

    def __exit__(self, *args: object) -> None:
        pass_state.checkpointing, pass_state.recomputing = self._before


def enable_checkpointing() -> AbstractContextManager[None]:
    """Make :func:`torchgpipe.is_checkpointing` true within the context.

    >>> with enable_checkpointing():
    ...     is_checkpointing(), is_recomputing()
    (True, False)
    """
    return _Pass(True, pass_state.recomputing)


def enable_recomputing() -> AbstractContextManager[None]:
    """Make :func:`torchgpipe.is_recomputing` true within the context.

    >>> with enable_recomputing():
    ...     is_checkpointing(), is_recomputing()
    (False, True)
    """
    return _Pass(False, True)
