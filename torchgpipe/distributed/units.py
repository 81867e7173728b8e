"""Units: stages whose parameters FSDP gathers and frees together, all of a rank or one of them.

::

    on the device      one unit for all stages    gather ──▶ step ──▶ reduce-scatter, free
    on the host        a unit for each stage      one of them is gathered at a time

                    ┌────────────── actions of stage j, one after the other ──────────────┐
    shard (host) ─copy─▶ shard ─gather─▶ parameters ─▶ 0F0 0F1 … ─▶ free (of another stage next)
    shard (host) ─copy─▶ shard ─gather─▶ parameters ─▶ 0B1 0B0 … ─▶ gradients ─┐
    .grad (host) ◀─copy─ shard ◀──────── free, reduce-scatter ◀────────────────┘

So a device has the parameters of one stage. It has gradients of a stage from its first backward to
its last action; the schedule determines which stages these are.

[Note: FSDP sees one call] FSDP reduces gradients when backward has passed a call of its module. A
step calls layers once for each micro-batch, and runs backward in between. So a step gathers and
frees parameters itself. At the end it makes one call, whose backward returns gradients that are
already known.
"""
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from torchgpipe.engine.gradients import Give
from torchgpipe.engine.partition import named_slots

__all__ = ['Gradients', 'Unit', 'grouped']

#: Pairs of a tensor and its gradient.
Gradients = list[tuple[Tensor, Tensor]]


class Unit(nn.Module):
    """Some stages whose parameters are sharded over replicas.

    Args:
        stages: The stages.
        ignored: Parameters of them that stay as they are.
        late: Whether gradients are reduced at the end of the step.
        options: The options of ``fully_shard``: the mesh and policies.
    """

    def __init__(self, stages: Iterable[nn.Module], ignored: set[nn.Parameter], late: bool,
                 options: Mapping[str, Any]) -> None:
        super().__init__()
        self.late = late
        self.stages = nn.ModuleList(stages)
        # A layer may get further parameters later, which FSDP does not have.
        self._slots = [(module, key) for _, (module, key), x in named_slots(self.stages)
                       if isinstance(x, nn.Parameter) and x not in ignored]
        fully_shard(self, **options, reshard_after_forward=False, ignored_params=ignored)
        assert isinstance(self, FSDPModule)
        self.set_gradient_divide_factor(1.)  # a sum
        self.set_force_sum_reduction_for_comms(True)  # not NCCL's product with 1 and sum

    @property
    def own(self) -> list[nn.Parameter]:
        """The parameters that FSDP manages, in their current form: whole ones, or shards."""
        return [*{id(x): x for module, key in self._slots
                  if (x := module._parameters.get(key)) is not None}.values()]

    def gather(self) -> None:
        """Gather whole parameters on the device."""
        assert isinstance(self, FSDPModule)
        self.unshard()

    def free(self) -> None:
        """Free whole parameters, and keep the shards."""
        assert isinstance(self, FSDPModule)
        self.reshard()

    def add(self, gradients: Gradients) -> None:
        """Free the parameters, and add gradients, summed over replicas, to the shards' ``.grad``.

        Args:
            gradients: The gradients of whole parameters. The list is emptied, so that they are
                freed.
        """
        if gradients:
            tensors, grads = ([*each] for each in zip(*gradients))
            gradients.clear()
            # FSDP would add its own node behind each tensor that it sees.
            known = partial(Give.apply, grads, *tensors)
            self(torch.zeros((), requires_grad=True), known).backward()

    def forward(self, phony: Tensor, known: Callable[[], Tensor]) -> Tensor:
        """Return a tensor whose backward returns gradients: [Note: FSDP sees one call]."""
        return known()


def grouped(stages: Mapping[int, nn.Module], late: Collection[int] = ()) -> list[list[int]]:
    """Return the numbers of stages in groups; stages that share a parameter are in one group.

    Args:
        stages: The stages.
        late: Stages that are in one group in any case.
    """
    owners: dict[int, set[int]] = {0: {*late}}
    for j, stage in stages.items():
        for x in stage.parameters():
            owners.setdefault(id(x), set()).add(j)
    groups = [[j] for j in stages]
    for each in owners.values():
        found = [group for group in groups if not each.isdisjoint(group)]
        if len(found) > 1:
            groups = [group for group in groups if group not in found]
            groups.append(sorted(sum(found, [])))
    return groups
