"""Bitwise comparison of the parameters and buffers that ranks share.

::

    data axis      all that is not split over it: weights, statistics
    tensor axis    all that is not split over it: layers without a style, norms
    pipe axis      tied weights, and buffers of modules that stand in stages of several ranks

At a step with a comparison, each rank makes a vector of digests for each axis, a digest per
tensor. The ranks along the axis reduce it to the largest and the smallest digests. Entries that
differ name the tensors::

    rank 0    0.weight 17    0.bias 4    max    17 4
    rank 1    0.weight 17    0.bias 9    min    17 9      '0.bias' differs

A digest is computed from the bits of a tensor, as integers, and their places. So it depends
neither on the device nor on an order of sums.
"""

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from torchgpipe.distributed.mesh import MeshInfo
from torchgpipe.shard.collectives import gathered
from torchgpipe.shard.sums import local

#: The bits of a digest. A sum over many ranks fits into an integer.
_BITS = 40

#: How many words of eight bytes are mixed at once.
_WORDS = 1 << 18

#: The usual causes of a difference along each axis.
_CAUSES = {
    'data': 'Usual causes: a layer that changes a buffer or a weight by its own samples (batch '
    'norm takes deferred_batch_norm=True; another layer adds its statistics up over '
    "replicas, by torch.distributed.all_reduce with group=mesh['data'].get_group(), or "
    'keeps them in an attribute that is no buffer); a weight that was changed or an '
    'optimizer that was made otherwise on one rank',
    'tensor': 'Usual causes: a layer that tensor_plan does not split, but whose input differs; a '
    'weight that was changed on one rank; kernels that are not deterministic',
    'gradients': 'A layer that tensor_plan does not split was applied to the heads or features of '
    'one rank, so each rank has a part of this gradient. Let the plan split it: for '
    'a norm of heads, SequenceParallel(sequence_dim=2, use_local_output=True), where '
    'dimension 2 has the heads. Or let its forward use '
    'torchgpipe.shard.distributed.copy(parameter), whose gradient is the sum over '
    "ranks, after init_process_group(mesh=mesh['data', 'tensor']) of that module. "
    'Kernels that are not deterministic are another cause',
    'pipe': 'Usual causes: a layer that stands in several stages and changes a buffer or a weight '
    'itself; a weight that was changed or an optimizer that was made otherwise on one '
    'rank. Stages may share a rank: places=…',
}


class Cadence:
    """The steps at which ranks compare: the first ones, then less and less often.

    Args:
        every: The number of steps between comparisons; 0 for never.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        #: The number of tensors in the model.
        self._tensors = 0
        #: By task, the number of steps, calls or evaluations with so many tensors.
        self._steps: dict[str, int] = {}
        #: Whether ranks compare the gradients of the next step.
        self.compares_gradients = every > 0

    def next(self, task: str, model: nn.Module) -> int:
        """Count a step; return how many there were before it if ranks compare now, or -1.

        A model that has got further tensors begins again.
        """
        tensors = sum(len(x._parameters) + len(x._buffers) for x in model.modules())
        if tensors != self._tensors:
            self._tensors = tensors
            self._steps = {}
        count = self._steps.get(task, 0)
        self._steps[task] = count + 1
        # Often at first: gradients may be added up for some steps, or learning rates be 0.
        is_power_of_two = count & (count - 1) == 0
        if self._every > 0 and (is_power_of_two or count % self._every == 0):
            return count
        return -1


@dataclass(frozen=True)
class Shared:
    """A tensor of a rank that others may share."""

    name: str
    module: nn.Module
    key: str
    #: The axes along which other ranks have the same value.
    axes: Collection[str]
    #: Whether it is in no state dict. Such a tensor may have other sizes on other ranks.
    is_cache: bool = False

    @property
    def value(self) -> Tensor | None:
        """The current value, or the part of it that this rank has."""
        tensors: Mapping[str, Tensor | None] = self.module._parameters
        if self.key not in tensors:
            tensors = self.module._buffers
        x = tensors.get(self.key)
        return None if x is None else local(x)


#: In a vector, in place of a tensor that a rank does not have. Every digest is larger.
_MISSING = -(1 << 60)


class Digest(NamedTuple):
    """A tensor in a vector of digests."""

    name: str
    #: The digest of its value, shape and dtype; ``None`` if this rank does not have it.
    value: int | None
    #: The digest of its shape, for a cache only. Caches of different shapes are not compared.
    shape: int | None = None


class BitwiseComparison:
    """A comparison of the tensors that ranks share.

    Args:
        tensors: The tensors of this rank, in the order of their names.
        owners: By name, the ranks of each tensor that stages of several ranks share.
        copies: The copies that this rank has of these.
    """

    def __init__(
        self,
        mesh: MeshInfo,
        tensors: Sequence[Shared],
        owners: Mapping[str, Sequence[int]],
        copies: Mapping[str, Shared],
    ) -> None:
        self._mesh = mesh
        self._tensors = tensors
        self._owners = owners
        self._copies = copies
        #: By axis, whether ranks along it have tensors of the same names.
        self._same_names: dict[str, bool] = {}

    @property
    def names(self) -> int:
        """A digest of the names of the tensors that ranks along an axis may share."""
        names = [(shared.name, sorted(shared.axes), shared.is_cache) for shared in self._tensors]
        return zlib.crc32(repr(names).encode())

    def agree_names(self, names: Mapping[int, int]) -> None:
        """Take the digests of names of all ranks, by which ranks know the length of vectors."""
        if self._mesh.everyone is None:
            return
        for axis in (self._mesh.data, self._mesh.tensor):
            self._same_names[axis.name] = len({names[rank] for rank in axis.ranks}) == 1

    def check(self) -> None:
        """Compare the tensors. All ranks of the mesh call it.

        Raises:
            RuntimeError: A tensor differs. All ranks raise this error.
        """
        if self._mesh.everyone is None:
            return
        texts = []
        entries = entries_of(self._tensors)
        for axis in (self._mesh.data, self._mesh.tensor):
            if axis.group is None:
                continue
            along = []
            for shared, entry in zip(self._tensors, entries):
                if axis.name in shared.axes:
                    along.append(entry)
            same_names = self._same_names[axis.name]
            names = differing(along, axis.group, self._mesh.device, same_names)
            if names:
                texts.append(difference(names, axis.ranks, axis.name))
        pipe = self._mesh.pipe
        if pipe.group is not None:
            names = differing(self._tied_entries(), pipe.group, self._mesh.device)
            if names:
                texts.append(difference(names, self._owners[names[0]], 'pipe'))
        raise_differences(texts, self._mesh.everyone)

    def _tied_entries(self) -> list[Digest]:
        """Return an entry for each tensor that stages of several ranks share."""
        by_name = {entry.name: entry for entry in entries_of([*self._copies.values()])}
        return [by_name.get(name, Digest(name, None)) for name in self._owners]


def raise_differences(texts: Sequence[str], group: dist.ProcessGroup) -> None:
    """Raise the first difference of all ranks, if there is one. All ranks call it.

    Raises:
        RuntimeError: Tensors of a rank differ. All ranks raise this error.
    """
    by_rank: list[Sequence[str]] = gathered(texts, group)
    for text in sum(map(list, by_rank), []):
        raise RuntimeError(text)


def entries_of(tensors: Sequence[Shared]) -> list[Digest]:
    """Return the entries of tensors."""
    values = [shared.value for shared in tensors]
    numbers = iter(digests(x for x in values if x is not None))
    entries = []
    for shared, x in zip(tensors, values):
        number = None
        form = 0
        if x is not None:
            form = zlib.crc32(f'{tuple(x.shape)} {x.dtype}'.encode())
            number = next(numbers) ^ form
        entries.append(Digest(shared.name, number, form if shared.is_cache else None))
    return entries


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
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
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


def difference(
    names: Sequence[str],
    ranks: Sequence[int],
    axis: str,
    subject: str = '',
) -> str:
    """Describe tensors that differ between ranks along an axis, with usual causes."""
    name, *more = names
    rest = f' and {len(more)} others' if more else ''
    return (
        f"{subject}'{name}'{rest} should be the same on ranks {[*ranks]}, along "
        f'the {axis} axis, but differs. {_CAUSES["gradients" if subject else axis]}'
    )


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
