"""Steps, evaluations and calls of a model on one rank: from the input to gradients and results.

::

    begin ──▶ facts of input and loss ──▶ row: cells, messages, units ──▶ facts: the loss ──▶ .grad
              on all ranks                on this rank                   on all ranks

The exchanged facts are a few numbers: :mod:`torchgpipe.distributed.agreement`.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from math import isnan
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchgpipe.base.settings import LossOptions
from torchgpipe.base.structure import Gradients
from torchgpipe.distributed.agreement import Facts
from torchgpipe.distributed.comparison import Cadence
from torchgpipe.distributed.rank import Rank
from torchgpipe.distributed.starts import Start, Starts, cast_value
from torchgpipe.distributed.transport import Evaluation, Header, Messages, Training, Way
from torchgpipe.engine.gradients import give
from torchgpipe.engine.microbatches import gather
from torchgpipe.engine.run import Run
from torchgpipe.losses import (
    Losses,
    count_functions,
    no_mean_in_the_model,
    seen_means,
    with_counts,
)
from torchgpipe.pipeline_module import PipelineModule
from torchgpipe.schedule import Action, Schedule
from torchgpipe.schedule.messages import Item, Message, Row, receiving_early, with_messages
from torchgpipe.shard.sums import added
from torchgpipe.step import find_schedule, recomputing

#: The types that a loss may have. A rank without a loss reports the first one, so that the
#: largest index comes from a rank with a loss.
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

#: How many kinds of steps are remembered, with the headers of their messages.
_KINDS = 32


class LossFacts(NamedTuple):
    """The facts of a rank about the loss, at the end of a step or an evaluation."""

    #: The number of micro-batches that count.
    m: int = 0
    #: How many gradients came after the reduction of their parameters.
    late: int = 0
    #: The part of the loss of the whole mini-batch, and the index of its type.
    loss: float = 0.0
    dtype: int = 0
    #: The divisors of the loss on this rank: see :meth:`torchgpipe.divisors.LossMonitor.summary`.
    divisor: float = 0.0
    ratio: float = 0.0


class Steps:
    """The steps, evaluations and calls of one rank.

    Args:
        at: Records the current item of a row; ``None`` after it.
        compare_every: The largest number of steps between comparisons; 0 for never.
    """

    _starts_type = Starts

    def __init__(
        self,
        rank: Rank,
        model: PipelineModule,
        at: Callable[[Item | None], None],
        compare_every: int,
    ) -> None:
        self._rank = rank
        self._model = model
        self._at = at
        self._cadence = Cadence(compare_every)
        self._starts = self._starts_type(rank, model, self._cadence)
        #: By the form and the schedule of a step, the headers of messages; and rows by options, or
        #: ``None`` for the row without actions of units.
        self._kinds: OrderedDict[Any, tuple[dict[Message, Header], dict[Any, Row]]] = OrderedDict()
        self._loss_function: Any = None
        #: The text of an error that was raised in the middle of a step.
        self._failure = ''

    def train(
        self, input: Any, ready: Callable[[], Any], loss: LossOptions, return_output: bool
    ) -> Any:
        """Take a step; return the loss, and the output if it is asked for."""
        start = Start('step', input, loss, return_output)
        self._begin(start, ready)
        rank = self._rank
        replicas = rank.replicas
        training = self._training(start)
        losses = start.losses
        assert losses is not None

        # If anything raises before `give`, no gradient stays added.
        with replicas.all_or_nothing():
            with replicas.direct_gradients():
                self._run(training)
                with self._recorded_failure():
                    # First: ties find parameters in their slots. These have to be whole, because
                    # gradients are of whole parameters.
                    replicas.gather_for_end()
                    direct = replicas.take_direct()
                    dtype = rank.placement.precision.reduce_dtype
                    gradients = rank.ties.sum(added(training.gradients, direct), dtype)
                    training.gradients.clear()  # They can be freed when they are reduced.
                facts = self._agree_on_end(start, training, gradients)
                total = self._total(losses, facts)
            same_stages = rank.mesh.same_stages[rank.mesh.pipe.rank]
            any_late = any(facts[k].late for k in same_stages)
            with self._recorded_failure():
                gradients = replicas.finish(gradients, any_late)
            if self._cadence.compares_gradients and replicas.syncs:
                rank.compare_gradients(gradients)
                self._cadence.compares_gradients = False
            give(gradients)

        if return_output:
            return total, self._output(start, training)
        return total

    def _training(self, start: Start) -> Training:
        """Return this rank's half of a step, ready to run."""
        rank = self._rank
        model = self._model
        m = len(start.batches)
        workers = [('rank', place) for place in rank.placement.places]
        recomputed_by_stage = tuple(model._recomputed(m))
        schedule, recomputed = self._schedule(start, workers, recomputed_by_stage)
        assert start.losses is not None
        training = Training(
            rank.engine,
            start.batches,
            self._way(schedule, start),
            start.losses,
            rank.placement.precision.reduce_dtype,
            recomputed=recomputed,
            common=start.common,
            offload=model.offload,
            policies=model._policies,
        )
        training.losses = start.losses.in_layers
        training.keeps_output = start.gathers
        is_other_loss = self._loss_function is not start.loss_function
        self._loss_function = start.loss_function
        # Another loss may use other tensors.
        is_compared = start.comparison is not None
        training.finds_learning = is_compared or (is_other_loss and rank.is_last)
        self._cast_output(training)
        return training

    def _schedule(
        self, start: Start, workers: Sequence[Any], stops: tuple[range, ...]
    ) -> tuple[Schedule, Sequence[Collection[int]]]:
        """Return the schedule with recomputations, and by stage their micro-batches."""
        return recomputing(find_schedule(start.schedule, workers, len(start.batches)), stops)

    @torch.inference_mode(False)  # Parts of parameters (DTensors) do not support it.
    @torch.no_grad()
    def call(self, input: Any) -> Any:
        """Run the forward alone, without graphs."""
        start = Start('call', input, None, True)
        self._begin(start, _no_schedule)
        evaluation = self._evaluation(start)
        evaluation.losses = monitor = seen_means(self._model.gather, start.sizes)
        with self._rank.replicas.evaluation():
            self._run(evaluation)
        if monitor is not None:
            self._rank.agree('a call of this model', partial(_check_means, monitor), Facts())
        return self._output(start, evaluation)

    @torch.inference_mode(False)
    @torch.no_grad()
    def evaluate(
        self, input: Any, ready: Callable[[], Any], loss: LossOptions, return_output: bool
    ) -> Any:
        """Run the forward and the loss; a replica may have no samples."""
        rank = self._rank
        start = Start('evaluation', input, loss, return_output)
        self._begin(start, ready)
        losses = start.losses
        assert losses is not None
        evaluation = None
        with rank.replicas.evaluation():
            if start.batches:
                evaluation = self._evaluation(start)
                evaluation.losses = losses.in_layers
                if rank.is_last:
                    evaluation.wrap_last(partial(losses.behind, keeps=return_output))
                self._run(evaluation)
            else:
                schedule = _forward(tuple(rank.placement.places), 1, rank.gathers_again)
                rank.replicas.act_without_samples(self._way(schedule, start).row)
        total = self._total(losses, self._agree_on_end(start))
        if not return_output:
            return total, losses.count
        output = None if evaluation is None else self._output(start, evaluation)
        return total, losses.count, output

    def _evaluation(self, start: Start) -> Evaluation:
        """Return this rank's part of a forward, ready to run."""
        rank = self._rank
        schedule = _forward(tuple(rank.placement.places), len(start.batches), rank.gathers_again)
        way = self._way(schedule, start)
        evaluation = Evaluation(rank.engine, start.batches, way, common=start.common)
        self._cast_output(evaluation)
        return evaluation

    def _cast_output(self, run: Run) -> None:
        """Cast the output of the last layer, as FSDP casts the outputs of its root module."""
        dtype = self._rank.placement.precision.output_dtype
        if dtype is not None and self._rank.is_last:
            run.wrap_last(partial(_casting, dtype))

    # The start.

    def _begin(self, start: Start, ready: Callable[[], Any]) -> None:
        if self._failure:
            raise RuntimeError(
                'this model cannot go on, as a rank failed in the middle of an '
                'earlier step, where others wait for its messages: start again '
                f'from a checkpoint. It had raised {self._failure}'
            )
        self._starts.begin(start, ready)

    def _way(self, schedule: Schedule, start: Start) -> Way:
        """Return the row of this rank, and its messages."""
        rank = self._rank
        key = (start.kind, schedule)
        if key not in self._kinds and len(self._kinds) >= _KINDS:
            # All ranks of a pipeline see the same kinds in one order, so sender and receiver
            # forget a header in the same step.
            self._kinds.popitem(last=False)
        headers, rows = self._kinds.setdefault(key, ({}, {}))
        messages = self._messages(headers)
        if None not in rows:
            rows[None] = self._row(schedule)
        row = rows[None]
        early = rank.edges.apart and messages.knows(row)
        # An evaluation gathers in one order for all numbers of micro-batches.
        is_equal = start.is_equal or not start.trains
        options = early, is_equal, start.trains and rank.replicas.syncs
        if options not in rows:
            most = rank.placement.active_units
            row = receiving_early(row) if early else row
            rows[options] = rank.replicas.row(row, most, start.trains, is_equal)
        return Way(rows[options], messages, self._at, rank.replicas)

    def _row(self, schedule: Schedule) -> Row:
        """Return the actions and messages of this rank."""
        rank = self._rank
        rows = with_messages(schedule, rank.description.skip_edges, rank.placement.places)
        return rows[rank.mesh.pipe.rank]

    def _messages(self, headers: dict[Message, Header]) -> Messages:
        rank = self._rank
        return Messages(rank.edges.groups, rank.ranks, rank.mesh.device, headers)

    # The run and the end.

    def _run(self, run: Run) -> None:
        """Run the cells of this rank."""
        replicas = self._rank.replicas
        run.mini_batch.gather = replicas.gather
        with self._recorded_failure():
            run.run()
            replicas.check_unchanged()

    @contextmanager
    def _recorded_failure(self) -> Iterator[None]:
        """Record an error between messages or sums, for which other ranks may wait."""
        try:
            yield
        except BaseException as error:
            self._failure = f'{type(error).__name__}: {error}'
            raise

    def _agree_on_end(
        self,
        start: Start,
        training: Training | None = None,
        gradients: Gradients | None = None,
    ) -> dict[int, LossFacts]:
        """Check on all ranks that nothing failed; return the facts of all ranks about the loss."""
        if start.trains and start.is_first and start.comparison is not None:
            # Layers that change shared tensors are detected before they have an effect.
            start.comparison.check()
        end = partial(self._end, start, training, gradients)
        return self._rank.agree('the loss of a step', end, LossFacts())

    def _end(
        self, start: Start, training: Training | None, gradients: Gradients | None
    ) -> LossFacts:
        """Check this rank's part of a step, and return the facts about its loss."""
        losses = start.losses
        assert losses is not None
        late = 0
        if training is not None and gradients is not None:
            self._rank.check_learning(training.learning, losses.inputs)
            late = self._rank.replicas.check_late(gradients)
        losses.check()
        # A replica that counts nothing divides by nothing.
        m = len(losses.counts) if sum(losses.counts) else 0
        divisor, ratio = losses.divisors
        facts = LossFacts(m, late, divisor=divisor, ratio=ratio)
        if not self._rank.is_last:
            return facts
        total = losses.total(start.trains)
        return facts._replace(loss=float(total), dtype=_DTYPES.index(total.dtype))

    def _total(self, losses: Losses, facts: Mapping[int, LossFacts]) -> Tensor:
        """Return the loss of the whole mini-batch, after checks on all ranks.

        Raises:
            ValueError: Ranks divide the loss by different numbers.
            RuntimeError: Ranks along the tensor axis have different losses.
        """
        mesh = self._rank.mesh
        for line in mesh.lines['tensor']:
            check_same_losses({rank: facts[rank].loss for rank in line})
        for ranks in mesh.same_stages:
            divisors = []
            for rank in sorted(ranks):
                if facts[rank].m:
                    divisors.append((facts[rank].divisor, facts[rank].ratio))
            _check_divisors(divisors, losses.error)
        # A replica that counts nothing has no loss. It reports the first type, float32.
        dtype = _DTYPES[max(facts[rank].dtype for rank in self._rank.ranks_with_last)]
        total = self._rank.sum(facts, 'loss')
        return torch.tensor(total, dtype=dtype, device=mesh.device)

    def _output(self, start: Start, run: Run) -> Any:
        """Return the output on ranks that have it."""
        rank = self._rank
        model = self._model
        counts = [start.counts]
        places = rank.placement.places
        if count_functions(model.gather) and places[0] != places[-1]:
            # Functions count samples in the input, which is on another rank.
            group = rank.mesh.pipe.group
            dist.broadcast_object_list(counts, rank.ranks[0], group, rank.mesh.device)
        if not rank.is_last:
            return None
        rule = with_counts(model.gather, iter(counts[0]))
        return gather(start.batches, start.sizes, rule, model.batch_dim, run.aliasing.common(0))


@lru_cache(maxsize=_KINDS)
def _forward(places: tuple[int, ...], m: int, in_turn: bool) -> Schedule:
    """Return the forward of micro-batches as a schedule.

    Args:
        in_turn: Whether a rank runs all micro-batches of a stage before its next one.
    """
    devices = [[j] for j in range(len(places))]
    if in_turn:
        devices = []
        for rank in {*places}:
            devices.append([j for j, place in enumerate(places) if place == rank])
    rows = []
    for stages in devices:
        row = []
        for j in stages:
            row += [Action(j, 'F', i) for i in range(m)]
        rows.append(tuple(row))
    return Schedule(tuple(rows))


def _no_schedule() -> str:
    """Return the schedule of a call, which has no backward."""
    return ''


def _casting(dtype: torch.dtype, layers: Callable[..., Any]) -> Callable[..., Any]:
    """Return layers whose output is cast."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return cast_value(layers(*args, **kwargs), dtype)

    return call


def _check_means(monitor: Any) -> Facts:
    monitor.check(no_mean_in_the_model)
    return Facts()


def _check_divisors(
    divisors: Sequence[tuple[float, float]], error: Callable[[str], ValueError]
) -> None:
    """Raise if replicas divide a loss by numbers that are not proportional to its weights."""
    if not divisors:
        return
    numbers = {number for number, _ in divisors}
    ratios = [ratio for _, ratio in divisors]
    differ = len(numbers) > 1 or any(map(isnan, numbers))
    if differ and max(ratios) - min(ratios) > 1e-5 * max(map(abs, ratios)):
        raise error('loss_fn')


def check_same_losses(losses: Mapping[int, float]) -> None:
    """Raise if losses of ranks along the tensor axis differ by more than rounding.

    In bfloat16, rounding may be a part of 1 %.
    """
    most = max(losses.values())
    least = min(losses.values())
    has_nan = {isnan(loss) for loss in losses.values()}
    if len(has_nan) > 1 or most - least > 0.01 * max(abs(most), abs(least)):
        raise RuntimeError(
            'ranks along the tensor axis compute one loss, but have, by rank, '
            f'{losses}: layers or loss_fn draw other numbers on each of them, by '
            'generators of their own or those of Python or NumPy, or use other '
            'values'
        )
