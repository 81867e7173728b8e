"""Nestings: how named leaves are packed into a value, and found in it again."""

import enum
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from torch.utils import _pytree

from torchgpipe import Arguments


class Color(enum.Enum):
    """A plain value."""

    RED = 1


class One(NamedTuple):
    """A named tuple of one."""

    a: object


class Two(NamedTuple):
    """A named tuple of two."""

    a: object
    b: object


@dataclass
class Single:
    """A dataclass of one."""

    a: object


@dataclass(frozen=True)
class Pair:
    """A dataclass of two that cannot be changed."""

    a: object
    b: object


class Output(OrderedDict):
    """A class that pytree has to be told of."""


_pytree.register_pytree_node(
    Output,
    lambda value: (list(value.values()), list(value)),
    lambda values, keys: Output(zip(keys, values)),
    serialized_type_name='tests.Output',
    flatten_with_keys_fn=lambda value: (
        [(_pytree.MappingKey(k), x) for k, x in value.items()],
        list(value),
    ),
)

#: Classes that hold values by attributes, by their number of values.
ATTRIBUTES = {1: [One, Single], 2: [Two, Pair], 3: []}


class Nest:
    """A nesting of named leaves.

    Args:
        choose: Chooses it.
        names: Of the leaves, each of which is somewhere in it.
    """

    def __init__(self, choose, names):
        names = choose.sample(names, len(names))
        number = min(len(names), choose.choice([1, 2, 2, 3]))
        cuts = sorted(choose.sample(range(1, len(names)), number - 1))
        groups = [names[a:b] for a, b in zip([0, *cuts], [*cuts, len(names)])]
        #: Each is a nesting itself, or the name of a leaf.
        self.parts = [
            group[0] if len(group) == 1 and choose.random() < 0.8 else Nest(choose, group)
            for group in groups
        ]
        self.cls = choose.choice(
            [tuple, list, dict, OrderedDict, Output, *ATTRIBUTES[number], *ATTRIBUTES[number]]
        )
        self.is_mapping = issubclass(self.cls, dict)
        self.is_sequence = self.cls in (tuple, list)
        self.keys = (
            list(range(number))
            if self.is_sequence
            else [*choose.choice(['abc', [7, 'x', ('y', 0)]] if self.is_mapping else ['ab'])][
                :number
            ]
        )

    def pack(self, leaves):
        """Make a value of leaves by their names."""
        values = [
            part.pack(leaves) if isinstance(part, Nest) else leaves[part] for part in self.parts
        ]
        if self.is_sequence:
            return self.cls(values)
        return self.cls(zip(self.keys, values)) if self.is_mapping else self.cls(*values)

    def unpack(self, value):
        """Return the leaves of a value by their names; see that it is of the right classes."""
        assert type(value) is self.cls
        found = {}
        for key, part in zip(self.keys, self.parts):
            inner = value[key] if self.is_mapping or self.is_sequence else getattr(value, key)
            found |= part.unpack(inner) if isinstance(part, Nest) else {part: inner}
        return found

    def rule(self, of):
        """Make a rule for values from rules of leaves."""
        rules = [
            part.rule(of) if isinstance(part, Nest) else of.get(part, 0) for part in self.parts
        ]
        return rules if self.cls is tuple else dict(zip(self.keys, rules))


class Bare:
    """No nesting: the leaf called ``x`` by itself."""

    def pack(self, leaves):
        """Return the leaf."""
        return leaves['x']

    def unpack(self, value):
        """Name the leaf."""
        return {'x': value}

    def rule(self, of):
        """Say nothing."""
        return 0


class Several:
    """Several arguments, positional ones and keywords."""

    def __init__(self, choose, names):
        self.names = choose.sample(names, len(names))
        self.number = choose.randint(0, len(names))
        self.nests = {name: Nest(choose, [name]) for name in names if choose.random() < 0.5}

    def pack(self, leaves):
        """Make arguments."""
        values = {
            name: self.nests[name].pack(leaves) if name in self.nests else leaves[name]
            for name in self.names
        }
        positional = self.names[: self.number]
        return Arguments(
            *[values[name] for name in positional],
            **{name: values[name] for name in self.names[self.number :]},
        )

    def unpack(self, value):
        """Return the leaves in them by name."""
        values = dict(zip(self.names, value.args)) | value.kwargs
        return {
            name: self.nests[name].unpack(values[name])[name]
            if name in self.nests
            else values[name]
            for name in self.names
        }

    def rule(self, of):
        """Make a rule for arguments from rules of leaves."""
        return {
            k if k < self.number else name: self.nests[name].rule(of)
            if name in self.nests
            else of.get(name, 0)
            for k, name in enumerate(self.names)
        }
