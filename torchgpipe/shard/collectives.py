"""Collectives of a parallel group, and the autograd functions that are made of them.

The functions come in two pairs, each of which is the other's backward pass. Between a tensor that
each rank has whole, and parts of it::

                  ┌── Scatter ─▶ x[0]  on rank 0
    x, everywhere ┤                                 Gather goes the other way
                  └── Scatter ─▶ x[1]  on rank 1

Between a tensor that each rank has whole, and terms of a sum::

                  ┌── Copy ─▶ x  on rank 0
    x, everywhere ┤                                 Reduce goes the other way, and adds them up
                  └── Copy ─▶ x  on rank 1

What is whole is the same on all ranks of the group, and so is its gradient. That is why the
backward pass of `Gather` takes this rank's part of the gradient, and that of `Reduce` the gradient
as it is, while that of `Copy` adds up what each rank has found.

All ranks of a group have to call the same collectives in the same order.
"""
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchgpipe.private import is_transformed
from torchgpipe.shard import sizes
from torchgpipe.shard.debug import compare
from torchgpipe.shard.failures import complete
from torchgpipe.shard.rows import counted, of_own_rows
from torchgpipe.shard.tags import register_parallel_dim
from torchgpipe.shard.world import World, current

__all__ = ['all_gather', 'all_reduce', 'all_sizes', 'broadcast', 'copy', 'from_first', 'gather',
           'reduce', 'reduce_', 'scatter']


# --- in place, or without gradient
# ----------------------------------------------------------------


def all_reduce(tensor: Tensor, group: ProcessGroup,
               op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Add up a contiguous tensor over a group, in place; or find its maximum, or another one."""
    if group.size() > 1:
        compare('all_reduce', f'{op} of {_facts(tensor)}', group, tensor.device)
        complete(lambda: dist.all_reduce(tensor, op, group, async_op=True), group, tensor.is_cpu)
    return tensor


def broadcast(tensor: Tensor, group: ProcessGroup, source: int = 0) -> Tensor:
    """Give a contiguous tensor the values that a rank of the group has, in place."""
    if group.size() > 1:
        compare('broadcast', f'from {source} of {_facts(tensor)}', group, tensor.device)
        complete(lambda: dist.broadcast(tensor, group=group, async_op=True, group_src=source),
                 group, tensor.is_cpu)
    return tensor


def from_first(tensor: Tensor, world: World) -> Tensor:
    """Give a contiguous tensor the values that the first rank of the first replica has, in place.

    They go to the first rank of each group, and from there to the others of the group.
    """
    broadcast(tensor, world.data_group)
    return broadcast(tensor, world.tensor_group)


def all_gather(tensor: Tensor, group: ProcessGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """Put the parts of all ranks of a group together.

    Args:
        tensor: This rank's part.
        group: The ranks that have one.
        dim: The dimension that is split.
        lengths: How long the part of each rank is.
    """
    if group.size() == 1:
        return tensor
    compare('all_gather', f'{list(lengths)} of {_facts(tensor, dim)}', group, tensor.device)
    # All have to send the same, so shorter parts are sent with something behind them.
    shape = list(tensor.shape)
    shape[dim] = max(lengths)
    if tensor.size(dim) == shape[dim]:
        sent = tensor.contiguous()
    else:
        sent = tensor.new_zeros(shape)
        sent.narrow(dim, 0, tensor.size(dim)).copy_(tensor)
    received = [torch.empty_like(sent) for _ in lengths]
    complete(lambda: dist.all_gather(received, sent, group, async_op=True), group, tensor.is_cpu)
    return torch.cat([each.narrow(dim, 0, length) for each, length in zip(received, lengths)], dim)


def all_sizes(tensor: Tensor, group: ProcessGroup, dim: int) -> list[int]:
    """Ask all ranks of a group for the size of a dimension of their tensors."""
    if group.size() == 1:
        return [tensor.size(dim)]
    size = torch.tensor([tensor.size(dim)], device=tensor.device)
    found: list[int] = all_gather(size, group, 0, [1] * group.size()).tolist()
    return found


def _facts(tensor: Tensor, split: int | None = None) -> str:
    """Say what has to be the same on all ranks, which need not agree in a dimension."""
    shape: list[int | str] = list(tensor.shape)
    if split is not None:
        shape[split] = 'part'
    return f'{tensor.dtype} of shape ({", ".join(map(str, shape))})'


# --- for autograd
# ----------------------------------------------------------------------------------


class Scatter(torch.autograd.Function):
    """Take this rank's part of what is whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int,
                lengths: Sequence[int]) -> Tensor:
        """Return a tensor of its own, so that the whole can be freed."""
        ctx.how = group, dim, lengths
        ctx.makes_parts = True
        if group.size() == 1:
            return x.detach()
        rank = group.rank()
        return x.narrow(dim, sum(lengths[:rank]), lengths[rank]).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Put the gradients of the parts together."""
        gathered: Tensor = Gather.apply(grads[0], *ctx.how)  # type: ignore[no-untyped-call]
        return gathered, None, None, None


class Gather(torch.autograd.Function):
    """Put the parts of all ranks together."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int,
                lengths: Sequence[int]) -> Tensor:
        """Give the whole to every rank."""
        ctx.how = group, dim, lengths
        # Not the input itself: see the note on an identity without a view.
        return all_gather(x.detach(), group, dim, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Take this rank's part of the gradient."""
        part: Tensor = Scatter.apply(grads[0], *ctx.how)  # type: ignore[no-untyped-call]
        return part, None, None, None


class Copy(torch.autograd.Function):
    """Use what is whole on each rank in another way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        """Give it on."""
        ctx.group = group
        ctx.makes_parts = True
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Add up the gradients of all ranks."""
        added: Tensor = Reduce.apply(grads[0], ctx.group, False)  # type: ignore[no-untyped-call]
        return added, None


class Reduce(torch.autograd.Function):
    """Add up the terms of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, in_place: bool) -> Tensor:
        """Give the sum to every rank; leave the term as it is, or put the sum in its place."""
        ctx.group = group
        if group.size() == 1:
            return x.detach()
        if in_place and x.is_contiguous():
            ctx.mark_dirty(x)
        else:
            x = x.clone(memory_format=torch.contiguous_format)
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Each term has the gradient of the sum."""
        same: Tensor = Copy.apply(grads[0], ctx.group)  # type: ignore[no-untyped-call]
        return same, None, None


def _apply(function: Any, *args: Any) -> Tensor:
    """Apply one of the functions above.

    Raises:
        RuntimeError: A transform of ``torch.func`` is at work, which knows nothing of other ranks.
    """
    if is_transformed():
        raise RuntimeError('transforms of torch.func, such as grad, vmap and jvp, do not go '
                           'through sharded layers: call backward(), or torch.autograd.grad')
    output: Tensor = function.apply(*args)
    return output


def scatter(x: Tensor, dim: int = -1) -> Tensor:
    """Take this rank's part of a tensor that all ranks of the group have.

    Args:
        x: The same on all ranks of the group.
        dim: The dimension that is split; its size need not be divisible.

    Returns:
        A new tensor, tagged -1 if its last dimension is split. Its gradient is gathered.
    """
    group = current().tensor_group
    lengths = sizes.lengths(x.size(dim), group.size())
    part = _apply(Scatter, x, group, dim, lengths)
    if dim % x.dim() == x.dim() - 1:
        register_parallel_dim(part, -1)
    return part


def gather(x: Tensor, dim: int = -1, size: int | None = None) -> Tensor:
    """Put the parts of all ranks of the group together.

    Args:
        x: This rank's part. The parts agree in all dimensions but one.
        dim: The dimension that is split.
        size: The size that it has as a whole, if it is split as :func:`ts.slice` does it.
            Otherwise the ranks tell each other how long their parts are: of any length.

    Returns:
        A new tensor, the same on all ranks, tagged as whole. Of its gradient, each rank takes its
        part.

    Raises:
        ValueError: The part has another length than one of that size.
    """
    group = current().tensor_group
    lengths = (all_sizes(x, group, dim) if size is None else
               sizes.lengths(size, group.size()))
    if x.size(dim) != lengths[group.rank()]:
        raise ValueError(f'of a size of {size}, the part of rank {group.rank()} of {group.size()} '
                         f'is {lengths[group.rank()]} long; this one is {x.size(dim)}: leave size '
                         'out where parts have other lengths')
    if of_own_rows(x, dim):
        x = counted(x)
    whole = _apply(Gather, x, group, dim, lengths)
    register_parallel_dim(whole, None)
    return whole


def reduce(x: Tensor) -> Tensor:
    """Add up a tensor over the group.

    Returns:
        A new tensor, the same on all ranks, tagged as whole. Its gradient is that of each term.
    """
    return _reduce(x, in_place=False)


def reduce_(x: Tensor) -> Tensor:
    """Do the same in the memory of a tensor that nobody else needs."""
    return _reduce(x, in_place=True)


def _reduce(x: Tensor, in_place: bool) -> Tensor:
    group = current().tensor_group
    added = _apply(Reduce, x, group, in_place)
    register_parallel_dim(added, None)
    return added


def copy(x: Tensor) -> Tensor:
    """Return a tensor on that each rank of the group uses in another way.

    Returns:
        A new tensor in the same memory, tagged as whole. Its gradient is added up over the group.
    """
    same = _apply(Copy, x, current().tensor_group)
    register_parallel_dim(same, None)
    return same
