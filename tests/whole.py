"""Select the tests without ``--whole``: those that changes usually break, on the CPU, none slow.

A test with several lists of parameters runs with the cases in which a value of a list comes first.
It runs with one mode of checkpointing and one kind of devices, unless the test reads them. The
next test has another one. One test on accelerators runs for each folder.
"""

import ast
import inspect
import textwrap
import zlib
from collections import Counter
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest

from tests.devices import Devices

#: Modes of checkpointing.
MODES = {'always', 'except_last', 'never'}


def short(items):
    """Yield the tests that run without ``--whole``."""
    quick = [item for item in items if 'slow' not in item.keywords]
    folders = set()
    for _, same in groupby(sorted(quick, key=_kind), key=_kind):
        same = list(same)
        if not {'accelerator', 'sim'} & {*same[0].keywords}:
            yield from _covering(same)
        elif (folder := Path(_file(same[0])).parent) not in folders:
            folders.add(folder)
            yield same[0]


def first(number, values):
    """Return values for ``pytest.mark.parametrize``, of which all but so many are slow."""
    return [
        value
        if k < number
        else pytest.param(*value if isinstance(value, tuple) else (value,), marks=pytest.mark.slow)
        for k, value in enumerate(values)
    ]


def _kind(item):
    """Return the key that is common to tests which differ only by their parameters."""
    return item.nodeid.split('[')[0], 'accelerator' in item.keywords


def _file(item):
    return item.nodeid.split('::')[0]


def _covering(items):
    """Return so many tests that each value of each list of parameters is there, few of them."""
    # Other tests begin elsewhere, so that they take other modes and devices.
    start = zlib.crc32(_kind(items[0])[0].encode()) % len(items)
    items = items[start:] + items[:start]
    values = {item: _values(item) for item in items}
    missing, used = set().union(*values.values()), Counter()
    while missing:
        # Values that are there already are there about equally often.
        best = max(
            items,
            key=lambda item: (
                len(values[item] & missing),
                -sum(used[value] for value in values[item]),
            ),
        )
        yield best
        missing -= values[best]
        used.update(values[best])


def _values(item):
    """Return a key for the value that a test has of each list of parameters."""
    params = item.callspec.params if hasattr(item, 'callspec') else {}
    lists = [mark.args[0] for mark in item.iter_markers('parametrize')]
    lists = [
        names.replace(' ', '').split(',') if isinstance(names, str) else names for names in lists
    ]
    lists += [[name] for name in params if not any(name in names for names in lists)]
    return {
        tuple((name, id(params[name])) for name in names)
        for names in lists
        if not _is_any(item, names, params)
    } or {()}


def _is_any(item, names, params):
    """Return whether a list is of modes or of devices, any of which does for a test."""
    if len(names) > 1 or names[0] in _looked_at(item.function):
        return False
    value = params[names[0]]
    return isinstance(value, Devices) or isinstance(value, str) and value in MODES


@cache
def _looked_at(function):
    """Return the names that a function has in conditions, comparisons and subscripts."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        looks = (
            (node.test,)
            if isinstance(node, (ast.If, ast.IfExp))
            else (node,)
            if isinstance(node, (ast.Compare, ast.BoolOp, ast.Subscript))
            else ()
        )
        found |= {
            each.id for look in looks for each in ast.walk(look) if isinstance(each, ast.Name)
        }
    return found
