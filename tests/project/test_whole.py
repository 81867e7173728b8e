"""Tests that run without ``--whole``: each value of most lists of parameters, and nothing slow."""

from itertools import product
from types import SimpleNamespace

import pytest

from tests.devices import DEVICES
from tests.whole import first, short


class Item(SimpleNamespace):
    """A test as pytest collects it."""

    __hash__ = object.__hash__

    def iter_markers(self, name):
        """Yield its marks of ``parametrize``."""
        return iter(self.marks)


def blind(mode):
    """Hand a mode on."""
    return dict(checkpoint=mode)


def looks(mode):
    """Look at a mode."""
    assert mode == 'always'


def collected(lists, keywords=(), name='test.py::test', function=blind):
    """Return tests with the product of some lists, whose names may be several: ``'a, b'``."""
    marks = [pytest.mark.parametrize(names, values).mark for names, values in lists.items()]
    found = []
    for chosen in product(*lists.values()):
        params = {}
        for names, values in zip(lists, chosen):
            params.update(zip(names.split(', '), values) if ', ' in names else {names: values})
        found.append(
            Item(
                nodeid=f'{name}[{len(found)}]',
                keywords=keywords,
                marks=marks,
                callspec=SimpleNamespace(params=params),
                function=function,
            )
        )
    return found


def test_each_value_comes():
    lists = {'size': ['a', 'b', 'c'], 'chunks': [1, 2, 3, 4], 'view': [False, True]}
    found = [item.callspec.params for item in short(collected(lists))]
    assert len(found) == 4
    for name, values in lists.items():
        assert {params[name] for params in found} == {*values}
    assert sorted(params['view'] for params in found) == [False, False, True, True]


def test_one_mode_on_one_kind_of_devices_comes_unless_the_test_looks_at_it():
    lists = {'mode': ['always', 'never'], 'devices': [*DEVICES.values()]}
    assert len([*short(collected(lists))]) == 1
    assert len([*short(collected(lists, function=looks))]) == 2
    found = {
        item.callspec.params['mode']
        for k in range(9)
        for item in short(collected(lists, name=f'test.py::test_{k}'))
    }
    assert found == {'always', 'never'}


def test_one_test_of_a_folder_comes_on_accelerators():
    items = [
        item
        for kind in ('accelerator', 'sim')
        for file in ('a/b.py', 'a/c.py', 'a/d/b.py')
        for item in collected({'chunks': [1, 2]}, {kind}, f'{file}::{kind}')
    ]
    assert [item.nodeid for item in short(items)] == [
        'a/b.py::accelerator[0]',
        'a/d/b.py::accelerator[0]',
    ]


@pytest.mark.parametrize(
    'lists, number',
    [
        ({}, 1),
        ({'a': [1, 2, 3]}, 3),
        ({'a, b': [(1, 1), (1, 2), (2, 1), (2, 2)]}, 4),
        ({'a, b': [(1, 1), (1, 2)], 'c': [1, 2, 3]}, 3),
    ],
)
def test_what_no_other_test_has_is_kept(lists, number):
    assert len([*short(collected(lists))]) == number


def test_what_is_slow_is_left_out():
    assert len([*short([*collected({}, {'slow'}, 'a'), *collected({}, name='b')])]) == 1
    assert [*short(collected({'a': [1, 2]}, {'slow'}))] == []
    assert [getattr(value, 'marks', ()) != () for value in first(1, 'abc')] == [False, True, True]
