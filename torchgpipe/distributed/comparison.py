"""Bitwise comparison of the parameters and buffers that ranks share.

::

    data axis      all that is not split over it: weights, statistics
    tensor axis    all that is not split over it: layers without a style, norms
    pipe axis      tied weights, and buffers of modules that stand in stages of several ranks

At a step with a comparison, ranks compare a vector of digests along each axis
(:mod:`torchgpipe.shard.digests`).
"""

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from torchgpipe.distributed.agreement import AnyFacts
from torchgpipe.distributed.mesh import MeshInfo
from torchgpipe.shard.collectives import gathered
from torchgpipe.shard.digests import Digest, differing, digests_of
from torchgpipe.shard.sums import local

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
        every: The largest number of steps between comparisons; 0 for never.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        #: The number of tensors in the model.
        self._tensors = 0
        #: By task, the number of steps, calls or evaluations with so many tensors.
        self._steps: dict[str, int] = {}
        #: Whether gradients are still to be compared: once, in the first step that reduces them.
        self.compares_gradients = every > 0

    def next(self, task: str, modules: Iterable[nn.Module]) -> int:
        """Count a step; return how many there were before it if ranks compare now, or -1.

        A model that has got further tensors begins again.

        Args:
            modules: All modules of the model.
        """
        tensors = 0
        for module in modules:
            tensors += len(module._parameters) + len(module._buffers)
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

    def agree_names(self, facts: Mapping[int, AnyFacts]) -> None:
        """Take the digests of names of all ranks, by which ranks know the length of vectors."""
        if self._mesh.everyone is None:
            return
        for axis in (self._mesh.data, self._mesh.tensor):
            names = {facts[rank].names for rank in axis.ranks}
            # A rank that did not expect to compare has not said its names.
            self._same_names[axis.name] = len(names) == 1 and names != {0}

    def check(self) -> None:
        """Compare the tensors. All ranks of the mesh call it.

        Raises:
            RuntimeError: A tensor differs. All ranks raise this error.
        """
        if self._mesh.everyone is None:
            return
        texts = []
        values = {shared.name: shared.value for shared in self._tensors}
        caches = {shared.name for shared in self._tensors if shared.is_cache}
        entries = digests_of(values, caches)
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
        values: dict[str, Tensor | None] = dict.fromkeys(self._owners)
        for name, copy in self._copies.items():
            values[name] = copy.value
        return digests_of(values)


def raise_differences(texts: Sequence[str], group: dist.ProcessGroup) -> None:
    """Raise the first difference of all ranks, if there is one. All ranks call it.

    Raises:
        RuntimeError: Tensors of a rank differ. All ranks raise this error.
    """
    by_rank: list[Sequence[str]] = gathered(texts, group)
    for text in sum(map(list, by_rank), []):
        raise RuntimeError(text)


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
