"""Nested values and their tensors: extraction, reconstruction, memory, sizes and copies.

::

    {'x': tensor, 'pair': (tensor, None), 'n': 3}
          │ flatten                       ▲
          ▼                               │ structure(tensors)
    (tensor, tensor)  +  structure: {'x': ·, 'pair': (·, None), 'n': 3}

Containers are dataclasses and the types that PyTorch's pytree supports: tuples, lists, dicts and
registered classes, such as the outputs of many models. Leaves (:func:`leaves_of`) are tensors,
``None`` and plain Python values. :func:`flatten` returns the tensors and a :class:`Structure`,
which makes new containers at each call. So a layer may change a dict that it gets.

Other functions compare and copy the memory of tensors, such as :func:`share_memory` and
:func:`copy_of`.
"""

import enum
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from numbers import Number
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Buffer

from torchgpipe.base.errors import nested
from torchgpipe.base.private import (
    FakeTensor,
    tree_flatten,
    tree_flatten_with_path,
    tree_unflatten,
)

Tensors = tuple[Tensor, ...]

#: Tensors, each with its gradient.
Gradients = list[tuple[Tensor, Tensor]]

#: The bytes at which a bucket of gradients ends, as in PyTorch's DDP.
BUCKET = 25 * 2**20

#: The number of blocks of rows into which the loss of many split scores is divided. Blocks reduce
#: the further memory, besides scores and gradient, for a few more operations.
LOSS_BLOCKS = 8

#: The largest number of scores in a single block.
LOSS_BLOCK = 1 << 20

#: The results of a backward.
Grads = tuple[Tensor | None, ...]

# Memory: identity, versions, sizes and copies.

#: Copies of memories, by the :func:`storage_id` of their sources.
Memories = dict[int, Tensor]


def storage_id(tensor: Tensor) -> int:
    """Return an id of a tensor's memory, even if it is empty or on the meta device.

    A memory has one Python object for as long as it lives. ``data_ptr()`` is 0 for empty memories
    and for the meta device.
    """
    return id(tensor.untyped_storage())


def local_storage_id(x: Tensor) -> int:
    """Return the :func:`storage_id` of a tensor, or of this rank's part of a DTensor.

    Tensors of other types have an id that no other tensor has.
    """
    x = x.detach()
    if hasattr(x, 'to_local'):
        x = x.to_local()
    return storage_id(x) if is_plain(x) else id(x)


def share_memory(
    tensors: Iterable[Tensor],
    candidates: Iterable[Tensor],
) -> bool:
    """Return whether any tensor lies in the memory of any of the candidates."""
    memories = set()
    for y in candidates:
        # Tensors of other layouts have several memories, or none that can be compared.
        if y.layout is torch.strided:
            memories.add(storage_id(y))

    for x in tensors:
        if x.layout is not torch.strided:
            continue
        if storage_id(x) in memories:
            return True
    return False


def is_among(x: Tensor, candidates: Iterable[Tensor]) -> bool:
    """Return whether a tensor has the same elements in memory as one of the candidates."""
    for y in candidates:
        if not (x.layout is y.layout is torch.strided):
            continue
        if x is y or _place(x) == _place(y):
            return True
    return False


def _place(x: Tensor) -> tuple[object, ...]:
    return (
        storage_id(x),
        x.storage_offset(),
        x.shape,
        x.stride(),
    )


def check_nested(x: Tensor) -> None:
    """Raise if a nested tensor has the strided layout, whose sizes are not available."""
    if x.layout is torch.strided:
        raise nested()


def size_of(x: Tensor) -> int:
    """Return the bytes of a tensor's elements, including the indices of a sparse tensor."""
    if x.layout is torch.strided:
        return x.numel() * x.element_size()
    if x.layout is torch.sparse_coo:
        return size_of(x._values()) + size_of(x._indices())
    # A compressed layout has an index of eight bytes for each value. The few offsets of rows are
    # neglected.
    return x.values().numel() * x.element_size() + 8 * x._nnz()


#: The types of tensors whose memory belongs to them, so that it can be copied and compared.
PLAIN_TYPES = {Tensor, nn.Parameter, Buffer, FakeTensor}


def is_plain(x: Any) -> bool:
    """Return whether a value is an ordinary strided tensor, or a fake one; not a subclass."""
    return type(x) in PLAIN_TYPES and x.layout is torch.strided


def copy_of(x: Tensor, memories: Memories) -> Tensor:
    """Copy a tensor; tensors that share a memory share its copy."""
    x = x.detach()
    if not is_plain(x):
        return x.clone()
    memory = x.untyped_storage()
    key = storage_id(x)
    copy = memories.get(key)
    if copy is None:
        # A tensor that fills its memory keeps its strides in a clone, and so the same layout.
        if memory.nbytes() == size_of(x):
            copy = x.clone()
        else:
            copy = _view(memory.clone(), x)
        memories[key] = copy
        return copy
    return view_of(copy, x)


def view_of(copy: Tensor, x: Tensor) -> Tensor:
    """Return a view of a copy's memory, at the same place as ``x`` in its own memory."""
    return _view(copy.untyped_storage(), x)


def _view(memory: torch.UntypedStorage, x: Tensor) -> Tensor:
    view = torch.empty(0, dtype=x.dtype, device=x.device)
    return view.set_(
        memory,
        x.storage_offset(),
        x.size(),
        x.stride(),
    )


#: A tensor, or any structure of tensors: see :mod:`torchgpipe.base.structure`.
Value = Any

#: The function of a cell: a partition, or any callable from value to value.
Function = Callable[[Value], Value]

#: The place of a parameter or a buffer: a module and a name.
Slot = tuple[nn.Module, str]


# Leaves and their paths.


#: The place of a leaf: keys, indices and names of attributes, from the outside to the inside.
Path = tuple[Any, ...]


class NoChunk:
    """Mark a part of an input that all micro-batches share: ``model(x, NoChunk(table))``.

    The value inside, of any nesting, is passed to the first layer unchanged, without the mark. Its
    gradient is the sum over micro-batches.

    Args:
        value: A tensor of any shape, or a value with tensors in it.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f'NoChunk({self.value!r})'


def is_leaf(value: Any) -> bool:
    """Return whether a value is a leaf that pytree would flatten."""
    return isinstance(value, torch.Size)  # which would be reconstructed as a tuple


def is_object(value: Any) -> bool:
    """Return whether a value is an instance of a dataclass, which is a container."""
    return is_dataclass(value) and not isinstance(value, type)


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a dataclass instance, including attributes that are not fields."""
    # A dictionary, because the order of attributes is the order of tensors.
    names = dict.fromkeys([field.name for field in fields(value)])
    # A dataclass with slots does not have a dictionary.
    names.update(getattr(value, '__dict__', {}))
    values = {}
    for name in names:
        # A field may not have a value yet.
        if hasattr(value, name):
            values[name] = getattr(value, name)
    return values


@dataclass(slots=True, eq=False)
class Leaf:
    """A leaf of a value."""

    path: Path
    value: Any
    #: Whether it is inside of a :class:`NoChunk`.
    shared: bool


def leaves_of(
    value: Any,
    path: Path = (),
    shared: bool = False,
) -> list[Leaf]:
    """Return all leaves of a value, with their paths, in the order of :func:`flatten`.

    >>> [(path_name(leaf.path), leaf.value) for leaf in leaves_of({'n': (3, NoChunk([4]))})]
    [("['n'][0]", 3), ("['n'][1][0]", 4)]
    """
    leaves = []
    # Pytree treats a dataclass and a mark as leaves, so their contents are added here.
    for keys, item in _with_paths(value):
        place = path + keys
        if isinstance(item, NoChunk):
            leaves += leaves_of(item.value, place, True)
        elif is_object(item):
            for name, attribute in attributes(item).items():
                leaves += leaves_of(attribute, (*place, _Attribute(name)), shared)
        else:
            leaves.append(Leaf(place, item, shared))
    return leaves


class _Attribute(str):
    """The name of an attribute, in a path."""

    __slots__ = ()


def _with_paths(value: Any) -> list[tuple[Path, Any]]:
    try:
        items, _ = tree_flatten_with_path(value, is_leaf=is_leaf)
    except ValueError:  # A class is registered without names for its contents.
        leaves, _ = tree_flatten(value, is_leaf=is_leaf)
        return [((k,), leaf) for k, leaf in enumerate(leaves)]
    return [(tuple(map(_key, entries)), leaf) for entries, leaf in items]


def _key(entry: Any) -> Any:
    """Return a dict's key, a sequence's index or an attribute's name from a pytree path."""
    for name in ('key', 'idx'):
        if hasattr(entry, name):
            return getattr(entry, name)
    return _Attribute(entry.name)


def path_name(path: Path) -> str:
    """Format a path as a Python expression: ``['labels'][0].x``."""
    name = ''
    for key in path:
        if isinstance(key, _Attribute):
            name += f'.{key}'
        else:
            name += f'[{key!r}]'
    return name


def item_at(value: Any, path: Path) -> Any:
    """Return the item of a value at a path.

    >>> item_at({'labels': [3, 4]}, ('labels', 1))
    4
    """
    for key in path:
        if isinstance(key, _Attribute):
            value = getattr(value, key)
        else:
            value = value[key]
    return value


# Structures: extraction of tensors, and reconstruction.


#: Reconstructs a value from its tensors.
Kind = Callable[[Sequence[Tensor]], Any]

#: The kind of a value that is a tensor itself.
bare: Kind = itemgetter(0)

#: Types of leaves other than tensors. They are the same for all micro-batches, and are not moved.
PLAIN = (
    type(None),
    Number,
    str,
    bytes,
    enum.Enum,
    slice,
    range,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)


class _TENSOR:
    """The mark of a tensor's place in a structure: a class, whose identity pickling keeps."""


@dataclass(init=False, eq=False)
class Arguments:
    """Several arguments for a first layer: ``Arguments(ids, attention_mask=mask)``.

    A :class:`~torchgpipe.GPipe` is called with several arguments directly. This class replaces
    them where one value is required, such as the sample for measuring a balance.

    >>> import torch
    >>> value = Arguments(torch.zeros(2), scale=3)
    >>> value.args, value.kwargs
    ((tensor([0., 0.]),), {'scale': 3})
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs


def call(
    function: Callable[..., Any],
    value: Any,
) -> Any:
    """Call a function with a value, or with several arguments from :class:`Arguments`."""
    if type(value) is Arguments:
        return function(*value.args, **value.kwargs)
    return function(value)


@dataclass(slots=True)
class Structure:
    """The nesting of a value, which reconstructs the value from tensors."""

    #: The specification of pytree.
    _spec: Any
    #: In place of each tensor its mark, and in place of a dataclass instance its structure.
    _leaves: list[Any]
    #: The dataclass, if the value is an instance of one. Then the rest is for its attributes.
    _cls: type | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        return self._build(iter(tensors))

    def _build(self, tensors: Iterator[Tensor]) -> Any:
        leaves = []
        for leaf in self._leaves:
            if leaf is _TENSOR:
                leaves.append(next(tensors))
            elif isinstance(leaf, Structure):
                leaves.append(leaf._build(tensors))
            else:
                leaves.append(leaf)
        value = tree_unflatten(leaves, self._spec)
        if self._cls is None:
            return value
        # Without `__init__`, which may do any work, and even if the dataclass is frozen.
        instance: Any = object.__new__(self._cls)
        for name, attribute in value.items():
            object.__setattr__(instance, name, attribute)
        return instance

    def __reduce__(self) -> Any:
        # Pickling a specification of pytree warns. Pickling an example of the value does not.
        example = tree_unflatten(range(len(self._leaves)), self._spec)
        return _restore, (example, self._leaves, self._cls)


def _restore(
    example: Any,
    leaves: list[Any],
    cls: type | None,
) -> Structure:
    return Structure(tree_flatten(example)[1], leaves, cls)


@dataclass(frozen=True)
class Repeated:
    """The kind of a value that contains a tensor in several places."""

    kind: Kind
    #: By place, the index of its tensor. At their first places, indices ascend.
    where: tuple[int, ...]

    def spread(self, tensors: Sequence[Tensor]) -> Tensors:
        """Return the tensor of each place."""
        return tuple([tensors[k] for k in self.where])

    def collect(self, tensors: Sequence[Tensor]) -> Tensors:
        """Return each tensor once, from the tensors of all places.

        If the number of places differs, return all tensors.
        """
        if len(tensors) != len(self.where):
            return tuple(tensors)
        unique: list[Tensor] = []
        for index, x in zip(self.where, tensors):
            if index == len(unique):
                unique.append(x)
        return tuple(unique)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        return self.kind(self.spread(tensors))


@dataclass(frozen=True)
class Annotated:
    """The kind of a value whose tensors have attributes, such as ``y.scale = 2``."""

    kind: Kind
    #: The attributes of each tensor. Their containers are created again at each call.
    attributes: tuple[dict[str, Structure], ...]

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        for x, attributes in zip(tensors, self.attributes):
            if isinstance(x, Tensor):  # In an error message, shapes replace tensors.
                for name, structure in attributes.items():
                    x.__dict__[name] = structure(())
        return self.kind(tensors)


def annotated(tensors: Sequence[Tensor], kind: Kind) -> Kind:
    """Return a kind that also restores the attributes that tensors have now.

    Each partition gets new tensors, which may be copies on another device or in another process.
    So a tensor loses its attributes, unless its kind restores them. Parameters and other
    subclasses of tensors have attributes of their own, which are not restored.

    >>> import torch
    >>> x = torch.zeros(2)
    >>> x.scale = 3
    >>> annotated([x], bare)([torch.ones(2)]).scale
    3

    Raises:
        TypeError: An attribute is not a plain value, nor a container of plain values.
    """
    attributes = tuple([_attributes_of(x) for x in tensors])
    if not any(attributes):
        return kind
    return Annotated(kind, attributes)


def _attributes_of(x: Tensor) -> dict[str, Structure]:
    if type(x) is not Tensor:
        return {}
    structures = {}
    for name, value in x.__dict__.items():
        # `torch.compile` marks dimensions of tensors as dynamic, for itself.
        if not name.startswith('_dynamo'):
            structures[name] = _plain_structure(name, value)
    return structures


def _plain_structure(name: str, value: Any) -> Structure:
    """Return the structure of a tensor's attribute, which has no tensors."""
    leaves, spec = tree_flatten(value, is_leaf=is_leaf)
    for leaf in leaves:
        if not isinstance(leaf, PLAIN):
            raise TypeError(
                f"a tensor has the attribute '{name}', a {type(value).__name__}: the next "
                'partition gets only attributes of plain values, such as numbers and strings, and '
                'containers of these. Pass the other value beside the tensor, in a tuple or a dict'
            )
    return Structure(spec, leaves)


def once(
    tensors: Sequence[Tensor],
    kind: Kind,
    keys: Iterable[Hashable] = (),
) -> tuple[Tensors, Kind]:
    """Return each tensor once, and the kind that reconstructs the value from them."""
    numbers: dict[Hashable, int] = {}
    where = []
    for key in keys or map(id, tensors):
        where.append(numbers.setdefault(key, len(numbers)))
    if len(numbers) == len(where):
        return tuple(tensors), kind
    repeated = Repeated(kind, tuple(where))
    return repeated.collect(tensors), repeated


def flatten(value: Any) -> tuple[Tensors, Kind]:
    """Return the tensors of a value, and the kind that reconstructs the value from tensors.

    >>> import torch
    >>> tensors, kind = flatten({'x': torch.zeros(1), 'n': 3})
    >>> tensors, kind([torch.ones(1)])
    ((tensor([0.]),), {'x': tensor([1.]), 'n': 3})

    Raises:
        TypeError: The value has no tensor, or a leaf is neither a tensor nor a plain value.
    """
    # Most outputs are a tensor or a tuple of tensors. For these, pytree would take most of the
    # time.
    if isinstance(value, Tensor):
        return (value,), bare
    if type(value) is tuple:
        for x in value:
            if not isinstance(x, Tensor):
                break
        else:
            return value, tuple
    return flatten_nested(value, marks=False)


def flatten_nested(
    value: Any,
    marks: bool = True,
    takes: type = Tensor,
) -> tuple[tuple[Any, ...], Structure]:
    """Flatten a value as :func:`flatten` does, and remove :class:`NoChunk` marks."""
    tensors: list[Any] = []
    structure = _flatten(value, tensors, marks, takes)
    if structure is None or not tensors:
        raise _refuse(value, marks)
    return tuple(tensors), structure


def _flatten(
    value: Any,
    tensors: list[Any],
    marks: bool,
    takes: type,
) -> Structure | None:
    """Append the tensors of a value to a list; return ``None`` if a leaf is not allowed."""
    leaves, spec = tree_flatten(value, is_leaf=is_leaf)
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, takes):
            tensors.append(leaf)
            leaves[k] = _TENSOR
        elif is_object(leaf):
            part = _flatten(attributes(leaf), tensors, marks, takes)
            if part is None:
                return None
            part._cls = type(leaf)
            leaves[k] = part
        elif marks and isinstance(leaf, NoChunk):
            part = _flatten(leaf.value, tensors, marks, takes)
            if part is None:
                return None
            leaves[k] = part
        elif not isinstance(leaf, PLAIN):
            return None
    return Structure(spec, leaves)


def _refuse(value: Any, marks: bool) -> TypeError:
    for leaf in leaves_of(value):
        if leaf.shared and not marks:
            return TypeError(
                f'expected Tensor, but got NoChunk at value{path_name(leaf.path)}; '
                'it marks what a model is called with, and layers get and give what '
                'is inside of it'
            )
        if not isinstance(leaf.value, (Tensor, *PLAIN)):
            where = 'the value'
            if leaf.path:
                where = 'value' + path_name(leaf.path)
            # Not a dict, which is a container. A `BatchEncoding` of Transformers is one.
            if isinstance(leaf.value, Mapping):
                return TypeError(
                    f'expected Tensor, but got {type(leaf.value).__name__} as {where}. If its '
                    'keys are names of arguments, pass model(**batch), or Arguments(**batch) '
                    'where one value is expected. If it is one argument, pass dict(batch)'
                )
            return _not_a_tensor(leaf.value, where)
    return _not_a_tensor(value, 'the value')


def _not_a_tensor(value: Any, where: str) -> TypeError:
    return TypeError(
        f'expected Tensor, but got {type(value).__name__} as {where}; into a pipeline, out of it '
        'and between partitions go tensors, and tuples, lists, dicts and dataclasses with '
        'tensors, None and plain Python values in them. Register a class of your own with '
        "PyTorch's pytree, or make it a dataclass"
    )
