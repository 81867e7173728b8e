"""Collectives in place, or without a gradient: sums, and values of other ranks.

All ranks of a group have to call the same collectives in the same order.
"""
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchgpipe.shard.failures import compare, complete
from torchgpipe.shard.world import World

__all__ = ['all_gather', 'all_reduce', 'all_sizes', 'all_to_all', 'broadcast', 'from_first']


def all_reduce(tensor: Tensor, group: ProcessGroup,
               op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce a contiguous tensor over a group, in place; by default to the sum."""
    if group.size() > 1:
        complete(lambda: dist.all_reduce(tensor, op, group, async_op=True), group, tensor.is_cpu)
    return tensor


def broadcast(tensor: Tensor, group: ProcessGroup, source: int = 0) -> Tensor:
    """Copy the values of one rank of a group to a contiguous tensor, in place."""
    if group.size() > 1:
        complete(lambda: dist.broadcast(tensor, group=group, async_op=True, group_src=source),
                 group, tensor.is_cpu)
    return tensor


def from_first(tensor: Tensor, world: World) -> Tensor:
    """Copy the values of the first rank of the first replica to a contiguous tensor.

    They are sent to the first rank of each group, and from there to the others of the group.
    """
    return broadcast(broadcast(tensor, world.data_group), world.tensor_group)


def all_gather(tensor: Tensor, group: ProcessGroup, dim: int, lengths: Sequence[int]) -> Tensor:
    """Return the full tensor of shards of these lengths, one of each rank, along a dimension."""
    if group.size() == 1:
        return tensor
    # PyTorch compares only the sent shapes, which may be equal for shards of different lengths.
    compare(f'all_gather: {[*lengths]}', group)
    # All ranks have to send the same shape, so shorter shards are padded.
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
    """Return the size of a dimension on each rank of a group."""
    if group.size() == 1:
        return [tensor.size(dim)]
    size = torch.tensor([tensor.size(dim)], device=tensor.device)
    found: list[int] = all_gather(size, group, 0, [1] * group.size()).tolist()
    return found


def all_to_all(x: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
    """Send the given numbers of rows to each rank of a group; return the received rows."""
    received = x.new_empty(sum(receive), *x.shape[1:])
    complete(lambda: dist.all_to_all_single(received, x.contiguous(), receive, send, group,
                                            async_op=True), group, x.is_cpu)
    return received
