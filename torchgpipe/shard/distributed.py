"""Parallel groups, and autograd functions that move tensors within a group.

There are two pairs of functions. In each pair, one function is the other's backward. The first
pair is between a full tensor, the same on each rank, and its shards::

                  ┌── scatter ─▶ x[0]  on rank 0
    x, everywhere ┤                                 gather goes the other way
                  └── scatter ─▶ x[1]  on rank 1

Between a tensor that is the same on each rank, and terms of a sum::

                  ┌── copy ─▶ x  on rank 0
    x, everywhere ┤                                 reduce goes the other way, and adds them up
                  └── copy ─▶ x  on rank 1

A tensor that is the same on all ranks of the group has the same gradient there. So the backward of
`gather` takes this rank's shard of the gradient. The backward of `reduce` takes the gradient as it
is, and the backward of `copy` adds up the gradients of all ranks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchgpipe.base.private import is_transformed
from torchgpipe.shard.collectives import all_gather, all_reduce, all_sizes
from torchgpipe.shard.ddp import counted, has_local_rows
from torchgpipe.shard.parameter import lengths, register_parallel_dim, tagged_full
from torchgpipe.shard.world import (
    destroy_process_group,
    get_data_group,
    get_data_rank,
    get_group,
    get_group_size,
    get_mesh,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
)

__all__ = [
    'copy',
    'destroy_process_group',
    'gather',
    'get_data_group',
    'get_data_rank',
    'get_group',
    'get_group_size',
    'get_mesh',
    'get_rank',
    'get_world_size',
    'init_process_group',
    'is_initialized',
    'reduce',
    'scatter',
]


def scatter(x: Tensor, dim: int = -1) -> Tensor:
    """Return this rank's shard of a tensor that all ranks of the group have.

    Args:
        x: The same on all ranks of the group.
        dim: The dimension that is split; its size need not be divisible.

    Returns:
        A new tensor, tagged -1 if its last dimension is split. Its gradient is gathered.
    """
    group = get_group()
    slice, join = _slicing(group, dim, lengths(x.size(dim), group.size()))
    shard = _apply(x, slice, join, makes_shards=True)
    if dim % x.dim() == x.dim() - 1:
        register_parallel_dim(shard, -1)
    return shard


def gather(x: Tensor, dim: int = -1, size: int | None = None) -> Tensor:
    """Concatenate the shards of all ranks of the group.

    Args:
        x: This rank's shard. The shards have the same size in all dimensions but one.
        dim: The dimension that is split.
        size: The size of this dimension in the full tensor, if it is split as by
            :func:`ts.slice`. Otherwise the ranks exchange the lengths of their shards.

    Returns:
        A new tensor, the same on all ranks, tagged as full. In backward, each rank takes its
        shard of the gradient.

    Raises:
        ValueError: The shard does not have the length that ``size`` implies.
    """
    group = get_group()
    sizes = all_sizes(x, group, dim) if size is None else lengths(size, group.size())
    if x.size(dim) != sizes[group.rank()]:
        raise ValueError(
            f'of a size of {size}, the shard of rank {group.rank()} of '
            f'{group.size()} is {sizes[group.rank()]} long; this one is '
            f'{x.size(dim)}: leave size out where shards have other lengths'
        )
    if has_local_rows(x, dim):
        x = counted(x)
    slice, join = _slicing(group, dim, sizes)
    return tagged_full(_apply(x, join, slice))


def reduce(x: Tensor) -> Tensor:
    """Add up a tensor over the group.

    Returns:
        A new tensor, the same on all ranks, tagged as full. Each term gets its gradient.
    """
    add, same = _adding(get_group())
    return tagged_full(_apply(x, add, same))


def reduce_(x: Tensor) -> Tensor:
    """Add up a tensor over the group, in the memory of a tensor without other users."""
    group = get_group()
    add, same = _adding(group)
    in_place = group.size() > 1 and x.is_contiguous()
    if in_place:
        add = partial(all_reduce, group=group)
    return tagged_full(_apply(x, add, same, in_place))


def copy(x: Tensor) -> Tensor:
    """Return a tensor that each rank of the group uses differently.

    Returns:
        A new tensor in the same memory, tagged as full. Its gradient is added up over the group.
    """
    add, same = _adding(get_group())
    return tagged_full(_apply(x, same, add, makes_shards=True))


# --- how, for autograd
# ----------------------------------------------------------------------------------

_Function = Callable[[Tensor], Tensor]


def _slicing(group: ProcessGroup, dim: int, lengths: Sequence[int]) -> tuple[_Function, _Function]:
    """Return a function that takes this rank's shard of a tensor, and one that joins shards."""

    def slice(x: Tensor) -> Tensor:
        if group.size() == 1:
            return x.detach()
        rank = group.rank()  # A tensor of its own, so that the full one can be freed.
        return x.narrow(dim, sum(lengths[:rank]), lengths[rank]).clone()

    # Not the input itself: see the note on an identity without a view.
    return slice, lambda x: all_gather(x.detach(), group, dim, lengths)


def _adding(group: ProcessGroup) -> tuple[_Function, _Function]:
    """Return a function that adds up the terms of all ranks, and its backward."""

    def add(x: Tensor) -> Tensor:
        if group.size() == 1:
            return x.detach()
        return all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    return add, Tensor.detach


class _Paired(torch.autograd.Function):
    """Apply one of a pair of functions; its backward applies the other."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        forward: _Function,
        backward: _Function,
        in_place: bool,
        makes_shards: bool,
    ) -> Tensor:
        """Apply the first one."""
        ctx.pair = (backward, forward)
        ctx.makes_shards = makes_shards
        if in_place:
            ctx.mark_dirty(x)
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Apply the second one, whose backward is the first one."""
        gradient: Tensor = _Paired.apply(  # type: ignore[no-untyped-call]
            grads[0], *ctx.pair, False, not ctx.makes_shards
        )
        return gradient, None, None, None, None


def _apply(
    x: Tensor,
    forward: _Function,
    backward: _Function,
    in_place: bool = False,
    makes_shards: bool = False,
) -> Tensor:
    """Apply one of a pair of functions.

    Raises:
        RuntimeError: A transform of ``torch.func`` is active, which does not know other ranks.
    """
    if is_transformed():
        raise RuntimeError(
            'transforms of torch.func, such as grad, vmap and jvp, do not go '
            'through sharded layers: call backward(), or torch.autograd.grad'
        )
    output: Tensor = _Paired.apply(  # type: ignore[no-untyped-call]
        x, forward, backward, in_place, makes_shards
    )
    return output
