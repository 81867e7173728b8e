"""Values that a forward keeps beyond its end, in a cache or a global: name who has them.

Each run would keep another one, and a value is of no use to anybody once its recording is over. A
function with a cache, which makes a table when it is first asked for, has it already: the model
runs once before it is recorded, and what it has kept then are constants.
"""
import functools
import gc
from types import CellType, FunctionType
from typing import Any

from torchgpipe.sequential.errors import ConversionError
from torchgpipe.sequential.value import UNKNOWN

__all__ = ['let_go', 'name_of_keeper', 'stale']


_SOMEWHERE = 'a cache, a global or an object'


def stale(where: str = _SOMEWHERE) -> ConversionError:
    """Say that a value is used, or kept, after its recording is over.

    Args:
        where: Who keeps it.
    """
    return ConversionError(
        f'the model can not be converted: its forward keeps what it computes in {where}, and each '
        'run would do so again. Name the submodule that does as a leaf: '
        'to_sequential(model, sample, leaves=[…])')


def name_of_keeper(values: list[Any]) -> str:
    """Name what keeps values: the nearest thing with a name from which they can be reached."""
    inner, seen = values, {id(values)}
    for _ in range(5):
        seen |= {id(inner), *map(id, inner)}
        outer = [thing for thing in gc.get_referrers(*inner) if id(thing) not in seen]
        for thing in outer:
            name = _name(thing, inner)
            if name:
                return name
        inner = outer
    return _SOMEWHERE


def _name(thing: Any, inner: list[Any]) -> str:
    """Name something that refers to other things, if it has a name."""
    if type(thing) is functools._lru_cache_wrapper:
        return f'the cache of {_qualified(thing)}'
    if isinstance(thing, FunctionType):
        return f'a variable of {_qualified(thing)}'
    if isinstance(thing, type):
        return f'an attribute of {_qualified(thing)}'
    if type(thing) is dict and thing.get('__spec__', thing) is not thing:
        ids = {id(each) for each in inner}
        return f'{thing["__name__"]}.' + next(
            (str(key) for key, value in thing.items() if id(value) in ids), '…')
    return '' if type(thing).__module__ == 'builtins' else f'a {_qualified(type(thing))}'


def _qualified(thing: Any) -> str:
    return f'{thing.__module__}.{thing.__qualname__}'


def let_go(values: list[Any]) -> None:
    """Put what values stand for in their places, as if the model had run by itself.

    Without a sample that is nothing. Sets, tuples and objects without a dictionary keep them.
    """
    own = {id(value) for value in values}
    for holder in gc.get_referrers(*values) if values else ():
        if type(holder) is functools._lru_cache_wrapper:
            holder.cache_clear()  # It has no other way to forget one.
        elif type(holder) is CellType:
            known = holder.cell_contents._known
            holder.cell_contents = None if known is UNKNOWN else known
        elif type(holder) is list and holder is not values:
            known = [each._known if id(each) in own else each for each in holder]
            holder[:] = [each for each in known if each is not UNKNOWN]
        elif type(holder) is dict:
            _let_go(holder, own)
        else:
            _let_go(getattr(holder, '__dict__', {}), own)


def _let_go(names: Any, own: set[int]) -> None:
    of_class = [each for each in gc.get_referrers(names) if isinstance(each, type)]
    for key, value in [*names.items()]:
        if id(value) not in own and id(key) not in own:
            continue
        if of_class:  # A class remembers what it has.
            delattr(of_class[0], key)
        else:
            del names[key]
        key, value = (x._known if id(x) in own else x for x in (key, value))
        if of_class and value is not UNKNOWN:
            setattr(of_class[0], key, value)
        elif key is not UNKNOWN and value is not UNKNOWN:
            names[key] = value
