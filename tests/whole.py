"""What runs without ``--whole``: no slow tests, and of products of parameters a part.

Of a test with several lists of parameters, those run in which a value of a list comes first; that
on the CPU, and once more on accelerators.
"""
from collections import Counter
from itertools import groupby

import pytest

__all__ = ['first', 'short']


def short(items):
    """Yield the tests that run without ``--whole``."""
    quick = [item for item in items if 'slow' not in item.keywords]
    for _, same in groupby(sorted(quick, key=_kind), key=_kind):
        yield from _covering(list(same))


def first(number, values):
    """Return values for ``pytest.mark.parametrize``, of which all but so many are slow."""
    return [value if k < number else pytest.param(value, marks=pytest.mark.slow)
            for k, value in enumerate(values)]


def _kind(item):
    """Return what tests share that differ by their parameters, other than where they run."""
    return item.nodeid.split('[')[0], 'accelerator' in item.keywords


def _covering(items):
    """Return so many tests that each value of each list of parameters is there, few of them."""
    values = {item: _values(item) for item in items}
    missing, used = set().union(*values.values()), Counter()
    while missing:
        # What is there already is there about equally often.
        best = max(items, key=lambda item: (
            len(values[item] & missing), -sum(used[value] for value in values[item])))
        yield best
        missing -= values[best]
        used.update(values[best])


def _values(item):
    """Return a key for the value that a test has of each list of parameters."""
    params = item.callspec.params if hasattr(item, 'callspec') else {}
    lists = [mark.args[0] for mark in item.iter_markers('parametrize')]
    lists = [names.replace(' ', '').split(',') if isinstance(names, str) else names
             for names in lists]
    lists += [[name] for name in params if not any(name in names for names in lists)]
    return {tuple((name, id(params[name])) for name in names) for names in lists} or {()}
