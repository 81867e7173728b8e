"""Values of any nesting: the rebuilt value equals the original."""

import enum
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch.utils import _pytree

from torchgpipe.base.structure import NoChunk, flatten, flatten_nested, leaves_of, path_name

X, Y = torch.zeros(2), torch.ones(3)


class Pair(NamedTuple):
    """A named tuple."""

    x: object
    y: object


@dataclass(frozen=True)
class Frozen:
    """A dataclass that cannot be changed, and counts how often it is made."""

    x: object
    rest: object = None
    made: list = field(default_factory=list, compare=False)

    def __post_init__(self):
        self.made.append(1)


@dataclass(slots=True)
class Slots:
    """A dataclass without a dictionary."""

    x: object
    unset: object = field(init=False)


class Color(enum.Enum):
    """A plain value."""

    RED = 1


class Output(OrderedDict):
    """A class that pytree has to be told of."""


_pytree.register_pytree_node(
    Output,
    lambda value: (list(value.values()), list(value)),
    lambda values, keys: Output(zip(keys, values)),
)

VALUES = [
    X,
    (X,),
    (X, Y),
    [X],
    [X, [Y, ()]],
    {'x': X, 'n': 3, 'none': None},
    Pair(X, None),
    Pair({'x': [Y]}, X),
    OrderedDict(b=X, a=Y),
    defaultdict(list, a=X),
    Output(z=X, a=1),
    (X, 'text', 2.5, True, Color.RED, torch.float, torch.Size([2, 3]), slice(1), b'b', 1j),
    torch.max(torch.zeros(2, 2), 0),
    {'pair': Pair(X, Frozen({'y': Y}, [Y, None]))},
    Slots([X]),
]


def same(a, b):
    """Compare two values, their types and the identity of their tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, dict):
        return [*a] == [*b] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (Frozen, Slots)):
        return all(
            same(getattr(a, name, None), getattr(b, name, None))
            for name in type(a).__dataclass_fields__
        )
    return a == b


def test_it_comes_out_as_it_went_in():
    for value in VALUES:
        tensors, kind = flatten(value)
        assert same(kind(tensors), value)
        assert kind == flatten(value)[1]
        assert [
            leaf.value for leaf in leaves_of(value) if isinstance(leaf.value, torch.Tensor)
        ] == [*tensors]
        doubled = kind([x.double() for x in tensors])
        assert type(doubled) is type(value)
        assert all(x.dtype == torch.double for x in flatten(doubled)[0])


def test_a_dataclass_is_not_initialised_again():
    value = Frozen(X)
    tensors, kind = flatten(value)
    kind(tensors)
    assert value.made == [1]


def test_other_attributes_of_a_dataclass_stay():
    value = Frozen(X)
    object.__setattr__(value, 'cache', Y)
    tensors, kind = flatten(value)
    assert kind(tensors).cache is Y


def test_containers_of_tensors_are_built_anew():
    value = {'x': X}
    tensors, kind = flatten(value)
    kind(tensors)['x'] = Y
    assert kind(tensors) == value == {'x': X}


def test_other_structures_are_not_equal():
    for a, b in [
        ({'x': X}, {'y': X}),
        ({'n': 1, 'x': X}, {'n': 2, 'x': X}),
        ([X], [X, Y]),
        ([X], [[X]]),
        (Frozen(X), {'x': X}),
        (Frozen(X), Frozen(X, 1)),
        (Pair(X, Y), (X, Y, None)),
    ]:
        assert flatten(a)[1] != flatten(b)[1]


class Opaque:
    """A type that cannot be taken apart."""


def test_a_leaf_that_will_not_do_is_named():
    for value, where in [
        (Opaque(), 'Opaque as the value'),
        ({'a': [X, Opaque()]}, r"Opaque as value\['a'\]\[1\]"),
        (Pair(X, {1}), r'set as value\.y'),
        (Frozen(X, {'k': Opaque()}), r"Opaque as value\.rest\['k'\]"),
        (Output(a=X, b=Opaque()), r'Opaque as value\[1\]'),
        (None, 'NoneType as the value'),
        ([1, None], 'list as the value'),
        (Frozen, 'type as the value'),
    ]:
        with pytest.raises(TypeError, match=f'expected Tensor, but got {where}; .*pytree'):
            flatten(value)


def test_a_mapping_that_is_no_dict_is_neither_one_value_nor_several():
    """As the batch of a tokenizer."""
    for value, where in [
        (UserDict(x=X), 'UserDict as the value'),
        ([X, UserDict(x=X)], r'UserDict as value\[1\]'),
    ]:
        with pytest.raises(
            TypeError,
            match=rf'got {where}\. .*model\(\*\*batch\), or Arguments'
            r'\(\*\*batch\) .* dict\(batch\)$',
        ):
            flatten(value)
        with pytest.raises(TypeError, match='pytree'):
            flatten({'n': 3})


def test_marks():
    value = [X, NoChunk({'t': Frozen(Y)}), NoChunk(3)]
    tensors, kind = flatten_nested(value)
    assert same(kind(tensors), [X, {'t': Frozen(Y)}, 3])
    assert [(path_name(leaf.path), leaf.shared) for leaf in leaves_of(value)][:2] == [
        ('[0]', False),
        ("[1]['t'].x", True),
    ]
    assert repr(NoChunk(3)) == 'NoChunk(3)'
    with pytest.raises(TypeError, match='Opaque'):
        flatten_nested([X, NoChunk(Opaque())])
    with pytest.raises(TypeError, match=r"got NoChunk at value\['x'\]; it marks"):
        flatten({'x': NoChunk(X)})
