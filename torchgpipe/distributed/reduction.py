"""Reduction of gradients over replicas, once per step, and units of stages, of FSDP or not.

::

    'replicate'    each rank has all parameters of its stages
                   actions of a stage ──▶ gradients, in buckets ──▶ sum over replicas ──▶ .grad
    'shard'        each rank has a part of them (ZeRO; FSDP2 of PyTorch)
                   gather ──▶ actions ──▶ gradients ──▶ sum over replicas, and scatter ──▶ .grad
    experts        each rank has some, which see the samples of all replicas
                   actions ──▶ gradients, of all replicas already ──▶ .grad

Losses are weighted by the count of the whole mini-batch. So gradients are summed over replicas,
and replicas may have different numbers of samples.

The row of a rank says when units are gathered, freed and reduced (``UNSHARD``, ``RESHARD`` and
``REDUCE_GRAD`` of :mod:`torchgpipe.schedule.messages`). All of it runs beside other actions::

    shard ─ gather ─▶ parameters ─▶ 0F0 0F1 … ─▶ free, for other units
    shard ─ gather ─▶ parameters ─▶ 0B1 0B0 … ─▶ gradients ─┐
    .grad ◀───────── end of step ◀── reduce-scatter, free ◀─┘

With CPUOffloadPolicy, shards and ``.grad`` are on the host. A rank has gradients of a stage from
its first backward to its last action. Two kinds of gradients are reduced at the end of the step:
gradients of parameters that other ranks also have, and gradients that reach a parameter after the
last action of its stage, through a closure of another layer.

[Note: FSDP sees one call] FSDP reduces gradients when backward has passed a call of its module. A
step calls layers once for each micro-batch, and runs backward in between. So a step gathers and
frees parameters itself. At the end it makes one call, whose backward returns gradients that are
already known.
"""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from torchgpipe.base.structure import Gradients
from torchgpipe.distributed.agreement import digests
from torchgpipe.distributed.mesh import Axis
from torchgpipe.engine.gradients import Give, give
from torchgpipe.engine.partition import named_slots, parameters_by_name
from torchgpipe.engine.streams import (
    AbstractStream,
    current_stream,
    new_stream,
    record_stream,
    use_stream,
    wait_stream,
)
from torchgpipe.schedule import Action
from torchgpipe.schedule.messages import Row, UnitAction, with_unit_actions
from torchgpipe.shard.sums import (
    Sum,
    added,
    check_dense,
    ended,
    gathered_over,
    local,
    split_axes,
    started,
)


def check_shardable(stages: nn.ModuleList, ignored: Container[nn.Parameter]) -> None:
    """Check that FSDP2 can gather the parameters of some stages at once.

    Raises:
        ValueError: One is empty, or those that require a gradient have several dtypes.
    """
    first: tuple[str, torch.dtype] | None = None
    for stage in stages:
        for name, x in stage.named_parameters():
            if x in ignored:
                continue
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


class Unit(nn.Module):
    """Some stages whose parameters are sharded over replicas."""

    def __init__(
        self,
        stages: Iterable[nn.Module],
        ignored: set[nn.Parameter],
        late: bool,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        #: Whether gradients are reduced at the end of the step.
        self.late = late
        self.stages = nn.ModuleList(stages)
        self._gathering: Any = None
        # A layer may get further parameters later, which FSDP does not have.
        self._slots = [
            (module, key)
            for _, (module, key), x in named_slots(self.stages)
            if isinstance(x, nn.Parameter) and x not in ignored
        ]
        check_shardable(self.stages, ignored)
        fully_shard(self, **options, reshard_after_forward=False, ignored_params=ignored)
        assert isinstance(self, FSDPModule)
        self.set_gradient_divide_factor(1.0)  # a sum
        self.set_force_sum_reduction_for_comms(True)  # not NCCL's product with 1 and sum

    @property
    def own(self) -> list[nn.Parameter]:
        """The parameters that FSDP manages, in their current form: whole ones, or shards."""
        return [
            *{
                id(x): x
                for module, key in self._slots
                if (x := module._parameters.get(key)) is not None
            }.values()
        ]

    def gather(self) -> None:
        """Start to gather whole parameters on the device."""
        assert isinstance(self, FSDPModule)
        self._gathering = self.unshard(async_op=True)

    def wait(self) -> None:
        """Let the whole parameters take the places of the shards."""
        assert self._gathering is not None
        self._gathering.wait()
        self._gathering = None

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
    """Return the numbers of stages in groups: late ones, and ones that share a parameter."""
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


#: The uses of parameters along the data axis.
DATA = ('replicate', 'shard')


class Replicas(nn.Module):
    """The stages of a rank, which its replicas also have."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        axis: Axis,
        policies: Mapping[str, Any],
        units: Mapping[int, Unit],
        most: int,
        tied: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages.values())
        self._axis = axis
        #: Whether steps reduce gradients over replicas.
        self.syncs = True
        #: Gradients that are not reduced yet, by the number of a parameter.
        self.pending: dict[int, Tensor] = {}
        self.shards = bool(units)
        self.offloads = isinstance(policies.get('offload_policy'), CPUOffloadPolicy)
        self.precision: MixedPrecisionPolicy = policies.get('mp_policy') or MixedPrecisionPolicy()
        parts = {id(x) for unit in units.values() for x in unit.own}
        #: Parameters that are spread over replicas, such as experts: their gradients are complete.
        self._spread: dict[nn.Parameter, None] = dict.fromkeys(
            x for x in self.parameters() if axis.name in split_axes(x) and id(x) not in parts
        )
        #: The numbers of parameters of which other ranks have copies in other stages.
        self._tied = tied
        #: If ranks have parts of parameters, the unit of each stage.
        self._units = units
        groups = (
            grouped(stages)
            if not units
            else [[j for j in units if units[j] is unit] for unit in {*units.values()}]
        )
        #: By stage, the first stage of its unit: of stages that share parameters.
        self.groups = {j: min(group) for group in groups for j in group}
        self._stages = stages
        self._most = most
        #: The units that are whole, with versions of their parameters; ``None`` while it gathers.
        self._whole: dict[Unit, list[Any] | None] = {}
        #: The places of sharded parameters.
        self._sharded = [
            (name, module, key)
            for name, (module, key), x in named_slots(self.stages)
            if self.shards and isinstance(x, nn.Parameter) and x not in self._spread
        ]
        #: Whether to compare values when parameters are freed, because ``x.data`` has no version.
        self.looks = False
        #: The parameters that were gathered in this step.
        self.seen: dict[int, Tensor] = {}
        #: The parameters whose reduction has started in this step, by the number of the whole one.
        self._reduced: dict[int, Tensor] = {}
        #: Whether gradients of such parameters came later, on any replica.
        self.again = False
        self._sums: list[Sum] = []
        #: By device, the stream of reductions by FSDP.
        self._streams: dict[torch.device, AbstractStream] = {}
        #: Shards that were reduced, and whether this rank had a gradient.
        self._there: list[tuple[Tensor, bool]] = []

    # --- while a step or a call runs

    def row(
        self, row: Row, trains: bool, alike: bool, names: Mapping[int, int] | None = None
    ) -> Row:
        """Return the row of this rank with actions of units.

        Args:
            alike: Whether replicas have the same row. Otherwise, they gather at the start, and
                reduce at the end, so that all do it in the same order.
            names: The numbers of the stages in the row; by default, they are the stages.
        """
        names = names or {j: j for j in self.groups}
        units = sorted({*self.groups.values()})
        reduced = [
            names[j]
            for j in units
            if trains
            and (not self._units[j].late if self.shards else self._axis.group and self.syncs)
        ]
        units = [names[j] for j in units]
        if alike:
            groups = {names[j]: names[unit] for j, unit in self.groups.items()}
            return with_unit_actions(row, groups, self._most if self.shards else 0, reduced)
        return (
            *(UnitAction('UNSHARD', j) for j in units if self.shards),
            *row,
            *(UnitAction('REDUCE_GRAD', j) for j in reduced if self.shards),
        )

    def gather(self, j: int) -> None:
        """Start to gather the parameters of a unit."""
        self._whole[self._units[j]] = None
        self._units[j].gather()

    def enter(self, j: int) -> None:
        """Wait for the parameters of a stage."""
        unit = self._units.get(j)
        if unit is not None and self._whole[unit] is None:
            unit.wait()
            self.seen.update((id(x), x) for x in unit.own)
            self._whole[unit] = self._versions_of(unit)

    def free(self, j: int) -> None:
        """Free the whole parameters of a unit.

        Raises:
            RuntimeError: A layer has changed one.
        """
        unit = self._units[j]
        self._check_versions(unit)
        del self._whole[unit]
        unit.free()

    def walk(self, row: Row) -> None:
        """Gather parameters as replicas with samples do."""
        for each in row:
            if isinstance(each, UnitAction):
                self.act(each)
            elif isinstance(each, Action):
                self.enter(each.stage)

    def act(self, action: UnitAction) -> None:
        """Gather or free a unit."""
        (self.gather if action.kind == 'UNSHARD' else self.free)(action.stage)

    def enter_late(self) -> None:
        """Gather the units whose gradients are reduced at the end of a step."""
        for j, unit in self._units.items():
            if unit.late:
                if unit not in self._whole:
                    self.gather(j)
                self.enter(j)

    def tensors(self, j: int) -> list[Tensor]:
        """Return the parameters of a unit that are reduced within a step."""
        if self.shards:
            return [x for x in self._units[j].own if x.requires_grad]
        stages = [stage for k, stage in self._stages.items() if self.groups[k] == j]
        return [
            x
            for x in parameters_by_name(nn.ModuleList(stages))
            if x.requires_grad and x not in self._spread and id(x) not in self._tied
        ]

    def reduce(self, j: int, gradients: Gradients) -> None:
        """Start to add up gradients of a unit over replicas, and free its parameters.

        Args:
            gradients: The gradients of this rank. The list is emptied.
        """
        own = self.tensors(j)
        self._reduced.update((id(x), x) for x in own)
        # A hook has to see the whole gradient, or an error follows at the end.
        beside = self._beside([x for x in own if not _has_hooks(x)])
        kept = self._kept(gradients, beside, own)
        if not self.shards:
            self._sums += started(own, kept, self._axis.group)
            return
        unit = self._units[j]
        learns = [x.requires_grad for x in self._units[j].own]
        self._check_versions(unit)
        del self._whole[unit]
        there = [id(x) in kept for x in own]
        found = self._for_all(own, kept)
        if own:
            self._beside_actions(own[0].device, found, partial(unit.add, found))
        unit.free()
        shards = [x for x, learning in zip(unit.own, learns) if learning]
        self._reduced.update(zip(map(id, own), shards))
        self._there += zip(shards, there) if self.syncs else ()

    def _for_all(self, own: Sequence[Tensor], kept: dict[int, Tensor]) -> Gradients:
        """Return the gradients of a unit, equal on all replicas, and take them out of ``kept``."""
        found = []
        for x in own:
            grad = kept.pop(id(x), None)
            if grad is None and self.syncs and self._axis.group is not None:
                grad = torch.zeros_like(x)
            if grad is not None:
                check_dense(x, grad)
                found.append((x, grad))
        return found

    def _beside_actions(
        self, device: torch.device, gradients: Gradients, reduce: Callable[[], None]
    ) -> None:
        """Run a reduction on a stream of its own, so that actions of the row do not wait for it.

        FSDP lets the current stream wait for a reduction::

            compute stream    0B0 ─────┬─ 2W0 ─ 2W1 ─ … ─┬─ optimizer
            own stream                 └─ reduce-scatter ─┘
        """
        stream = self._streams[device] = self._streams.get(device) or new_stream(device)
        wait_stream(stream, current_stream(device))
        for k in range(len(gradients)):  # No name may keep a gradient alive.
            record_stream(local(gradients[k][1]), stream)
        with use_stream(stream):
            reduce()

    def check_late(self, gradients: Gradients, own: Iterable[Tensor]) -> int:
        """Return the number of gradients that came after the reduction of their parameters.

        Raises:
            RuntimeError: This rank has a part of such a parameter; or a gradient of an earlier
                step would not be reduced.
        """
        known = {
            *map(id, own),
            *map(id, self._spread),
            *(
                id(x)
                for j, unit in self._units.items()
                if unit.late
                for x in unit.own
                if x.requires_grad
            ),
        }
        if self.syncs and not self.pending.keys() <= known:
            raise RuntimeError(
                'a gradient waits from a step within no_sync(), but its '
                'parameter does not require grad any more, or is of another '
                'loss: freeze parameters, and take other losses, after the '
                'step that adds gradients up'
            )
        found = [self._reduced[id(x)] for x, _ in gradients if id(x) in self._reduced]
        if found and self.shards:
            raise RuntimeError(
                f"'{self.name_of(found[0])}' is used by a layer of another stage, "
                'in a closure or a list, so that a part of its gradient came after '
                "the reduction over replicas: with data='shard', let the layer "
                'have it as a parameter'
            )
        return len(found)

    # --- steps and calls

    def run(
        self,
        step: Callable[[], Gradients],
        others: Sequence[Tensor] = (),
        check: Callable[[Gradients], object] = len,
    ) -> None:
        """Run a step, and add its gradients, reduced over replicas, to the parameters' ``.grad``.

        Args:
            check: Called with the reduced gradients. If it raises, no gradient is added.
        """
        with self._all_or_nothing():
            gradients = step()
            for j in sorted({self.groups[j] for j, unit in self._units.items() if unit.late}):
                numbers = {*map(id, self.tensors(j))}
                late = [each for each in gradients if id(each[0]) in numbers]
                gradients = [each for each in gradients if id(each[0]) not in numbers]
                self.reduce(j, late)
            gradients = self._completed(
                gradients, [*self.whole(), *(x for x in others if not self._is_shard(x))]
            )
            check(gradients)
            give(gradients)

    def _completed(self, gradients: Gradients, parameters: Iterable[Tensor]) -> Gradients:
        """Return gradients from all replicas: the reduced ones, and these."""
        once: dict[int, Tensor] = {id(x): x for x in parameters}  # One may also be in a loss.
        again = [x for number, x in once.items() if number in self._reduced]
        rest = [
            x
            for number, x in once.items()
            if number not in self._reduced and x not in self._spread
        ]
        more = {id(x): grad for x, grad in gradients if id(x) in self._reduced}
        gradients = [each for each in gradients if id(each[0]) not in more]
        found = self._kept(gradients, [], [*rest, *self._spread])
        group = self._axis.group
        for x in self._spread if group is not None else (*rest, *self._spread):
            if id(x) in found:
                gradients.append((x, found.pop(id(x))))
        if group is not None and self.syncs:
            self._sums += started(rest, found, group)
            late = started(again, more, group) if self.again else []
            gradients += ended(self._sums)
            gradients = added(gradients, ended(late)) if late else gradients
            self._forget_shards(group)
        return gradients

    def _forget_shards(self, group: dist.ProcessGroup) -> None:
        """Drop the zeros of shards for which no replica had a gradient."""
        if self._there:
            flags = torch.tensor(
                [there for _, there in self._there],
                dtype=torch.uint8,
                device=next(iter(self.seen.values())).device,
            )
            anywhere = torch.stack(gathered_over(group, flags)).amax(0).tolist()
            for (x, _), found in zip(self._there, anywhere):
                x.grad = x.grad if found else None

    def _kept(
        self, gradients: Gradients, more: Gradients, tensors: Iterable[Tensor]
    ) -> dict[int, Tensor]:
        """Return the gradients of some tensors, with the ones of earlier steps, by number.

        Without a reduction, they are kept for a later step.

        Args:
            gradients: Gradients. The ones of these tensors are removed.
        """
        numbers = dict.fromkeys(map(id, tensors))
        for x, grad in (*gradients, *more):
            if id(x) in numbers:
                before = self.pending.get(id(x))
                self.pending[id(x)] = grad if before is None else before + grad
        gradients[:] = [each for each in gradients if id(each[0]) not in numbers]
        if self.syncs:
            return {
                number: self.pending.pop(number) for number in numbers if number in self.pending
            }
        return {}

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Restore all gradients if a step fails, even if some were reduced already."""
        shards = [x for x in self.parameters() if self._is_shard(x)]
        before = [(x, x.grad) for x in shards]
        pending = {**self.pending}
        for x, _ in before:
            x.grad = None
        self.seen = {}
        self._reduced = {}
        self._sums = []
        self._there = []
        self.again = False
        try:
            yield
        except BaseException:
            self._free_all()
            self.pending = pending
            for x, grad in before:
                x.grad = grad
            raise
        finally:
            for device, stream in self._streams.items():
                wait_stream(current_stream(device), stream)
        for x, grad in before:
            if grad is not None and x.grad is not None:
                local(grad).add_(local(x.grad))
            x.grad = x.grad if grad is None else grad

    def _free_all(self) -> None:
        while self._whole:
            self._whole.popitem()[0].free()

    def evaluate(self, run: Callable[[], object]) -> None:
        """Run a function without gradients."""
        try:
            with torch.no_grad():
                run()
        finally:
            self._free_all()

    def whole(self) -> list[nn.Parameter]:
        """Return the parameters that require grad and are not shards of FSDP."""
        return [x for x in parameters_by_name(self) if x.requires_grad and not self._is_shard(x)]

    def _is_shard(self, x: Any) -> bool:
        return (
            isinstance(x, DTensor)
            and x not in self._spread
            and self._axis.name in (x.device_mesh.mesh_dim_names or ())
        )

    def check(self) -> None:
        """Check that sharded parameters are the parameters that FSDP has, without hooks.

        Raises:
            ValueError: A parameter was replaced, or has a hook.
        """
        for name, module, key in self._sharded:
            x = module._parameters.get(key)
            name = name.partition('.')[2]
            if x is not None and x._backward_hooks:
                raise ValueError(
                    f"'{name}' has a hook, which FSDP2 does not call with "
                    "data='shard': change x.grad after the step, or use "
                    "data='replicate'"
                )
            if not isinstance(x, DTensor):
                raise ValueError(
                    f"'{name}' was replaced after this model was made, but with "
                    "data='shard' ranks have parts of the first one: change its "
                    'values in place, or replace it before'
                )

    def check_loss(self, modules: Iterable[nn.Module]) -> None:
        """Check that a loss has whole parameters when it runs, right after the last stage.

        Raises:
            ValueError: It has a parameter of which only another stage has the whole.
        """
        last = self._units.get(max(self._stages))
        there = {id(x) for x in (() if last is None else last.own)}
        for module in modules if self.shards else ():
            for x in module.parameters(recurse=False):
                if self._is_shard(x) and id(x) not in there:
                    raise ValueError(
                        f"loss_fn has '{self.name_of(x)}', a parameter of another "
                        "stage than the last one, and with data='shard' only its own "
                        'stage has the whole: put its layer into the last stage, or '
                        "data='replicate'"
                    )

    def _versions_of(self, unit: Unit) -> list[Any]:
        """Return how often gathered parameters were written to."""
        own = unit.own
        return [
            (x._version, number)
            for x, number in zip(own, digests(map(local, own)) if self.looks else [0] * len(own))
        ]

    def check_versions(self) -> None:
        """Check that layers have not written to gathered parameters, which are not kept.

        Raises:
            RuntimeError: A layer has.
        """
        for unit in self._whole:
            self._check_versions(unit)

    def _check_versions(self, unit: Unit) -> None:
        for x, now, version in zip(unit.own, self._versions_of(unit), self._whole[unit] or ()):
            if now != version:
                raise RuntimeError(
                    f"a layer has changed '{self.name_of(x)}' in its forward, as "
                    "an embedding with max_norm does, but with data='shard' the "
                    "whole parameter is there for one step only: data='replicate', "
                    'or change it between steps'
                )

    @contextmanager
    def beside(self, parameters: Sequence[Tensor]) -> Iterator[Callable[[], Gradients]]:
        """Collect the gradients that reach parameters directly, not through leaves.

        This happens if a layer or a loss uses a parameter in a closure or in a list. The yielded
        function returns these gradients. If no other rank has copies, nothing changes.
        """
        if self._axis.group is None and not self._tied and not self.shards:
            yield list
            return
        before = [(x, x.grad) for x in parameters]
        for x in parameters:
            x.grad = None
        try:
            yield lambda: self._beside([*parameters, *self.seen.values()])
        finally:
            for x, grad in before:
                x.grad = grad

    def _beside(self, parameters: Sequence[Tensor]) -> Gradients:
        found = [
            (x, x.grad) for x in {id(x): x for x in parameters}.values() if x.grad is not None
        ]
        for x, _ in found:
            if _has_hooks(x):
                name = self.name_of(x)
                raise RuntimeError(
                    f"'{name}' has a hook, and is used in a closure or a list, so "
                    'that the hook would see parts of its gradient: let the layer '
                    'or loss_fn that uses it have it as a parameter'
                )
            x.grad = None
        return found

    def name_of(self, x: Tensor) -> str:
        """Return the name of a parameter of this rank, for errors."""
        return next(
            (name.split('.', 2)[2] for name, each in self.named_parameters() if each is x),
            'a parameter of loss_fn',
        )

    @property
    def gathering(self) -> Callable[[Tensor], Sequence[Tensor]] | None:
        """A function that returns a tensor of each replica; ``None`` if there are no others."""
        group = self._axis.group
        return None if group is None else partial(gathered_over, group)

    def forget(self) -> None:
        """Drop gradients that were kept for a later step."""
        self.pending = {}


def _has_hooks(x: Tensor) -> bool:
    return bool(x._backward_hooks or x._post_accumulate_grad_hooks)
