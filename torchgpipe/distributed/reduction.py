"""Reduction of gradients over replicas, once per step; units of FSDP, and clipping by the norm.

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

::

    'replicate'    each rank has all parameters of its stages
                   step ──▶ gradients, in buckets ──▶ sum over replicas ──▶ .grad
    'shard'        each rank has a part of them (ZeRO; FSDP2 of PyTorch)
                   gather ──▶ step ──▶ gradients ──▶ sum over replicas, and scatter ──▶ .grad
                   with CPUOffloadPolicy, stage by stage: see Unit
    experts        each rank has some, which see the samples of all replicas
                   step ──▶ gradients, of all replicas already ──▶ .grad

Losses are weighted by the count of the whole mini-batch. So gradients are summed over replicas,
and replicas may have different numbers of samples.

A gradient is freed when its bucket has a copy of it. So there is at most one bucket in addition to
one set of gradients::

    gradients of this rank    g0 g1 g2 │ g3 g4 │          freed, bucket by bucket
    bucket                             └─ copy ─▶ [g3 g4] ─ all-reduce ─▶ copy
    sums                      s0 s1 s2                                     s3 s4
"""
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from torchgpipe.distributed.agreement import digests
from torchgpipe.distributed.mesh import Axis
from torchgpipe.engine.gradients import Give, give
from torchgpipe.engine.partition import named_slots

__all__ = ['DATA', 'Gradients', 'Replicas', 'Unit', 'added', 'clip', 'grouped', 'is_counted',
           'like', 'local', 'split_axes', 'take_first']

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


#: The uses of parameters along the data axis.
DATA = ('replicate', 'shard')


class Replicas(nn.Module):
    """The stages of a rank, which its replicas also have.

    Args:
        stages: The stages.
        axis: The ranks that have them.
        policies: ``mp_policy`` and ``offload_policy`` of FSDP2, where there are any.
        units: If ranks have parts of parameters, the unit of each stage.
    """

    def __init__(self, stages: Iterable[nn.Module], axis: Axis, policies: Mapping[str, Any],
                 units: Mapping[int, Unit]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)
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
            x for x in self.parameters() if axis.name in split_axes(x) and id(x) not in parts)
        #: Whether other ranks have copies of some parameters in other stages.
        self.tied = False
        self._units = units
        #: The unit that is gathered now, and versions of its parameters.
        self._gathered: Unit | None = None
        self._versions: list[Any] = []
        #: A stage of the unit that is reduced at the end of a step.
        self._late = next((j for j, unit in units.items() if unit.late), None)
        #: The places of sharded parameters.
        self._sharded = [(name, module, key)
                         for name, (module, key), x in named_slots(self.stages)
                         if self.shards and isinstance(x, nn.Parameter)
                         and x not in self._spread]
        #: Whether to compare values when parameters are freed, because ``x.data`` has no version.
        self.looks = False
        #: The parameters that were gathered in this step.
        self.seen: dict[int, Tensor] = {}

    # --- while a step or a call runs

    def enter(self, j: int | None) -> None:
        """Gather the parameters of a stage, after freeing another unit.

        Raises:
            RuntimeError: A layer has changed a parameter that is freed.
        """
        unit = None if j is None else self._units.get(j)
        if unit is not self._gathered:
            self.check_versions()
            self._free()
        if unit is not None and self._gathered is None:
            self._gathered = unit
            unit.gather()
            self.seen.update((id(x), x) for x in unit.own)
            self._versions = self._versions_of(unit)

    def enter_late(self) -> None:
        """Gather the parameters whose gradients are reduced at the end of a step."""
        self.enter(self._late)

    def walk(self) -> None:
        """Gather the parameters of one stage after the other, as replicas with samples do."""
        for j in sorted(self._units):
            self.enter(j)

    def early(self, j: int) -> Unit | None:
        """Return the unit of a stage, if its gradients are reduced within a step."""
        unit = self._units.get(j)
        return None if unit is None or unit.late else unit

    def reduce(self, gradients: Gradients) -> None:
        """Reduce the gradients of parameters that are gathered now, and free both.

        Args:
            gradients: The gradients of this rank. The list is emptied.
        """
        unit = self._gathered
        assert unit is not None
        self.check_versions()
        own = unit.own
        gradients[:] = self._completed(added(gradients, self._beside(own)), own)
        gradients[:] = self._together(gradients, (), own)
        unit.add(gradients)
        self._free()

    def _free(self) -> None:
        if self._gathered is not None:
            self._gathered.free()
            self._gathered = None

    # --- steps and calls

    def run(self, step: Callable[[], Gradients], others: Sequence[Tensor] = ()) -> None:
        """Run a step, and add its gradients, reduced over replicas, to the parameters' ``.grad``.

        Args:
            step: Returns the gradients of this rank, except gradients that are reduced within it.
            others: Parameters of a loss, which are in none of the stages.
        """
        with self._all_or_nothing():
            if not self.offloads:
                self.enter_late()
            gradients = step()
            if self._gathered is not None:
                numbers = {*map(id, self._gathered.own)}
                late = [each for each in gradients if id(each[0]) in numbers]
                gradients = [each for each in gradients if id(each[0]) not in numbers]
                self.reduce(late)
            own = [x for x in self.whole() if x not in self._spread]
            gradients = self._together(
                gradients, [*own, *(x for x in others if not self._is_shard(x))],
                [*self._spread])
            if self.syncs and self.pending:
                raise RuntimeError('a gradient waits from a step within no_sync(), but its '
                                   'parameter does not require grad any more, or is of another '
                                   'loss: freeze parameters, and take other losses, after the '
                                   'step that adds gradients up')
            give(gradients)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Restore all gradients if a step fails, even if some were reduced already."""
        shards = filter(self._is_shard, self.parameters() if self.offloads else ())
        before, pending = [(x, x.grad) for x in shards], {**self.pending}
        for x, _ in before:
            x.grad = None
        self.seen = {}
        try:
            yield
        except BaseException:
            self._free()
            self.pending = pending
            for x, grad in before:
                x.grad = grad
            raise
        for x, grad in before:
            if grad is not None and x.grad is not None:
                local(grad).add_(local(x.grad))
            x.grad = x.grad if grad is None else grad

    def evaluate(self, run: Callable[[], object]) -> None:
        """Run a function without gradients."""
        try:
            with torch.no_grad():
                run()
        finally:
            self._free()

    def whole(self) -> list[nn.Parameter]:
        """Return the parameters that require grad and are not shards of FSDP."""
        return [x for x in self.parameters() if x.requires_grad and not self._is_shard(x)]

    def _is_shard(self, x: Any) -> bool:
        return isinstance(x, DTensor) and x not in self._spread and self._axis.name in (
            x.device_mesh.mesh_dim_names or ())

    def check(self) -> None:
        """Check that sharded parameters are the parameters that FSDP has, without hooks.

        Raises:
            ValueError: A parameter was replaced, or has a hook.
        """
        for name, module, key in self._sharded:
            x = module._parameters.get(key)
            name = name.partition('.')[2]
            if x is not None and x._backward_hooks:
                raise ValueError(f"'{name}' has a hook, which FSDP2 does not call with "
                                 "data='shard': change x.grad after the step, or use "
                                 "data='replicate'")
            if not isinstance(x, DTensor):
                raise ValueError(f"'{name}' was replaced after this model was made, but with "
                                 "data='shard' ranks have parts of the first one: change its "
                                 'values in place, or replace it before')

    def _versions_of(self, unit: Unit) -> list[Any]:
        """Return how often gathered parameters were written to."""
        own = unit.own
        return [(x._version, number) for x, number in zip(
            own, digests(map(local, own)) if self.looks else [0] * len(own))]

    def check_versions(self) -> None:
        """Check that layers have not written to gathered parameters, which are not kept.

        Raises:
            RuntimeError: A layer has.
        """
        unit = self._gathered
        for x, now, version in [] if unit is None else zip(
                unit.own, self._versions_of(unit), self._versions):
            if now != version:
                raise RuntimeError(f"a layer has changed '{self.name_of(x)}' in its forward, as "
                                   "an embedding with max_norm does, but with data='shard' the "
                                   "whole parameter is there for one step only: data='replicate', "
                                   'or change it between steps')

    @contextmanager
    def beside(self, parameters: Sequence[Tensor]) -> Iterator[Callable[[], Gradients]]:
        """Collect the gradients that reach parameters directly, not through leaves.

        This happens if a layer or a loss uses a parameter in a closure or in a list. The yielded
        function returns these gradients. If no other rank has copies, nothing changes.

        Args:
            parameters: The parameters of this rank that require grad.
        """
        if self._axis.group is None and not self.tied:
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
        found = [(x, x.grad) for x in {id(x): x for x in parameters}.values()
                 if x.grad is not None]
        for x, _ in found:
            if x._backward_hooks or x._post_accumulate_grad_hooks:
                name = self.name_of(x)
                raise RuntimeError(f"'{name}' has a hook, and is used in a closure or a list, so "
                                   'that the hook would see parts of its gradient: let the layer '
                                   'or loss_fn that uses it have it as a parameter')
            x.grad = None
        return found

    def name_of(self, x: Tensor) -> str:
        """Return the name of a parameter of this rank, for errors."""
        return next((name.split('.', 2)[2] for name, each in self.named_parameters()
                     if each is x), 'a parameter of loss_fn')

    def _completed(self, gradients: Gradients, sharded: Sequence[Tensor]) -> Gradients:
        """Return gradients, with zeros for parameters with a gradient on other replicas only."""
        group, there = self._axis.group, {id(x) for x, _ in gradients}
        for x, grad in gradients:
            _check_dense(x, grad)
        if group is None or not sharded:
            return gradients
        flags = torch.tensor([id(x) in there for x in sharded], device=sharded[0].device)
        anywhere = torch.stack(_gathered(group, flags.to(torch.uint8))).amax(0).tolist()
        return gradients + [(x, torch.zeros_like(x)) for x, found in zip(sharded, anywhere)
                            if found and id(x) not in there]

    @property
    def gather(self) -> Callable[[Tensor], Sequence[Tensor]] | None:
        """A function that returns a tensor of each replica; ``None`` if there are no others."""
        group = self._axis.group
        return None if group is None else partial(_gathered, group)

    def _together(self, gradients: Gradients, parameters: Iterable[Tensor],
                  sharded: Sequence[Tensor] = ()) -> Gradients:
        """Return the gradients of some parameters from all replicas; or keep them for later.

        Args:
            gradients: The gradients of this rank.
            parameters: The parameters, which other replicas also have.
            sharded: Parameters whose gradients are complete, or are reduced by FSDP.
        """
        if self._axis.group is None and self.syncs and not self.pending:
            return gradients
        summed = {id(x): x for x in parameters}  # One may stand in a loss and in the model.
        kept = {**summed, **{id(x): x for x in sharded}}
        found = [(x, grad) for x, grad in gradients if id(x) not in kept]
        for x, grad in gradients:
            if id(x) in kept:
                before = self.pending.get(id(x))
                self.pending[id(x)] = grad if before is None else before + grad
        gradients.clear()  # Each can be freed when it is reduced.
        if not self.syncs:
            return found
        own = {number: self.pending.pop(number) for number in kept if number in self.pending}
        group = self._axis.group
        local_only = kept.values() if group is None else sharded
        found += [(x, own[id(x)]) for x in local_only if id(x) in own]
        return found if group is None else found + [*_summed([*summed.values()], own, group)]

    def forget(self) -> None:
        """Drop gradients that were kept for a later step."""
        self.pending = {}


def added(gradients: Gradients, more: Gradients) -> Gradients:
    """Return the sum of gradients for each tensor."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for x, grad in (*gradients, *more):
        found[id(x)] = x, found[id(x)][1] + grad if id(x) in found else grad
    return [*found.values()]


def _summed(parameters: Sequence[Tensor], found: dict[int, Tensor], group: dist.ProcessGroup
            ) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter with a gradient on any rank, and the sum of its gradients.

    Args:
        parameters: The parameters of this rank, as on all other ranks.
        found: Their gradients on this rank, by number. It is emptied bucket by bucket, so that
            there is no second set of gradients.
        group: The replicas.
    """
    sums: Gradients = []
    counts = []
    for bucket in _buckets(parameters):
        results, count = _sum_of_bucket(bucket, found, group)
        sums += zip(bucket, results)
        counts.append(count)
    # One look at the device for all buckets, because it waits for them.
    anywhere = torch.cat(counts).tolist() if counts else ()
    yield from (each for each, count in zip(sums, anywhere) if count)


def _sum_of_bucket(bucket: Sequence[Tensor], found: dict[int, Tensor], group: dist.ProcessGroup
                   ) -> tuple[list[Tensor], Tensor]:
    """Return the sums of the gradients of some parameters, and the numbers of ranks with one."""
    grads = [like(x, found.get(id(x))) for x in bucket]
    there = local(grads[0]).new_tensor([float(found.pop(id(x), None) is not None) for x in bucket])
    flat = torch.cat([*(local(grad).reshape(-1) for grad in grads), there])
    grads.clear()
    dist.all_reduce(flat, group=group)
    *totals, count = flat.split([*(local(x).numel() for x in bucket), len(bucket)])
    results = [torch.empty_like(x, dtype=flat.dtype) for x in bucket]
    for result, total in zip(results, totals):
        local(result).copy_(total.view_as(local(result)))
    return results, count.clone()


#: The bytes at which a bucket of gradients ends, as in PyTorch's DDP.
BUCKET = 25 * 2 ** 20


def _buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters whose gradients are reduced in one message: of one dtype, BUCKET bytes."""
    def kind(x: Tensor) -> str:
        return str(x.dtype)

    for _, same in groupby(sorted(parameters, key=kind), kind):
        bucket, size = [], 0
        for x in same:
            bucket.append(x)
            size += local(x).nbytes
            if size >= BUCKET:
                yield bucket
                bucket, size = [], 0
        yield from [bucket] if bucket else []


def _gathered(group: dist.ProcessGroup, x: Tensor) -> list[Tensor]:
    found = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(found, x, group)
    return found


def like(x: Tensor, grad: Tensor | None) -> Tensor:
    """Return a gradient in the placements of its parameter; zeros if there is none."""
    if grad is None:
        return torch.zeros_like(x)
    _check_dense(x, grad)
    if isinstance(grad, DTensor) and isinstance(x, DTensor):
        return grad.redistribute(placements=x.placements)
    return grad


def _check_dense(x: Tensor, grad: Tensor) -> None:
    if grad.layout is not torch.strided:
        raise RuntimeError(f'the gradient of a parameter of shape {tuple(x.shape)} is sparse, but '
                           'ranks add up dense ones: nn.Embedding(…, sparse=False)')


@torch.no_grad()
def take_first(module: nn.Module, axis: Axis) -> None:
    """Copy the parameters and buffers of the first rank of an axis to the others."""
    if axis.group is not None:
        for x in (*module.parameters(), *module.buffers()):
            if x.layout is not torch.strided:
                continue  # It is only compared.
            value = x.contiguous()
            # Backends do not support all types.
            dist.broadcast(value.view(-1).view(torch.uint8), axis.ranks[0], axis.group)
            if not x.equal(value):  # An expanded tensor cannot be written to.
                x.copy_(value)


def split_axes(x: Tensor) -> set[str]:
    """Return the axes of a mesh along which a tensor is split."""
    return {name for name, placement in zip(x.device_mesh.mesh_dim_names or (), x.placements)
            if not placement.is_replicate()} if isinstance(x, DTensor) else set()


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def is_counted(grad: Tensor, places: Mapping[str, int]) -> bool:
    """Return whether this rank counts its part of a gradient.

    Of several ranks with the same part, only the first one counts it.

    Args:
        grad: The gradient.
        places: The number of this rank along each axis of the mesh along which other ranks have
            the same gradient or parts of it.
    """
    split = split_axes(grad)
    return not any(place for axis, place in places.items() if axis not in split)


@torch.no_grad()
def clip(gradients: Sequence[Tensor], copies: Sequence[Tensor], places: Mapping[str, int],
         max_norm: float, norm_type: float, group: dist.ProcessGroup | None, device: torch.device
         ) -> Tensor:
    """Scale gradients, in place, to a norm; return their previous norm.

    Args:
        gradients: The gradients of this rank.
        copies: Further gradients of this rank, which another rank counts.
        places: See :func:`is_counted`.
        max_norm: The largest norm that they may have.
        norm_type: The type of the norm; ``inf`` for the largest value.
        group: All ranks.
        device: The device of this rank.
    """
    power = 1. if norm_type == float('inf') else norm_type
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for grad in map(_over_ranks, gradients):
        if is_counted(grad, places) and local(grad).numel():  # An empty tensor has no maximum.
            norm = torch.linalg.vector_norm(local(grad), norm_type)
            norms.append(norm.to(device, torch.float64) ** power)
    stacked = torch.stack(norms)
    total = stacked.amax() if norm_type == float('inf') else stacked.sum()
    if group is not None:
        operation = dist.ReduceOp.MAX if norm_type == float('inf') else dist.ReduceOp.SUM
        dist.all_reduce(total, operation, group)
    total = total ** (1 / power)
    scale = (max_norm / (total + 1e-6)).clamp(max=1)
    for grad in (*gradients, *copies):
        local(grad).mul_(scale.to(local(grad).device))  # It may wait on the host.
    return total


def _over_ranks(grad: Tensor) -> Tensor:
    """Return a gradient without partial placements: no rank has a summand only."""
    if isinstance(grad, DTensor) and any(each.is_partial() for each in grad.placements):
        return grad.redistribute(placements=[
            Replicate() if each.is_partial() else each for each in grad.placements])
    return grad
