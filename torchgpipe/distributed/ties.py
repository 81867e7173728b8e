"""Ties: parameters and buffers that stages of several ranks share.

A tied tensor, such as the weight of embedding and head, is in stages of several ranks. Each of
these ranks has its own copy, which starts with the value in the first stage. In each step, each
copy gets the sum of all gradients, so all copies stay equal to a single tensor::

    stage 0, rank 0      gradient ◀── gradient of rank 3
                           └─ sum ──▶ rank 3
    stage 3, rank 3      gradient ──▶ rank 0,  sum ◀── rank 0
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchgpipe.base.structure import Gradients
from torchgpipe.engine.partition import shared_in
from torchgpipe.shard.collectives import gathered
from torchgpipe.shard.sums import like, local

#: A tensor in several places: the stage of each, and its name there; in the order of stages.
Tie = tuple[tuple[int, str], ...]


def ties_of(model: nn.Sequential, stages: Sequence[Iterable[str]]) -> list[Tie]:
    """Return the parameters and buffers that stand in several places of a model.

    Their order is the same on all ranks, because it depends on stages and names only.
    """
    stage_of = {}
    for j, names in enumerate(stages):
        stage_of.update(dict.fromkeys(names, j))
    ties = []
    for places in shared_in({name: model.get_submodule(name) for name in stage_of}):
        tie = [(stage_of[full.partition('.')[0]], full) for full in places]
        ties.append(tuple(sorted(tie)))
    return sorted(ties)


def tie_again(shared: Sequence[Sequence[str]], layers: Mapping[str, nn.Module]) -> None:
    """Tie parameters again that were split in each of their places.

    Raises:
        ValueError: A parameter was split in different ways.
    """
    for names in shared:
        places = {}
        layouts = {}
        for full in names:
            if full.partition('.')[0] in layers:
                module, key = _slot_of(full, layers)
                places[full] = module, key
                layouts[full] = _layout_of(getattr(module, key))
        if len({*layouts.values()}) > 1:
            raise split_apart(layouts)
        slots = [*places.values()]
        for module, key in slots[1:]:
            first_module, first_key = slots[0]
            setattr(module, key, getattr(first_module, first_key))


def _slot_of(full: str, layers: Mapping[str, nn.Module]) -> tuple[nn.Module, str]:
    """Return the module of a tensor and the name in it."""
    path, _, key = full.rpartition('.')
    layer, _, rest = path.partition('.')
    return layers[layer].get_submodule(rest), key


def _layout_of(x: object) -> str:
    """Return a description of how a parameter is split."""
    return str(x.placements) if isinstance(x, DTensor) else 'whole'


def split_apart(layouts: Mapping[str, str]) -> ValueError:
    """Return the error for a parameter or module that is split in several ways, by its names."""
    return ValueError(
        'one tensor or module has several names, and tensor_plan splits it in '
        f'other ways there: {dict(layouts)}; give all of its names one style, as by '
        'one pattern'
    )


@dataclass(frozen=True)
class TiedTensor:
    """This rank's copy of a tensor that other ranks also have."""

    #: Its name in the first stage that has it.
    name: str
    #: Its names on this rank.
    local_names: Sequence[str]
    module: nn.Module
    key: str
    #: The ranks that have it, the rank of the first stage first.
    ranks: Sequence[int]
    is_parameter: bool

    @property
    def value(self) -> Tensor | None:
        """The current tensor; ``None`` if the module does not have it any more."""
        value: Tensor | None = getattr(self.module, self.key, None)
        return value

    @property
    def parameter(self) -> nn.Parameter:
        """The current parameter."""
        x = self.module._parameters[self.key]
        assert x is not None
        return x


class Ties:
    """The parameters and buffers of this rank that other ranks also have.

    Buffers are only compared: a layer that changes one makes ranks differ.

    Args:
        layers: The layers of this rank, by name.
        ties: All ties of the model.
        ranks: The rank of each stage.
        group: The ranks of the pipeline.
        rank: This rank.

    Attributes:
        copies: The tensors that other ranks also have.
        parameters: The ones that are parameters.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        ties: Sequence[Tie],
        ranks: Sequence[int],
        group: dist.ProcessGroup | None,
        rank: int,
    ) -> None:
        self._rank = rank
        self._group = group
        self.copies: list[TiedTensor] = []
        for tie in ties:
            names = [name for j, name in tie if ranks[j] == rank]
            owners = owners_of(tie, ranks)
            if names and len(owners) > 1:
                module, key = _slot_of(names[0], layers)
                is_parameter = key in module._parameters
                self.copies.append(TiedTensor(tie[0][1], names, module, key, owners, is_parameter))
        self.parameters = [copy for copy in self.copies if copy.is_parameter]
        #: The parameters with which the model was made.
        self._first_parameters = [copy.parameter for copy in self.parameters]

    @property
    def first_names(self) -> dict[str, str]:
        """The name of each parameter on this rank, with its name in the first stage."""
        names = {}
        for copy in self.parameters:
            names.update(dict.fromkeys(copy.local_names, copy.name))
        return names

    @property
    def ids(self) -> set[int]:
        """The ``id`` of each parameter that other ranks also have."""
        return {id(copy.module._parameters[copy.key]) for copy in self.parameters}

    @property
    def ids_of_later_copies(self) -> set[int]:
        """The ``id`` of each parameter that the rank of an earlier stage has."""
        later = [copy for copy in self.parameters if copy.ranks[0] != self._rank]
        return {id(copy.module._parameters[copy.key]) for copy in later}

    def check(self) -> None:
        """Check that the parameters are the same as when the model was made.

        Raises:
            ValueError: A parameter was replaced, so it may not be tied any more.
        """
        for copy, x in zip(self.parameters, self._first_parameters):
            if copy.module._parameters.get(copy.key) is not x:
                raise ValueError(
                    f"'{copy.key}' of a {type(copy.module).__name__}, which stages on ranks "
                    f'{copy.ranks} share, was replaced after this model was made: change '
                    'its values in place, or replace it in the module before'
                )

    @torch.no_grad()
    def spread(self, device: torch.device) -> None:
        """Copy the values in the first stage to all copies.

        Args:
            device: The device of this rank, from which it sends; parameters may be on the host.

        Raises:
            ValueError: The copies are split in different ways.
        """
        self._check_layouts()
        for copy in self.parameters:
            x = local(copy.parameter)
            first, *later = copy.ranks
            if self._rank == first:
                for rank in later:
                    self._send(x.contiguous().to(device), rank)
            else:
                value = torch.empty_like(x, device=device, memory_format=torch.contiguous_format)
                self._receive(value, first)
                x.copy_(value)

    def _check_layouts(self) -> None:
        if self._group is None:
            return
        layouts = {}
        for copy in self.parameters:
            layouts[copy.name] = copy.local_names[0], _layout_of(copy.parameter)
        by_rank: list[dict[str, tuple[str, str]]] = gathered(layouts, self._group)
        by_name: dict[str, dict[str, str]] = {}
        for layouts in by_rank:
            for first_name, (name, layout) in layouts.items():
                by_name.setdefault(first_name, {})[name] = layout
        for layout_by_name in by_name.values():
            if len({*layout_by_name.values()}) > 1:
                raise split_apart(layout_by_name)

    def sum(self, gradients: Gradients, dtype: torch.dtype | None = None) -> Gradients:
        """Return gradients, summed over all ranks for parameters that other ranks have.

        Args:
            dtype: The dtype of sums; by default the dtype of each parameter.

        Raises:
            RuntimeError: A parameter is frozen on some of them.
        """
        if not self.parameters:
            return gradients
        ids = self.ids
        tied = {}
        results = []
        for x, gradient in gradients:
            if id(x) in ids:
                tied[id(x)] = gradient
            else:
                results.append((x, gradient))
        for copy in self.parameters:
            x = copy.parameter
            gradient, count, learning = self._sum_of(x, tied.get(id(x)), copy.ranks, dtype)
            if 0 < learning < len(copy.ranks):
                raise RuntimeError(
                    f"'{copy.key}' of a {type(copy.module).__name__}, which stages on ranks "
                    f'{copy.ranks} share, requires grad on {learning} of them; freeze it on '
                    'all, or on none'
                )
            if count:
                results.append((x, gradient))
        return results

    def _sum_of(
        self,
        x: Tensor,
        gradient: Tensor | None,
        ranks: Sequence[int],
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, int, int]:
        """Return the sum of ranks' gradients, the number of gradients, and of trained copies.

        Gradients are added up in the order of stages, and the rank of the first one sends the sum
        to all.
        """
        result = like(x, gradient, dtype).clone()
        flat = local(result).reshape(-1)
        total = torch.cat([flat, flat.new_tensor([gradient is not None, x.requires_grad])])
        first, *later = ranks
        if self._rank == first:
            for rank in later:
                part = torch.empty_like(total)
                self._receive(part, rank)
                total += part
            for rank in later:
                self._send(total, rank)
        else:
            self._send(total, first)
            self._receive(total, first)
        local(result).copy_(total[:-2].view_as(local(result)))
        count, learning = self._counts_in(total[-2:], len(ranks))
        return result, int(count), int(learning)

    # A dry run has others, because its tensors have no values.

    def _send(self, x: Tensor, rank: int) -> None:
        dist.send(x, rank, self._group)

    def _receive(self, x: Tensor, rank: int) -> None:
        dist.recv(x, rank, self._group)

    def _counts_in(self, x: Tensor, ranks: int) -> list[float]:
        """Return the values of a tensor of counts, none of which exceeds the number of ranks."""
        counts: list[float] = x.tolist()
        return counts


def owners_of(tie: Tie, ranks: Sequence[int]) -> list[int]:
    """Return the ranks that have a tied tensor, in the order of its stages."""
    return [*dict.fromkeys(ranks[j] for j, _ in tie)]
