"""Digests of tensors, by which ranks compare values to the bit.

Each rank makes a vector of digests, one per tensor. The ranks reduce it to the largest and the
smallest digests. Entries that differ name the tensors::

    rank 0    0.weight 17    0.bias 4    max    17 4
    rank 1    0.weight 17    0.bias 9    min    17 9      '0.bias' differs

A digest is computed from the bits of a tensor, as integers, and their places. So it depends
neither on the device nor on an order of sums.
"""

import zlib
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from torchgpipe.shard.collectives import all_reduce, gathered

#: The bits of a digest. A sum over many ranks fits into an integer.
_BITS = 40

#: How many words of eight bytes are mixed at once.
_WORDS = 1 << 18

#: In a vector, in place of a tensor that a rank does not have. Every digest is larger.
_MISSING = -(1 << 60)


class Digest(NamedTuple):
    """A tensor in a vector of digests."""

    name: str
    #: The digest of its value, shape and dtype; ``None`` if this rank does not have it.
    value: int | None
    #: The digest of its shape, for a cache only. Caches of different shapes are not compared.
    shape: int | None = None


def digests_of(tensors: Mapping[str, Tensor | None], caches: Container[str] = ()) -> list[Digest]:
    """Return the digests of tensors by their names.

    Args:
        caches: The names of tensors that may have other shapes on other ranks.
    """
    numbers = iter(digests(x for x in tensors.values() if x is not None))
    result = []
    for name, x in tensors.items():
        number = None
        form = 0
        if x is not None:
            form = zlib.crc32(f'{tuple(x.shape)} {x.dtype}'.encode())
            number = next(numbers) ^ form
        result.append(Digest(name, number, form if name in caches else None))
    return result


def differing(
    entries: Sequence[Digest],
    group: dist.ProcessGroup,
    device: torch.device,
    same_names: bool = True,
) -> list[str]:
    """Return the names of tensors that differ between the ranks of a group. All ranks call it.

    Args:
        same_names: Whether all ranks have entries of the same names.
    """
    names: list[str] = []
    if not same_names:
        entries, names = _common(entries, group)
    if not entries:
        return names
    vector = []
    for entry in entries:
        value = entry.value
        shape = entry.shape or 0
        if value is None:
            vector.append([_MISSING] * 4)
        else:
            vector.append([value, -value, shape, -shape])
    extremes = torch.tensor(vector, dtype=torch.long, device=device)
    all_reduce(extremes, group, dist.ReduceOp.MAX)
    for entry, row in zip(entries, extremes.tolist()):
        high, negated_low, high_shape, negated_low_shape = row
        if high != -negated_low and high != _MISSING and high_shape == -negated_low_shape:
            names.append(entry.name)
    return names


def _common(entries: Sequence[Digest], group: dist.ProcessGroup) -> tuple[list[Digest], list[str]]:
    """Return the entries that all ranks of a group have, and names that some do not have."""
    by_rank: list[set[tuple[str, bool]]] = gathered(
        {(entry.name, entry.shape is not None) for entry in entries}, group
    )
    common = set.intersection(*by_rank)
    missing = []
    for name, is_cache in sorted(set.union(*by_rank) - common):
        if not is_cache:
            missing.append(name)
    return [entry for entry in entries if (entry.name, entry.shape is not None) in common], missing


@torch.no_grad()
def digests(tensors: Iterable[Tensor]) -> list[int]:
    """Return a number for each tensor. The host waits once for each device."""
    results = [_digest(x.detach()) for x in tensors]
    by_device: dict[torch.device, list[Tensor]] = {}
    for x in results:
        by_device.setdefault(x.device, []).append(x)
    numbers = {}
    for device, xs in by_device.items():
        numbers[device] = iter(torch.stack(xs).tolist())
    return [next(numbers[x.device]) % (1 << _BITS) for x in results]


def _digest(x: Tensor) -> Tensor:
    """Return a number, in a tensor: the sum of the words of ``x``, each mixed with its place."""
    x = x.to_dense() if x.layout is not torch.strided else x
    if x.is_quantized:
        x = x.int_repr()
    elif x.is_nested:
        x = x.values()
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    data = x.resolve_neg().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        data = F.pad(data, (0, -data.numel() % 8))  # a copy
    result = torch.zeros((), dtype=torch.int64, device=x.device)
    for k, words in enumerate(data.view(torch.int64).split(_WORDS)):
        start = k * _WORDS + 1
        place = torch.arange(start, start + len(words), device=x.device)
        mixed = place.mul_(0x1E3779B97F4A7C15).add_(words)
        mixed ^= mixed >> 32
        mixed *= 0x3F58476D1CE4E5B9
        mixed ^= mixed >> 29
        mixed *= 0x14D049BB133111EB
        mixed ^= mixed >> 32
        result += mixed.sum()
    return result
