"""Attributes of modules: the detected changes, and the objects that a copy shares."""

from collections import Counter, OrderedDict, defaultdict, deque

import torch
from torch import nn

from torchgpipe.engine.checkpoint.observation import (
    LayerRecorder,
    Observed,
    copy_of_value,
    tensors_in,
)


class Module(nn.Module):
    """A module with one attribute."""

    def __init__(self, value):
        super().__init__()
        self.value = value


def changes(value, change):
    """Return whether a change of a module is noticed."""
    module, observed = Module(value), Observed()
    recorder = LayerRecorder([module])
    recorder.run(lambda: change(module))
    recorder.report(observed)
    return bool(observed.mutated or observed.changes_containers or recorder.copies)


CHANGES = [
    (0, lambda module: setattr(module, 'value', 1)),
    ([1], lambda module: module.value.append(2)),
    ([1, 2], lambda module: module.value.reverse()),
    ({1}, lambda module: module.value.add(2)),
    (deque([1], 3), lambda module: module.value.append(1)),
    ({'a': 1}, lambda module: module.value.update(a=2)),
    (OrderedDict(a=1), lambda module: module.value.pop('a')),
    (Counter('a'), lambda module: module.value.update('a')),
    (defaultdict(list), lambda module: module.value['a']),
    ({'a': {'b': [1]}}, lambda module: module.value['a']['b'].append(2)),
    ([[[0]]], lambda module: module.value[0][0].__setitem__(0, 1)),
    ([torch.zeros(2)], lambda module: module.value.__setitem__(0, torch.zeros(2))),
    (None, lambda module: setattr(module, 'other', 1)),
    ([{'a': torch.zeros(2)}], lambda module: module.value[0]['a'].add_(1)),
    ((1, [2]), lambda module: module.value[1].append(3)),
    ((torch.zeros(1),), lambda module: module.value[0].data.add_(1)),
    (torch.zeros(1), lambda module: module.value.add_(1)),
]


def test_changes():
    for value, change in CHANGES:
        assert changes(value, change)


def test_no_change():
    for value, change in CHANGES:
        assert not changes(value, lambda module: None)


def test_indices_that_python_makes_anew_are_no_change():
    assert not changes([0] * 1000, lambda module: None)


def test_changes_by_the_user_are_not_observed():
    """Hooks, children, and values outside Python's own containers are not compared."""
    assert not changes(0, lambda module: module.register_forward_hook(print))
    assert not changes(0, lambda module: module.register_module('child', nn.ReLU()))


def test_a_copy_has_containers_of_its_own():
    leaf = object()
    value = {'a': [leaf, deque([1], maxlen=2)], 'b': defaultdict(int)}
    value['itself'] = value
    copy = copy_of_value(value, lambda path, x: x)
    assert copy['itself'] is copy and copy['a'][0] is leaf
    copy['a'][1].append(2), copy['a'][1].append(3), copy['b']['x']
    assert copy['a'][1] == deque([2, 3]) and copy['b'] == {'x': 0}
    assert value['a'][1] == deque([1]) and value['b'] == {}


def test_tensors_and_their_paths():
    x = torch.zeros(1)
    value = ({'a': [x]}, nn.Linear(1, 1), Counter('a'))
    value[0]['itself'] = value[0]
    assert tensors_in(value) == [((0, 'a', 0), x)]
    changed = copy_of_value(value, lambda path, x: path)
    assert changed[0]['a'] == [(0, 'a', 0)] and changed[1] is value[1]


def test_a_tuple_without_other_items_is_not_copied():
    value = 1, ('a', torch.zeros(1))
    assert copy_of_value(value, lambda path, x: x) is value
    assert copy_of_value(torch.ones(2, 3).max(1), lambda path, x: x * 2).values.sum() == 4
