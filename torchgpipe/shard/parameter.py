"""Sharded parameters: plain parameters with this rank's shard and the shape of the full tensor.

Attributes of the parameter hold the full shape and the tag.
"""
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from torchgpipe.shard import sizes
from torchgpipe.shard.tags import is_tagged, register_parallel_attribute, storage_dim, to_storage
from torchgpipe.shard.world import current

__all__ = ['Layout', 'dtensor', 'global_shape', 'knows_shape', 'place', 'shard_shape']

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
                f'{tuple(self.local_shape())}, of {tuple(self.shape)} as a full tensor')
        if is_tagged(parameter) and storage_dim(parameter) != self.storage:
            raise ValueError(
                f'{name} is split along dimension {self.storage} in memory, and this parameter '
                f'along {storage_dim(parameter)}: it cannot stand for it')


def knows_shape(parameter: Tensor) -> bool:
    """Return whether a parameter has an attribute with its full shape."""
    return hasattr(parameter, _GLOBAL_SHAPE)


def global_shape(parameter: Tensor) -> torch.Size:
    """Return the full shape of a parameter; raise if it is a shard without this attribute."""
    if not knows_shape(parameter) and storage_dim(parameter) is not None:
        raise ValueError(
            f'a parameter of shape {tuple(parameter.shape)} is tagged as a shard, and nothing '
            'says of what: let its module derive from ts.nn.ParallelModule, and add it by '
            'register_part(name, shape, dim)')
    shape: torch.Size = getattr(parameter, _GLOBAL_SHAPE, parameter.shape)
    return shape


def shard_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of this rank's shard of a parameter, whatever its current shape."""
    return torch.Size(_local(global_shape(parameter), storage_dim(parameter)))


def _local(shape: Sequence[int], dim: int | None) -> list[int]:
    local = list(shape)
    if dim is not None:
        local[dim] = sizes.own(shape[dim])[1]
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

    shape, dim = global_shape(parameter), storage_dim(parameter)
    placement: Placement = Replicate() if dim is None else Shard(dim)
    stride = tuple(prod(shape[i + 1:]) for i in range(len(shape)))
    return DTensor.from_local(
        (parameter if local is None else local).detach(), current().mesh,
        [Replicate(), placement], run_check=False, shape=shape, stride=stride)
