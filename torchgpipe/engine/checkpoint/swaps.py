"""Swaps: substitutes for attributes and parameters of modules for some time.

All users of a module see a substitute. So a swap requires the locks of all layers that have the
module (``lock_alone`` of a partition)::

    with substituted(swaps):      put  ──▶ a copy, a leaf, a kept value, another forward
                                  back ──▶ the previous value, also after an error or Ctrl-C
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import setitem
from typing import Any, NamedTuple

from torch import Tensor, nn

from torchgpipe.base.structure import is_plain

_MISSING = object()


class Swap(NamedTuple):
    """A substitution: a function that puts a substitute, and one that restores the old value."""

    put: Callable[[], object]
    back: Callable[[], object]


def entry(
    holder: Any,
    name: str,
    value: Any,
) -> Swap:
    """Return the swap that sets an entry of a dictionary to another value."""
    previous = holder.get(name, _MISSING)
    back = partial(setitem, holder, name, previous)
    if previous is _MISSING:
        back = partial(holder.pop, name, None)
    return Swap(partial(setitem, holder, name, value), back)


def with_data(
    x: Tensor,
    data: Tensor,
    requires_grad: bool,
) -> Tensor:
    """Return a tensor with other data, of the type of parameter if it is one."""
    if not isinstance(x, nn.Parameter):
        return data.requires_grad_(requires_grad)
    cls = nn.Parameter
    # Otherwise the gradient of a leaf in a step would not be deferred.
    if is_plain(x) and issubclass(type(x), nn.Parameter):
        cls = type(x)
    parameter = cls(data, requires_grad)
    parameter.__dict__.update(x.__dict__)
    return parameter


class substituted:
    """A context in which substitutes are in their places."""

    # One of `contextlib` sets the traceback of an error, and so fails where it cannot be set.
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
        # A restoration may be repeated, so Ctrl-C waits until all are done.
        interrupt = None
        while True:
            try:
                _restore_all(self._swaps)
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


def _restore_all(swaps: Sequence[Swap]) -> None:
    for swap in swaps:
        swap.back()
