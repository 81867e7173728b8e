"""Substitutes: temporary replacement of tensors or attributes of modules.

::

    with substituted(swaps):      put  ──▶ a copy, a leaf, a kept value, another forward
        …                                  whoever looks at the module sees that
                                  back ──▶ what was there, also after an error or Ctrl-C

All who look at a module meanwhile see that. So it is done under the locks of all layers that have
it: ``lock_alone`` of :mod:`torchgpipe.engine.partition`.
"""
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import setitem
from typing import Any, NamedTuple

__all__ = ['Swap', 'entry', 'substituted']

_MISSING = object()


class Swap(NamedTuple):
    """How to put a substitute into a place, and how to put back what was there."""

    put: Callable[[], object]
    back: Callable[[], object]


def entry(holder: Any, name: str, value: Any) -> Swap:
    """Return how an entry of a dictionary gets another value."""
    own = holder[name] if name in holder else _MISSING
    back = partial(holder.pop, name, None) if own is _MISSING else partial(
        setitem, holder, name, own)
    return Swap(partial(setitem, holder, name, value), back)


class substituted:
    """A context in which substitutes are in their places."""

    # One of `contextlib` sets the traceback of an error, and so fails where it cannot be set.
    __slots__ = ('_swaps',)

    def __init__(self, swaps: Sequence[Swap]) -> None:
        self._swaps = swaps

    def __enter__(self) -> None:
        try:
            for put, _ in self._swaps:
                put()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *raised: object) -> None:
        # What is put back may be put back again, so Ctrl-C waits until all is.
        interrupt = None
        while True:
            try:
                _call_all([back for _, back in self._swaps])
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _call_all(functions: Iterable[Callable[[], object]]) -> None:
    for function in functions:
        function()
