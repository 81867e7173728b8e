"""Communication with other processes from within a cell: whether the ranks would meet there.

Ranks have to come to their collectives in the same order. Workers that run beside each other come
to theirs in any order::

    rank 0    worker 0    collective of partition 0 ──────────────────────▶ waits for rank 1
              worker 1                      collective of partition 1

    rank 1    worker 0                      collective of partition 0
              worker 1    collective of partition 1 ──────────────────────▶ waits for rank 0

So a module that communicates says so, ``communicates = True``, and the engine keeps an order.
Where it keeps none, it says so, and who is about to communicate looks here first.
"""
import threading
from collections.abc import Callable

__all__ = ['check_order', 'without_order']


class _Here(threading.local):
    """Of each thread: what tells why the ranks would not meet, if they would not."""

    why: Callable[[], str] | None = None


_here = _Here()


class without_order:  # noqa: N801
    """A context in which other threads run beside this one, and any of them may communicate.

    Args:
        why: Gives the message for who tries to.
    """

    __slots__ = ('_before', '_why')

    def __init__(self, why: Callable[[], str] | None) -> None:
        self._why = why

    def __enter__(self) -> None:
        self._before, _here.why = _here.why, self._why

    def __exit__(self, *args: object) -> None:
        _here.why = self._before


def check_order() -> None:
    """See that ranks come to a collective of the calling thread in the same order.

    Raises:
        RuntimeError: They need not. The message says what to do.
    """
    if _here.why is not None:
        raise RuntimeError(_here.why())
