"""Sharded parameters: the split dimension, in tags of tensors, and the length of each shard.

A tag is an attribute of one tensor object. The result of an operation on that tensor has no tag.
So the functions of this package tag their results, and never their inputs. If a tag was lost, the
autograd graph may still show that a tensor is a shard.

Attributes of the parameter hold the full shape and the tag.

All shards have the size of the first one, except the last ones, which may be smaller or empty.
``torch.chunk`` and DTensors split in the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from torchgpipe.shard.world import current

#: The attribute that holds the parallel dimension: None for a full tensor, or 0, 1, -1.
_PARALLEL_DIM = 'parallel_dim'

#: The attribute that holds the order of a weight: 0 for (out, in), 1 for (number, features).
_ORDER_ATTR = 'order_type'

#: The dimension in memory along which a weight is split, by its order and its parallel dimension.
_STORAGE = {0: {None: None, 0: 1, 1: 0, -1: 0}, 1: {None: None, 0: 0, 1: 1, -1: 1}}


def shard(size: int, n: int, rank: int) -> tuple[int, int]:
    """Return where a rank's shard begins, and how long it is.

    >>> [shard(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    longest = -(-size // n)
    begin = min(rank * longest, size)
    return begin, min(longest, size - begin)


def local_range(size: int) -> tuple[int, int]:
    """Return where the shard of this rank begins, and how long it is."""
    world = current()
    return shard(size, world.tensor_size, world.tensor_rank)


def find(index: int, size: int) -> int | None:
    """Return where an index is within the shard of this rank; None if it is not there."""
    begin, length = local_range(size)
    return index - begin if begin <= index < begin + length else None


def lengths(size: int, n: int) -> list[int]:
    """Return the lengths of all shards.

    >>> lengths(7, 2), lengths(5, 4)
    ([4, 3], [2, 2, 1, 0])
    """
    return [shard(size, n, rank)[1] for rank in range(n)]


def slice(
    tensor: Tensor, num_partitions: int, dim: int | None = None, contiguous: bool = False
) -> tuple[Tensor, ...]:
    """Cut a tensor into shards, one for each rank; some may be empty.

    >>> import torch
    >>> [piece.tolist() for piece in slice(torch.arange(5), 4)]
    [[0, 1], [2, 3], [4], []]

    Args:
        tensor: The tensor to cut.
        num_partitions: The number of shards.
        dim: The dimension that is cut; the last one by default.
        contiguous: Whether each shard is made contiguous in memory.

    Returns:
        Views of the tensor; copies where a shard has to be made contiguous.

    Raises:
        ValueError: The number of shards is less than one.
    """
    if num_partitions < 1:
        raise ValueError(f'a tensor is cut into at least one shard, not {num_partitions}')
    dim = -1 if dim is None else dim
    pieces = torch.split(tensor, lengths(tensor.size(dim), num_partitions), dim)
    if contiguous:
        return tuple(piece.contiguous() for piece in pieces)
    return tuple(pieces)


def check_dim(dim: Any) -> int | None:
    """Return a parallel dimension; raise if it is not a valid one."""
    if dim not in _STORAGE[0] or isinstance(dim, bool):
        raise ValueError(f'a parallel dimension is None, 0, 1 or -1, not {dim!r}')
    parallel_dim: int | None = dim
    return parallel_dim


def register_parallel_dim(tensor: Tensor, dim: int | None = None) -> None:
    """Tag a tensor with its parallel dimension.

    For an activation, 1 and -1 mean that its last dimension is this rank's shard, and None means
    that it is full.

    Raises:
        ValueError: There is no such parallel dimension.
    """
    setattr(tensor, _PARALLEL_DIM, check_dim(dim))


def register_parallel_attribute(
    tensor: Tensor, dim: int | None = None, order_type: int = 0
) -> None:
    """Tag a weight with its parallel dimension and its order.

    Args:
        tensor: This rank's shard of a weight.
        dim: Its parallel dimension. In order 0, 1 and -1 split the outputs, 0 the inputs. In order
            1, 0 splits the rows, 1 and -1 the columns.
        order_type: 0 for a bias, or a weight of shape (out, in), as in a linear layer; 1 for a
            weight of shape (number, features), as in an embedding.

    Raises:
        ValueError: There is no such parallel dimension, or no such order.
    """
    if order_type not in _STORAGE:
        raise ValueError(
            f'the order of a weight is 0, (out, in), or 1, (number, features), not {order_type!r}'
        )
    register_parallel_dim(tensor, dim)
    setattr(tensor, _ORDER_ATTR, order_type)


def set_attribute(tensor: Tensor, dim: int | None = None, order_type: int = 0) -> None:
    """Tag a weight: an alias of :func:`ts.register_parallel_attribute`."""
    register_parallel_attribute(tensor, dim, order_type)


def get_parallel_dim(tensor: Tensor) -> int | None:
    """Return the parallel dimension of a tensor; None if it has no tag."""
    dim: int | None = getattr(tensor, _PARALLEL_DIM, None)
    return dim


def tagged_full(tensor: Tensor) -> Tensor:
    """Tag a new tensor as the same on all ranks, and return it."""
    register_parallel_dim(tensor, None)
    return tensor


def is_tagged(tensor: Tensor) -> bool:
    """Return whether a tensor has a tag."""
    return hasattr(tensor, _PARALLEL_DIM)


def is_split(tensor: Tensor) -> bool:
    """Return whether the last dimension of an activation is this rank's shard."""
    return get_parallel_dim(tensor) in (1, -1)


def storage_dim(parameter: Tensor) -> int | None:
    """Return the dimension in memory along which a weight is split, if it is."""
    return to_storage(get_parallel_dim(parameter), getattr(parameter, _ORDER_ATTR, 0))


def to_storage(dim: int | None, order: int) -> int | None:
    """Return the dimension in memory that a parallel dimension stands for."""
    return _STORAGE[order][dim]


def sharded_parameters(module: nn.Module, prefix: str = '') -> dict[str, nn.Parameter]:
    """Return the parameters of a module that are shards, by all of their names."""
    return {
        prefix + name: parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if storage_dim(parameter) is not None
    }


def is_made_of_shards(tensor: Tensor) -> bool:
    """Return whether autograd has recorded that a tensor results from this rank's shards.

    It does if its graph leads to a parameter that is split, or to a function with `makes_shards`,
    which splits a full tensor. The search ends at other custom autograd functions, such as
    functions that join shards, because their effect is unknown.
    """
    waiting: list[Any] = [tensor.grad_fn]
    seen = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, 'variable', None)
        if getattr(node, 'makes_shards', False) or (
            leaf is not None and storage_dim(leaf) is not None
        ):
            return True
        if not isinstance(node, BackwardCFunction):
            waiting += [other for other, _ in node.next_functions]
    return False


_GLOBAL_SHAPE = '_global_shape'


@dataclass(frozen=True)
class Layout:
    """The full tensor of a sharded parameter: its shape and its parallel dimension."""

    shape: tuple[int, ...]
    dim: int | None = None
    order: int = 0

    @property
    def storage(self) -> int | None:
        """The dimension in memory that is split; None if each rank has the full tensor."""
        return to_storage(self.dim, self.order)

    def local_shape(self) -> list[int]:
        """Return the shape of this rank's shard."""
        return _local(self.shape, self.storage)

    def tag(self, parameter: Tensor) -> None:
        """Set the tag and the full shape of a parameter."""
        register_parallel_attribute(parameter, self.dim, self.order)
        setattr(parameter, _GLOBAL_SHAPE, torch.Size(self.shape))

    def check(self, name: str, parameter: Tensor) -> None:
        """Raise if a parameter cannot take the place of this one."""
        if list(parameter.shape) != self.local_shape():
            raise ValueError(
                f'{name} has the shape {tuple(parameter.shape)}; the shard of rank '
                f'{current().tensor_rank} of {current().tensor_size} has '
                f'{tuple(self.local_shape())}, of {tuple(self.shape)} as a full tensor'
            )
        if is_tagged(parameter) and storage_dim(parameter) != self.storage:
            raise ValueError(
                f'{name} is split along dimension {self.storage} in memory, and this parameter '
                f'along {storage_dim(parameter)}: it cannot stand for it'
            )


def knows_shape(parameter: Tensor) -> bool:
    """Return whether a parameter has an attribute with its full shape."""
    return hasattr(parameter, _GLOBAL_SHAPE)


def global_shape(parameter: Tensor) -> torch.Size:
    """Return the full shape of a parameter; raise if it is a shard without this attribute."""
    if not knows_shape(parameter) and storage_dim(parameter) is not None:
        raise ValueError(
            f'a parameter of shape {tuple(parameter.shape)} is tagged as a shard, and nothing '
            'says of what: let its module derive from ts.nn.ParallelModule, and add it by '
            'register_part(name, shape, dim)'
        )
    shape: torch.Size = getattr(parameter, _GLOBAL_SHAPE, parameter.shape)
    return shape


def shard_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of this rank's shard of a parameter, whatever its current shape."""
    return torch.Size(_local(global_shape(parameter), storage_dim(parameter)))


def _local(shape: Sequence[int], dim: int | None) -> list[int]:
    local = list(shape)
    if dim is not None:
        local[dim] = local_range(shape[dim])[1]
    return local


def place(tensor: Tensor) -> tuple[Any, ...]:
    """Return the place of a tensor in memory, which entries of tied parameters have in common."""
    return id(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride()


def dtensor(parameter: Tensor, local: Tensor | None = None) -> Any:
    """Return a parameter's view as a DTensor, which has the full shape and the placement.

    Args:
        parameter: A parameter of a sharded layer, or any other parameter, full on each rank.
        local: A tensor of the same form to view instead, such as the gradient.

    Returns:
        A DTensor over the mesh of :func:`ts.distributed.get_mesh`, which shares the memory of this
        rank's shard, and has no graph.
    """
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard  # takes long

    shape = global_shape(parameter)
    dim = storage_dim(parameter)
    placement: Placement = Replicate() if dim is None else Shard(dim)
    stride = tuple(prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(
        (parameter if local is None else local).detach(),
        current().mesh,
        [Replicate(), placement],
        run_check=False,
        shape=shape,
        stride=stride,
    )
