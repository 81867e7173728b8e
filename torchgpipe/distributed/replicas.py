"""Replicas: the gradients of a rank's parameters, reduced over the data axis once per step.

::

    'replicate'    each rank has all parameters of its stages
                   actions of a stage ──▶ gradients, in buckets ──▶ sum over replicas ──▶ .grad
    'shard'        each rank has a part of them (ZeRO; FSDP2 of PyTorch)
                   gather ──▶ actions ──▶ gradients ──▶ sum over replicas, and scatter ──▶ .grad
    experts        each rank has some, which see the samples of all replicas
                   actions ──▶ gradients, of all replicas already ──▶ .grad

Losses are weighted by the count of the whole mini-batch. So gradients are summed over replicas,
and replicas may have different numbers of samples.

The way of one gradient, with the state in the record of its parameter (:class:`GradientState`)::

    NONE        1. actions of the stage add to its leaf, or directly to the parameter
    LOCAL       2. `reduce` or `finish` takes the gradient of this rank into the record
    REDUCING    3. an all-reduce of its bucket, or FSDP's reduce-scatter, starts
    NONE        4. `finish` waits for the sum, which goes to ``.grad``

The last action of a unit completes its gradients. If it is a backward, they take steps 2 and 3 in
buckets while it runs (:mod:`.buckets`), and the rest follows it (``REDUCE_GRAD`` in the row).
Three kinds of gradients take steps 2 and 3 at the end of the step: of parameters that other ranks
also have, whose sum over stages comes first (:mod:`.ties`); of parameters of the loss; and late
ones, which reach a parameter after its step 3, through a closure of another layer.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from torchgpipe.base.structure import Gradients
from torchgpipe.distributed.buckets import Arrivals
from torchgpipe.distributed.mesh import Axis
from torchgpipe.distributed.units import Unit, UnitState, group_stages
from torchgpipe.engine.partition import all_modules
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
    buckets,
    check_dense,
    end_sums,
    gathered_over,
    local,
    split_axes,
    start_sums,
)


class GradientState(Enum):
    """Where the gradient of a parameter is."""

    #: This rank has none.                                      first gradient ──▶ LOCAL
    NONE = auto()
    #: This rank has its part, from this step or from earlier ones within ``no_sync``.
    #:                                                          reduction ──▶ REDUCING
    LOCAL = auto()
    #: Its sum over replicas has started, also if this rank has no part of it.
    #:                                                          next step ──▶ NONE
    REDUCING = auto()


@dataclass(eq=False, slots=True)
class ParameterRecord:
    """A parameter of this rank, or of the loss, and its gradient on the way to ``.grad``."""

    #: The name in the model.
    name: str
    #: The parameter; with FSDP, the shard.
    tensor: Tensor
    #: The first stage of its unit; -1 for a parameter of the loss.
    unit: int = -1
    #: Whether FSDP splits it over the data axis.
    is_sharded: bool = False
    #: Whether ranks along the data axis have other parts of it, such as experts, which see the
    #: samples of all replicas. So their gradients are complete.
    is_spread: bool = False
    #: Whether a stage of another rank has a copy, whose gradient is added at the end of the step.
    is_tied: bool = False
    #: The whole parameter, once it was gathered in this step. Its memory may be freed already.
    whole: Tensor | None = None
    state: GradientState = GradientState.NONE
    #: The gradient of this rank that is not reduced yet.
    gradient: Tensor | None = None
    #: Whether this rank had a gradient when the reduction started.
    had_gradient: bool = False
    #: Whether FSDP adds to the ``.grad`` of earlier steps, because a hook sees the sum.
    adds_to_grad: bool = False

    @property
    def current(self) -> Tensor:
        """The tensor that layers use: the whole parameter, if it was gathered."""
        return self.tensor if self.whole is None else self.whole

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of this rank."""
        # Not in place: `all_or_nothing` may restore the earlier sum.
        self.gradient = gradient if self.gradient is None else self.gradient + gradient
        self.state = GradientState.LOCAL

    def take(self) -> Tensor | None:
        """Return the gradient of this rank, for its reduction, and keep no reference to it."""
        gradient = self.gradient
        self.gradient = None
        self.had_gradient = gradient is not None
        self.state = GradientState.REDUCING
        return gradient

    def restore(self, gradient: Tensor | None) -> None:
        """Begin a step with a gradient that waits, or restore it after a failed step."""
        self.gradient = gradient
        self.state = GradientState.NONE if gradient is None else GradientState.LOCAL

    @property
    def has_hooks(self) -> bool:
        """Whether hooks wait for the gradient, which have to get the whole one."""
        x = self.current
        return bool(x._backward_hooks or x._post_accumulate_grad_hooks)


class Records:
    """The records of a step, by the ``id`` of each parameter, and of each whole parameter.

    A record owns its tensors, so no other tensor can have their ``id``.

    Args:
        parameters: The ``id`` of each parameter, in the order of modules.
    """

    def __init__(self, parameters: Sequence[int] = ()) -> None:
        self.parameters = parameters
        self._records: dict[int, ParameterRecord] = {}

    def __iter__(self) -> Iterator[ParameterRecord]:
        return iter(dict.fromkeys(self._records.values()))

    def of(self, x: Tensor) -> ParameterRecord | None:
        """Return the record of a parameter, or ``None`` for another tensor."""
        return self._records.get(id(x))

    def add(self, x: Tensor, record: ParameterRecord) -> None:
        """Add a record under one of its tensors."""
        self._records[id(x)] = record


_name = itemgetter(0)


def _communicate(stages: Iterable[nn.Module]) -> bool:
    """Return whether layers communicate themselves."""
    for stage in stages:
        for module in stage.modules():
            if getattr(module, 'communicates', False) is True:
                return True
    return False


class Replicas:
    """The parameters of a rank, whose gradients are summed with the ones of its replicas.

    Args:
        stages: The layers of each stage of this rank.
        axis: The data axis.
        units: If FSDP splits parameters, the unit of each stage.
        tied: The ``id`` of each parameter of which other ranks have copies in other stages.
        reduce_dtype: The dtype of gradients; by default the dtype of each parameter.

    Attributes:
        syncs: Whether steps reduce gradients over replicas.
        groups: By stage, the first stage of its unit: of stages that share parameters.
        records: The records of the current step, or of the last one.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        axis: Axis,
        units: Mapping[int, Unit],
        tied: Iterable[int] = (),
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self._reduce_dtype = reduce_dtype
        self.stages = stages
        self._axis = axis
        self.units = units
        self._tied = {*tied}
        self.syncs = True
        self.groups: dict[int, int] = {}
        for group in group_stages(stages):
            self.groups.update(dict.fromkeys(group, min(group)))
        first_stages: dict[Unit, int] = {}
        for j in sorted(units):
            self.groups[j] = first_stages.setdefault(units[j], j)
        self.records = Records()
        self._sums: list[Sum] = []
        #: By unit, the names of its parameters in the order of the first backward.
        self._orders: dict[int, list[str]] = {}
        #: By unit, the gradients that have arrived in its last backward of this step.
        self._arrivals: dict[int, Arrivals[ParameterRecord]] = {}
        #: Whether gradients are reduced within the last backward of their unit. Layers that
        #: communicate may use the group of the reductions, whose order would then differ.
        self.reduces_within_backward = not units and not _communicate(stages.values())
        #: The stream of reductions by FSDP.
        self._stream: AbstractStream | None = None
        self.refresh()

    def refresh(self, loss_parameters: Iterable[Tensor] = ()) -> None:
        """Make the records of a step. Gradients that wait for a reduction stay in theirs.

        Layers may have other parameters than before, and other ones may require grad.

        Raises:
            RuntimeError: A gradient of an earlier step would not be reduced.
        """
        records = self._records_of([*loss_parameters])
        parameters = {*records.parameters}
        for record in self.records:
            if record.gradient is None:
                continue
            is_known = id(record.tensor) in parameters and record.tensor.requires_grad
            if self.syncs and not is_known:
                raise RuntimeError(
                    'a gradient waits from a step within no_sync(), but its '
                    'parameter does not require grad any more, or is of another '
                    'loss: freeze parameters, and take other losses, after the '
                    'step that adds gradients up'
                )
            records.add(record.tensor, record)
        for record in records:
            record.whole = None
            record.restore(record.gradient)
        self.records = records

    def _records_of(self, loss_parameters: Sequence[Tensor]) -> Records:
        """Return the records of all parameters: the last ones, if the parameters are the same."""
        parameters: list[Tensor | None] = [*loss_parameters]
        for stage in self.stages.values():
            for module in all_modules(stage):
                parameters += module._parameters.values()
        ids = [*map(id, parameters)]
        if ids == self.records.parameters and not self.units:
            return self.records

        records = Records(ids)
        for j, stage in self.stages.items():
            # Sorted, because a module may register its parameters in the order of a set.
            for name, x in sorted(stage.named_parameters(remove_duplicate=False), key=_name):
                if records.of(x) is None:
                    records.add(x, self.records.of(x) or self._record_of(name, x, j))
        for parameter in loss_parameters:
            if records.of(parameter) is None:
                record = self.records.of(parameter)
                record = record or ParameterRecord('a parameter of loss_fn', parameter)
                records.add(parameter, record)
        return records

    def _record_of(self, name: str, x: Tensor, j: int) -> ParameterRecord:
        is_split = self._axis.name in split_axes(x)
        is_sharded = j in self.units and x in self.units[j].managed()
        return ParameterRecord(
            name,
            x,
            self.groups[j],
            is_sharded=is_sharded,
            is_spread=is_split and not is_sharded,
            is_tied=id(x) in self._tied,
        )

    def unsharded(self) -> list[ParameterRecord]:
        """Return the records of parameters that require grad, except shards of FSDP."""
        return [
            record
            for record in self.records
            if record.tensor.requires_grad and not record.is_sharded
        ]

    # Actions of units, while a row runs.

    def row(
        self,
        row: Row,
        most: int,
        trains: bool,
        is_equal: bool,
        stages: Mapping[int, int] | None = None,
    ) -> Row:
        """Return the row of this rank with actions of units.

        Args:
            most: How many units are whole at a time.
            is_equal: Whether replicas have the same row. Otherwise, they gather at the start, and
                reduce at the end, so that all do it in the same order.
            stages: The stages of the row, by the stages of this rank; by default, they are equal.
        """
        stages = stages or {j: j for j in self.groups}
        units = sorted({*self.groups.values()})
        reduced = [stages[j] for j in units if trains and self._reduces_within_row(j)]
        if is_equal:
            groups = {stages[j]: stages[unit] for j, unit in self.groups.items()}
            return with_unit_actions(row, groups, most if self.units else 0, reduced)
        if not self.units:
            return row
        return (
            *(UnitAction('UNSHARD', stages[j]) for j in units),
            *row,
            *(UnitAction('REDUCE_GRAD', j) for j in reduced),
        )

    def _reduces_within_row(self, j: int) -> bool:
        if self.units:
            return not self.units[j].reduces_at_end
        return self._axis.group is not None and self.syncs

    def enter(self, j: int) -> None:
        """Wait for the parameters of a stage."""
        unit = self.units.get(j)
        if unit is None or unit.state is not UnitState.GATHERING:
            return
        shards = [*unit.managed()]
        unit.wait()
        for shard, whole in zip(shards, unit.managed()):
            record = self.records.of(shard)
            assert record is not None
            record.whole = whole
            self.records.add(whole, record)

    def act(self, action: UnitAction) -> None:
        """Gather or free a unit.

        Raises:
            RuntimeError: A layer has changed a parameter that is freed.
        """
        unit = self.units[action.stage]
        if action.kind == 'UNSHARD':
            unit.gather()
        else:
            unit.check_unchanged()
            unit.free()

    def act_without_samples(self, row: Row) -> None:
        """Gather parameters as replicas with samples do."""
        for item in row:
            if isinstance(item, UnitAction):
                self.act(item)
            elif isinstance(item, Action):
                self.enter(item.stage)

    def gather_for_end(self) -> None:
        """Gather the units whose gradients are reduced at the end of a step."""
        for j, unit in self.units.items():
            if unit.reduces_at_end:
                if unit.state is UnitState.SHARDED:
                    unit.gather()
                self.enter(j)

    def check_unchanged(self) -> None:
        """Check that layers have not written to parameters that are still gathered."""
        for unit in {*self.units.values()}:
            unit.check_unchanged()

    def records_of_unit(self, j: int) -> list[ParameterRecord]:
        """Return the records of a unit's parameters that are reduced together."""
        records = []
        for record in self.records:
            if record.unit != j or not record.tensor.requires_grad:
                continue
            # FSDP does not know parameters that a layer has got later.
            is_of_unit = record.is_sharded
            if not self.units:
                is_of_unit = not (record.is_spread or record.is_tied)
            if is_of_unit:
                records.append(record)
        return records

    def begin_arrivals(
        self,
        j: int,
        watch: Callable[[Container[int], Callable[[Tensor], None]], list[RemovableHandle]],
        take: Callable[[Container[int]], Gradients],
    ) -> list[RemovableHandle]:
        """Begin to reduce the gradients of a unit, as they arrive in its last backward.

        Args:
            watch: Calls a function with each of some parameters when its gradient is complete.
            take: Returns the gradients of this rank, by the ``id`` of each parameter.

        Returns:
            Handles that end this.
        """
        watched = self.records_of_unit(j)
        waiting: list[list[ParameterRecord]] = []
        if self._is_order_known(j, watched):
            # The last bucket is complete when the backward ends, and `reduce` follows.
            waiting = self._buckets(j, watched)[:-1]
            watched = [record for bucket in waiting for record in bucket]
        arrivals = self._arrivals[j] = Arrivals(waiting, partial(self._start_bucket, take))

        def arrived(x: Tensor) -> None:
            arrivals.arrive(self._record(x))

        return watch({id(record.current) for record in watched}, arrived)

    def _buckets(self, j: int, records: Sequence[ParameterRecord]) -> list[list[ParameterRecord]]:
        """Return the records of a unit, whose order is known, in buckets."""
        tensors = [record.tensor for record in self._in_order(j, records)]
        return [[*map(self._record, bucket)] for bucket in buckets(tensors)]

    def _start_bucket(
        self,
        take: Callable[[Container[int]], Gradients],
        records: Sequence[ParameterRecord],
    ) -> None:
        """Start to add up the gradients of a bucket, all of which have arrived."""
        self._collect(take({id(record.tensor) for record in records}))
        self._start(records)

    def _is_order_known(self, j: int, records: Sequence[ParameterRecord]) -> bool:
        """Return whether the gradients of these parameters have arrived in an earlier step."""
        return {*self._orders.get(j, ())} == {record.name for record in records}

    def _in_order(self, j: int, records: Sequence[ParameterRecord]) -> list[ParameterRecord]:
        """Return the records of a unit in the order of the first replica's first backward."""
        by_name = {record.name: record for record in records}
        if not self._is_order_known(j, records):
            order = [*by_name]
            if j in self._arrivals:
                arrived = [record.name for record in self._arrivals[j].order]
                order = [*dict.fromkeys([*arrived, *order])]
            self._orders[j] = self._order_of_first(order, [*by_name])
        # A unit without parameters that learn has no order.
        return [by_name[name] for name in self._orders.get(j, ())]

    def _order_of_first(self, order: Sequence[str], names: Sequence[str]) -> list[str]:
        """Return the order of names on the first replica."""
        group = self._axis.group
        assert group is not None
        device = next(iter(self.records)).current.device
        numbers = torch.tensor([names.index(name) for name in order], device=device)
        dist.broadcast(numbers, group=group, group_src=0)
        return [names[k] for k in numbers.tolist()]

    def reduce(self, j: int, gradients: Gradients) -> Gradients:
        """Start to add up the gradients of a unit over replicas, and free its parameters.

        Args:
            gradients: The gradients of this rank. The list is emptied.

        Returns:
            The gradients that came after the reduction of their parameters.
        """
        records = self.records_of_unit(j)
        # A hook has to see the whole gradient, or an error follows at the end.
        direct = self.take_direct([record for record in records if not record.has_hooks])
        late = self._collect(gradients, direct)
        if self.units:
            self._reduce_shards(j, records)
            return late
        if self.reduces_within_backward and records:
            records = self._in_order(j, records)
        self._start([record for record in records if record.state is not GradientState.REDUCING])
        return late

    def _record(self, x: Tensor) -> ParameterRecord:
        record = self.records.of(x)
        assert record is not None
        return record

    def _collect(self, *parts: Gradients) -> Gradients:
        """Add gradients to the records of their parameters; return late ones.

        The lists are emptied.
        """
        late: Gradients = []
        for gradients in parts:
            while gradients:
                x, gradient = gradients.pop(0)
                record = self._record(x)
                if record.state is GradientState.REDUCING:
                    late.append((x, gradient))
                else:
                    record.add(gradient)
        return late

    def _start(self, records: Sequence[ParameterRecord]) -> None:
        """Start to add up gradients over replicas."""
        assert self._axis.group is not None
        gradients: dict[Tensor, Tensor | None] = {}
        for record in records:
            gradients[record.tensor] = record.take()
        self._sums += start_sums(gradients, self._axis.group, self._reduce_dtype)

    def _reduce_shards(self, j: int, records: Sequence[ParameterRecord]) -> None:
        """Let FSDP reduce the gradients of a unit, and free its parameters."""
        unit = self.units[j]
        unit.check_unchanged()
        gradients: Gradients = []
        if self.syncs:
            gradients = self._gradients_for_fsdp(records)
        if records:
            self._reduce_concurrently(records[0].current.device, unit, gradients)
        unit.free()

    def _gradients_for_fsdp(self, records: Sequence[ParameterRecord]) -> Gradients:
        """Return the gradients of a unit, of the same parameters on all replicas."""
        gradients: Gradients = []
        for record in records:
            whole = record.current
            gradient = record.take()
            if gradient is None and self._axis.group is not None:
                gradient = torch.zeros_like(whole, dtype=self._reduce_dtype)
            if gradient is not None:
                check_dense(whole, gradient)
                gradients.append((whole, gradient))
        return gradients

    def _reduce_concurrently(
        self,
        device: torch.device,
        unit: Unit,
        gradients: Gradients,
    ) -> None:
        """Run a reduction on a separate stream, so that actions of the row do not wait for it.

        FSDP lets the current stream wait for a reduction::

            compute stream     0B0 ─────┬─ 2W0 ─ 2W1 ─ … ─┬─ optimizer
            separate stream             └─ reduce-scatter ─┘
        """
        stream = self._stream = self._stream or new_stream(device)
        wait_stream(stream, current_stream(device))
        for k in range(len(gradients)):  # No name may keep a gradient alive.
            record_stream(local(gradients[k][1]), stream)
        with use_stream(stream):
            unit.reduce(gradients)

    # The start and the end of a step.

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Run a step. If it fails, restore all gradients, even if some were reduced already.

        A hook that raises while gradients are added to ``.grad`` leaves the ones added before.
        """
        self._sums = []
        self._arrivals = {}
        waiting = [(record, record.gradient) for record in self.records]
        shards = []
        before = []
        copies = []
        for record in self.records:
            if not record.is_sharded:
                continue
            x = record.tensor
            shards.append(x)
            record.adds_to_grad = x.grad is not None and bool(x._post_accumulate_grad_hooks)
            if x.grad is not None and record.adds_to_grad:
                copies.append((x, x.grad.clone()))
            else:
                before.append((x, x.grad))
                x.grad = None
        try:
            yield
        except BaseException:
            self.free_all()
            for record, gradient in waiting:
                record.restore(gradient)
            for x, gradient in (*before, *copies):
                x.grad = gradient
            raise
        finally:
            if self._stream is not None and shards:
                wait_stream(current_stream(shards[0].device), self._stream)

        for x, gradient in before:
            if gradient is None:
                continue
            if x.grad is not None:
                local(gradient).add_(local(x.grad))
            x.grad = gradient

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Run a forward without gradients, and free all parameters afterwards."""
        try:
            yield
        finally:
            self.free_all()

    def free_all(self) -> None:
        """Free all parameters that are gathered."""
        for unit in {*self.units.values()}:
            if unit.state is not UnitState.SHARDED:
                unit.free()

    @contextmanager
    def direct_gradients(self) -> Iterator[None]:
        """Separate the gradients that reach parameters directly, not through leaves.

        This happens if a layer or a loss uses a parameter in a closure or in a list. Within this
        context :meth:`take_direct` returns them.
        """
        before = []
        for record in self.unsharded():
            if self._is_separable(record):
                before.append((record.tensor, record.tensor.grad))
                record.tensor.grad = None
        try:
            yield
        finally:
            for x, gradient in before:
                x.grad = gradient

    def _is_separable(self, record: ParameterRecord) -> bool:
        """Return whether direct gradients are separated from the sum of earlier steps.

        Otherwise a hook gets each of them as it arrives. That is right only if no other rank has
        a part.
        """
        has_others = bool(self._axis.group is not None or self._tied or self.units)
        return has_others or not record.has_hooks

    def take_direct(self, records: Iterable[ParameterRecord] | None = None) -> Gradients:
        """Return the gradients that have reached parameters directly; by default, all.

        Raises:
            RuntimeError: A hook would see only a part of its gradient.
        """
        if records is None:
            # The ``.grad`` of a shard, or of a frozen parameter, is a sum of earlier steps.
            gathered = [record for record in self.records if record.whole is not None]
            records = [*self.unsharded(), *gathered]
        gradients: Gradients = []
        for record in records:
            x = record.current
            if x.grad is None or not self._is_separable(record):
                continue
            if record.has_hooks:
                raise RuntimeError(
                    f"'{record.name}' has a hook, and is used in a closure or a list, so "
                    'that the hook would see parts of its gradient: let the layer '
                    'or loss_fn that uses it have it as a parameter'
                )
            gradients.append((x, x.grad))
            x.grad = None
        return gradients

    def check_late(self, gradients: Gradients) -> int:
        """Return the number of gradients that came after the reduction of their parameters.

        Raises:
            RuntimeError: This rank has a part of such a parameter.
        """
        late = 0
        for x, _ in gradients:
            record = self.records.of(x)
            if record is None or record.state is not GradientState.REDUCING:
                continue
            late += 1
            if record.is_sharded:
                raise RuntimeError(
                    f"'{record.name}' is used by a layer of another stage, "
                    'in a closure or a list, so that a part of its gradient came after '
                    "the reduction over replicas: with data='shard', let the layer "
                    'have it as a parameter'
                )
        return late

    def finish(self, gradients: Gradients, any_late: bool) -> Gradients:
        """Return all gradients of a step, from all replicas, except the ones of shards.

        Without a reduction, gradients wait in their records for a later step.

        Args:
            gradients: The gradients of parameters that are not reduced yet, and of inputs. The
                list is emptied.
            any_late: Whether any replica has gradients that came after their reduction.
        """
        # Otherwise these parameters would be reduced twice in each step.
        self.reduces_within_backward &= not any_late
        results, late = self._sort(gradients)
        for j in sorted({*self.groups.values()}):
            if j in self.units and self.units[j].reduces_at_end:
                self.reduce(j, [])
        if not self.syncs:
            return results

        group = self._axis.group
        reduced_in_row = []
        rest = []
        for record in self.unsharded():
            if record.state is GradientState.REDUCING:
                reduced_in_row.append(record.tensor)
            elif group is not None and not record.is_spread:
                rest.append(record)
            elif record.gradient is not None:
                results.append((record.tensor, record.gradient))
                record.take()
        if group is None:  # Nothing was reduced within the row, so nothing is late.
            return results

        self._start(rest)
        late_sums = []
        if any_late:
            late_gradients = {x: late.pop(x, None) for x in reduced_in_row}
            late_sums = start_sums(late_gradients, group, self._reduce_dtype)
        results += end_sums(self._sums)
        if late_sums:
            results = added(results, end_sums(late_sums))
        self._forget_shards(group)
        return results

    def _sort(self, gradients: Gradients) -> tuple[Gradients, dict[Tensor, Tensor]]:
        """Move gradients to the records of their parameters; return the other ones.

        Returns:
            The gradients of inputs; and by parameter the gradients that came late.
        """
        inputs: Gradients = []
        late: dict[Tensor, Tensor] = {}
        while gradients:
            x, gradient = gradients.pop(0)
            record = self.records.of(x)
            if record is None:
                inputs.append((x, gradient))
            elif record.state is GradientState.REDUCING:
                late[x] = gradient
            else:
                record.add(gradient)
        return inputs, late

    def _forget_shards(self, group: dist.ProcessGroup) -> None:
        """Drop the zeros of shards for which no replica had a gradient."""
        records = []
        for record in self.records:
            if record.is_sharded and record.state is GradientState.REDUCING:
                records.append(record)
        if not records:
            return
        flags = torch.tensor(
            [record.had_gradient for record in records],
            dtype=torch.uint8,
            device=records[0].current.device,
        )
        anywhere = torch.stack(gathered_over(group, flags)).amax(0).tolist()
        for record, has_gradient in zip(records, anywhere):
            if not has_gradient and not record.adds_to_grad:
                record.tensor.grad = None

    def copy_waiting(self, original: 'Replicas') -> None:
        """Copy the gradients that wait for a reduction from the replicas of an original model."""
        for j, stage in self.stages.items():
            pairs = zip(original.stages[j].parameters(), stage.parameters())
            for x, copied in pairs:
                source = original.records.of(x)
                record = self.records.of(copied)
                if source is not None and source.gradient is not None and record is not None:
                    record.add(source.gradient.clone())

    def forget(self) -> None:
        """Drop gradients that wait for a later step."""
        for record in self.records:
            record.restore(None)

    # Checks and further uses.

    def check(self) -> None:
        """Check that sharded parameters are the parameters that FSDP has, without hooks.

        Raises:
            ValueError: A parameter was replaced, or has a hook.
        """
        for unit in {*self.units.values()}:
            for name, module, key in unit.slots:
                x = module._parameters.get(key)
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
        if not self.units:
            return
        last = self.units[max(self.stages)].managed()
        for module in modules:
            for x in module.parameters(recurse=False):
                record = self.records.of(x)
                if record is not None and record.is_sharded and x not in last:
                    raise ValueError(
                        f"loss_fn has '{record.name}', a parameter of another "
                        "stage than the last one, and with data='shard' only its own "
                        'stage has the whole: put its layer into the last stage, or '
                        "data='replicate'"
                    )

    def whole_parameters(self) -> list[Tensor]:
        """Return the parameters that were gathered in this step. They may be freed already."""
        return [record.whole for record in self.records if record.whole is not None]

    def tensors_of_unit(self, j: int) -> set[int]:
        """Return the ``id`` of each tensor in layers whose gradient a unit reduces."""
        return {id(record.current) for record in self.records_of_unit(j)}

    @property
    def gather(self) -> Callable[[Tensor], Sequence[Tensor]] | None:
        """A function that returns a tensor of each replica; ``None`` if there are no others."""
        group = self._axis.group
        return None if group is None else partial(gathered_over, group)
