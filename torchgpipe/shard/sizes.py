"""Sizes: the length of each rank's shard of a dimension.

All shards have the size of the first one, except the last ones, which may be smaller or empty.
``torch.chunk`` and DTensors split in the same way.
"""
import torch
from torch import Tensor

from torchgpipe.shard.world import current

__all__ = ['find', 'lengths', 'own', 'shard', 'slice']


def shard(size: int, n: int, rank: int) -> tuple[int, int]:
    """Return where a rank's shard begins, and how long it is.

    >>> [shard(5, 4, rank) for rank in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    longest = -(-size // n)
    begin = min(rank * longest, size)
    return begin, min(longest, size - begin)


def own(size: int) -> tuple[int, int]:
    """Return where the shard of this rank begins, and how long it is."""
    world = current()
    return shard(size, world.tensor_size, world.tensor_rank)


def find(index: int, size: int) -> int | None:
    """Return where an index is within the shard of this rank; None if it is not there."""
    begin, length = own(size)
    return index - begin if begin <= index < begin + length else None


def lengths(size: int, n: int) -> list[int]:
    """Return the lengths of all shards.

    >>> lengths(7, 2), lengths(5, 4)
    ([4, 3], [2, 2, 1, 0])
    """
    return [shard(size, n, rank)[1] for rank in range(n)]


def slice(tensor: Tensor, num_partitions: int, dim: int | None = None,
          contiguous: bool = False) -> tuple[Tensor, ...]:
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
    return tuple(piece.contiguous() for piece in pieces) if contiguous else tuple(pieces)
