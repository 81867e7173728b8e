"""Units: stages whose parameters FSDP2 splits over replicas, gathers and frees together.

A unit is in one of the states of :class:`UnitState`. The row of a rank says when it changes
(``UNSHARD``, ``RESHARD`` and ``REDUCE_GRAD`` of :mod:`torchgpipe.schedule.messages`)::

    shard ─ gather ─▶ parameters ─▶ 0F0 0F1 … ─▶ free, for other units
    shard ─ gather ─▶ parameters ─▶ 0B1 0B0 … ─▶ gradients ─┐
    .grad ◀───────── end of step ◀── reduce-scatter, free ◀─┘

All of it runs concurrently with other actions. With CPUOffloadPolicy, shards and ``.grad`` are on
the host.

[Note: FSDP sees one call] FSDP reduces gradients when backward has passed a call of its module. A
step calls layers once for each micro-batch, and runs backward in between. So a step gathers and
frees parameters itself. At the end it makes one call, whose backward returns gradients that are
already known.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum, auto
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from torchgpipe.base.structure import Gradients
from torchgpipe.engine.gradients import Give
from torchgpipe.engine.partition import named_slots
from torchgpipe.shard.digests import digests
from torchgpipe.shard.sums import local


class UnitState(Enum):
    """Where the parameters of a unit are."""

    #: Each rank has its shards. `gather` ──▶ GATHERING
    SHARDED = auto()
    #: An all-gather runs concurrently with other actions. `wait` ──▶ WHOLE
    GATHERING = auto()
    #: Each rank has whole parameters. `free` ──▶ SHARDED
    WHOLE = auto()


class Unit(nn.Module):
    """Some stages whose parameters are sharded over replicas.

    Args:
        stages: The layers of each stage.
        ignored: Parameters that FSDP does not manage.
        reduces_at_end: Whether gradients are reduced at the end of the step.
        options: The options of FSDP2.

    Raises:
        ValueError: FSDP2 cannot gather the parameters at once.
    """

    def __init__(
        self,
        stages: Iterable[nn.Module],
        ignored: set[nn.Parameter],
        reduces_at_end: bool,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.reduces_at_end = reduces_at_end
        self.stages = nn.ModuleList(stages)
        self.state = UnitState.SHARDED
        self._gathering: Any = None
        #: The versions and the digests of whole parameters, at the time of the gather.
        self._versions: list[tuple[int, int]] = []
        #: Whether to compare digests, because a change of ``x.data`` has no version.
        self.compares_values = False
        # A layer may get further parameters later, which FSDP does not have.
        #: The slots of parameters, with their names.
        self.slots = []
        for name, (module, key), x in named_slots(self.stages):
            if isinstance(x, nn.Parameter) and x not in ignored:
                self.slots.append((name.partition('.')[2], module, key))

        check_shardable(self.stages, ignored)
        fully_shard(self, **options, reshard_after_forward=False, ignored_params=ignored)
        assert isinstance(self, FSDPModule)
        self.set_gradient_divide_factor(1.0)  # a sum
        self.set_force_sum_reduction_for_comms(True)  # not NCCL's product with 1 and sum

    def managed(self) -> dict[nn.Parameter, str]:
        """Return the parameters that FSDP manages, in their current form, with their names.

        Shards and whole parameters have the same order.
        """
        parameters: dict[nn.Parameter, str] = {}
        for name, module, key in self.slots:
            x = module._parameters.get(key)
            if x is not None:
                parameters.setdefault(x, name)
        return parameters

    def gather(self) -> None:
        """Start to gather whole parameters on the device."""
        assert isinstance(self, FSDPModule)
        self._gathering = self.unshard(async_op=True)
        self.state = UnitState.GATHERING

    def wait(self) -> None:
        """Wait until whole parameters have taken the places of the shards."""
        self._gathering.wait()
        self._gathering = None
        self.state = UnitState.WHOLE
        self._versions = self._current_versions()

    def free(self) -> None:
        """Free whole parameters, and keep the shards."""
        assert isinstance(self, FSDPModule)
        self.reshard()
        self.state = UnitState.SHARDED

    def reduce(self, gradients: Gradients) -> None:
        """Add gradients, summed over replicas, to the shards' ``.grad``.

        Args:
            gradients: The gradients of whole parameters. The list is emptied, so that they are
                freed.
        """
        if not gradients:
            return
        tensors = [x for x, _ in gradients]
        grads = [grad for _, grad in gradients]
        gradients.clear()
        # FSDP would add its own node behind each tensor that it sees.
        give = partial(Give.apply, grads, *tensors)
        self(torch.zeros((), requires_grad=True), give).backward()

    def forward(self, phony: Tensor, give: Callable[[], Tensor]) -> Tensor:
        """Return a tensor whose backward returns gradients: [Note: FSDP sees one call]."""
        return give()

    def _current_versions(self) -> list[tuple[int, int]]:
        """Return how often gathered parameters were written to, and digests of their values."""
        parameters = [*self.managed()]
        values: Iterable[int] = repeat(0)
        if self.compares_values:
            values = digests(map(local, parameters))
        return [(x._version, value) for x, value in zip(parameters, values)]

    def check_unchanged(self) -> None:
        """Check that layers have not written to gathered parameters, which are not kept.

        Raises:
            RuntimeError: A layer has.
        """
        if self.state is not UnitState.WHOLE:
            return
        current = self._current_versions()
        for name, version, before in zip(self.managed().values(), current, self._versions):
            if version != before:
                raise RuntimeError(
                    f"a layer has changed '{name}' in its forward, as an embedding with max_norm "
                    "does, but with data='shard' the whole parameter is there for one step only: "
                    "data='replicate', or change it between steps"
                )


def check_shardable(stages: nn.Module, ignored: Collection[nn.Parameter]) -> None:
    """Check that FSDP2 can gather the parameters of some stages at once.

    Raises:
        ValueError: One is empty, or the ones that require a gradient have several dtypes.
    """
    first: tuple[str, torch.dtype] | None = None
    for path, x in stages.named_parameters():
        if x in ignored:
            continue
        name = path.partition('.')[2]
        if not x.numel():
            raise ValueError(
                f"data='shard' splits each parameter, but '{name}' is empty: "
                "remove it, or choose data='replicate'"
            )
        if not x.requires_grad:
            continue
        first = first or (name, x.dtype)
        if x.dtype != first[1]:
            raise ValueError(
                "data='shard' gathers the parameters of a stage as one tensor, so they have "
                f"one dtype, but '{first[0]}' is {first[1]} and '{name}' is {x.dtype}: "
                'convert one of them, put them into different stages, or choose '
                "data='replicate'"
            )


def group_stages(stages: Mapping[int, nn.Module], late: Collection[int] = ()) -> list[list[int]]:
    """Return the stages in groups: late ones, and ones that share a parameter.

    >>> shared = nn.Linear(2, 2)
    >>> group_stages({0: shared, 2: nn.ReLU(), 4: nn.Sequential(shared)})
    [[2], [0, 4]]
    """
    owners: dict[int, set[int]] = {}
    for j, stage in stages.items():
        for x in stage.parameters():
            owners.setdefault(id(x), set()).add(j)
    groups = [[j] for j in stages]
    for owner in (set(late), *owners.values()):
        touched = [group for group in groups if not owner.isdisjoint(group)]
        if len(touched) > 1:
            groups = [group for group in groups if group not in touched]
            groups.append(sorted(sum(touched, [])))
    return groups
