"""What runs without ``--whole``: each value of each list of parameters, and nothing slow."""
from itertools import product
from types import SimpleNamespace

import pytest

from tests.whole import first, short


class Item(SimpleNamespace):
    """A test as pytest collects it."""

    __hash__ = object.__hash__

    def iter_markers(self, name):
        """Yield its marks of ``parametrize``."""
        return iter(self.marks)


def collected(lists, keywords=(), name='test'):
    """Return tests with the product of some lists, whose names may be several: ``'a, b'``."""
    marks = [pytest.mark.parametrize(names, values).mark for names, values in lists.items()]
    found = []
    for chosen in product(*lists.values()):
        params = {}
        for names, values in zip(lists, chosen):
            params.update(zip(names.split(', '), values) if ', ' in names else {names: values})
        found.append(Item(nodeid=f'{name}[{len(found)}]', keywords=keywords, marks=marks,
                          callspec=SimpleNamespace(params=params)))
    return found


def test_each_value_comes_on_the_cpu_and_on_accelerators():
    lists = {'mode': ['always', 'never', 'last'], 'chunks': [1, 2, 3, 4], 'view': [False, True]}
    items = [*collected(lists), *collected(lists, {'accelerator'})]
    kept = [*short(items)]
    assert len(kept) == 8 and len(items) == 48
    for keywords in ((), {'accelerator'}):
        found = [item.callspec.params for item in kept if item.keywords == keywords]
        for name, values in lists.items():
            assert {params[name] for params in found} == {*values}
        assert sorted(params['view'] for params in found) == [False, False, True, True]


@pytest.mark.parametrize('lists, number', [
    ({}, 1), ({'a': [1, 2, 3]}, 3), ({'a, b': [(1, 1), (1, 2), (2, 1), (2, 2)]}, 4),
    ({'a, b': [(1, 1), (1, 2)], 'c': [1, 2, 3]}, 3)])
def test_what_no_other_test_has_is_kept(lists, number):
    assert len([*short(collected(lists))]) == number


def test_what_is_slow_is_left_out():
    assert [*short([*collected({}, {'slow'}, 'a'), *collected({}, name='b')])] != []
    assert [*short(collected({'a': [1, 2]}, {'slow'}))] == []
    assert [getattr(value, 'marks', ()) != () for value in first(1, 'abc')] == [False, True, True]
