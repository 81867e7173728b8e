"""What an object is made of, to see whether somebody changes it, or values are in it."""
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import fx

__all__ = ['has_values', 'ids_within']


def has_values(thing: Any) -> bool:
    """Tell whether an object holds values of a recording."""
    return any(isinstance(each, fx.Proxy) for each in _within(thing))


def ids_within(thing: Any) -> list[int]:
    """Give the ids of all that an object holds: attributes, and contents of containers; and what a
    function is bound to.

    >>> things = {'a': [1]}
    >>> before = ids_within(things)
    >>> things['a'].append(2)
    >>> ids_within(things) == before
    False
    """
    return [id(each) for each in _within(thing)]


def _within(thing: Any) -> Iterator[Any]:
    found: dict[int, None] = {}
    waiting = [thing]
    while waiting:
        each = waiting.pop()
        if id(each) in found:
            continue
        found[id(each)] = None
        yield each
        if isinstance(each, fx.Proxy):  # It knows the recording.
            continue
        if isinstance(each, Mapping):
            waiting += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple, set, frozenset)):
            waiting += each
        waiting += getattr(each, '__dict__', {}).values()
        waiting += [getattr(each, '__self__', None), *map(_held, getattr(each, '__closure__', None)
                                                          or ())]
        if isinstance(each, partial):
            waiting += [each.func, each.args, each.keywords]


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # There is nothing in it yet.
        return None
