"""Attributes of modules: the detected changes, and the objects that a copy shares."""
from collections import Counter, OrderedDict, defaultdict, deque

import torch
from torch import nn

from tests.cases import cases
from torchgpipe.engine.checkpoint.state import (attributes_of, contents_of, copy_of_container,
                                                may_be_mutated)


class Module(nn.Module):
    """A module with one attribute."""

    def __init__(self, value):
        super().__init__()
        self.value = value


def changes(value, change):
    """Return whether a change of a module is noticed."""
    module = Module(value)
    before = attributes_of(module)
    contents = {name: contents_of(name, value) for name, value in before.items()}
    change(module)
    return may_be_mutated(before, contents, attributes_of(module))


CHANGES = [(0, lambda module: setattr(module, 'value', 1)),
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
           (torch.zeros(1), lambda module: None)]


@cases('value, change', CHANGES)
def test_changes(value, change):
    assert changes(value, change)


@cases('value, change', CHANGES[:-1])
def test_no_change(value, change):
    assert not changes(value, lambda module: None)


def test_indices_that_python_makes_anew_are_no_change():
    assert not changes([0] * 1000, lambda module: None)


def test_what_is_the_users_to_change():
    """Hooks, children, and values outside Python's own containers are not compared."""
    assert not changes(0, lambda module: module.register_forward_hook(print))
    assert not changes(0, lambda module: module.register_module('child', nn.ReLU()))


def test_a_copy_has_containers_of_its_own():
    leaf = object()
    value = {'a': [leaf, deque([1], maxlen=2)], 'b': defaultdict(int)}
    value['itself'] = value
    copy = copy_of_container(value)
    assert copy['itself'] is copy and copy['a'][0] is leaf
    copy['a'][1].append(2), copy['a'][1].append(3), copy['b']['x']
    assert copy['a'][1] == deque([2, 3]) and copy['b'] == {'x': 0}
    assert value['a'][1] == deque([1]) and value['b'] == {}
