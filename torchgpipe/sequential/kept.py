"""Values that a forward keeps beyond its end, in a cache or a global: find them, take them out.

A function with a cache, which makes a table when it is first asked for, would give a value of one
recording to the next one, and to the model itself. So caches are emptied of values. The model runs
once, which fills them with tensors, and is recorded again; these tensors are constants then.
"""
import functools
import gc
from typing import Any

from torchgpipe.sequential.errors import ConversionError
from torchgpipe.sequential.value import Unknown, Value

__all__ = ['StaleValue', 'take_out_values']


class StaleValue(ConversionError):
    """A value is used, or kept, after its recording is over."""

    def __init__(self) -> None:
        super().__init__(
            'the model can not be converted: its forward keeps what it computes outside of it, in '
            'a cache, a global or an object, and each run would do so again. Name the submodule '
            'that does as a leaf: to_sequential(model, sample, leaves=[…])')


def take_out_values() -> None:
    """Empty caches and dictionaries of values, wherever they are."""
    for thing in gc.get_objects():
        if type(thing) is dict:
            for key in [key for key, value in thing.items() if type(value) in (Value, Unknown)]:
                del thing[key]
        elif type(thing) is functools._lru_cache_wrapper and _holds_values(thing):
            thing.cache_clear()


def _holds_values(thing: Any) -> bool:
    within = [thing]
    for _ in range(3):
        within = gc.get_referents(*within)
        if any(type(each) in (Value, Unknown) for each in within):
            return True
    return False
