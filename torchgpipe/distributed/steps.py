"""Steps and calls of a model on many ranks: start on all ranks, and results.

::

    cut the input ──▶ facts ──▶ count the target ──▶ facts ──▶ row ──▶ facts: the loss
    on the first                on the last                messages    from the last

The exchanged facts are a few numbers: :mod:`torchgpipe.distributed.agreement`.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from math import isnan
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchgpipe.base.context import ThreadState
from torchgpipe.base.settings import checkpoint_stops
from torchgpipe.base.structure import Arguments, Gradients, flatten_nested
from torchgpipe.distributed.agreement import Facts, digest, digests
from torchgpipe.distributed.rank import Rank
from torchgpipe.distributed.transport import Evaluation, Header, Messages, Training, Way
from torchgpipe.divisors import LossMonitor
from torchgpipe.engine.microbatches import SKIP, Chunk, check_arguments, cut, gather
from torchgpipe.engine.partition import parameters_by_name
from torchgpipe.engine.run import Run
from torchgpipe.losses import (
    Losses,
    count_functions,
    counts_of,
    error_of,
    no_mean_in_the_model,
    seen_means,
    with_counts,
)
from torchgpipe.pipeline_module import PipelineModule
from torchgpipe.schedule import Action, Schedule
from torchgpipe.schedule.messages import Item, Message, Row, receiving_early, with_messages
from torchgpipe.shard.sums import added
from torchgpipe.step import find_schedule, read_schedule, recomputing

#: The types that a loss may have.
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

#: How many kinds of steps are remembered, with the headers of their messages.
_KINDS = 32


class _Start(NamedTuple):
    """The state at the start of a step.

    Args:
        batches: The micro-batches, empty ones on ranks without the first stage.
    """

    batches: list[Chunk]
    sizes: list[int]
    #: The indices of tensors that all micro-batches share.
    common: list[int]
    #: The kind of the step; messages of one kind have the same headers.
    kind: Any
    schedule: Any
    #: Whether replicas have the same number of micro-batches.
    alike: bool
    #: The counts of functions of ``gather``, on ranks with the first stage.
    counts: Sequence[Any] = ()


class Steps:
    """The steps and calls of one rank.

    Args:
        compare_every: The number of steps between comparisons of shared tensors; 0 for never.
    """

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
        #: By the facts and the schedule of a step, the headers of messages, and rows.
        self._known: OrderedDict[Any, tuple[dict[Message, Header], dict[Any, Row]]] = OrderedDict()
        #: The text of an error that was raised in the middle of a step.
        self._failed = ''
        self._compare_every = compare_every
        #: The number of tensors.
        self._tensors = 0
        #: The number of steps, calls and evaluations with so many tensors.
        self._since = dict[str, int]()
        #: Whether ranks compare now, and whether this is the first time.
        self._due = self._is_first = False
        #: Whether ranks have gradients to compare, because they have not given any yet.
        self._compares_gradients = True

    def train(
        self, input: Any, ready: Callable[[], Any], loss: Sequence[Any], return_output: bool
    ) -> Any:
        """Take a step.

        Args:
            loss: The function, the target, its batch dimension, the normalizer, and the scale.
        """
        rank = self._rank
        model = self._model
        start = self._begin(input, 'step', ready, return_output)
        found, recomputed = self._scheduled(start)
        losses = self._losses(start.sizes, loss)
        training = Training(
            rank.engine,
            start.batches,
            self._way(found, start, True),
            losses,
            rank.replicas.precision.reduce_dtype,
            recomputed=recomputed,
            common=start.common,
            offload=model.offload,
        )
        training.losses = losses.in_layers
        training.keeps_output = return_output
        self._cast_output(training)
        whole: list[Tensor] = []
        others = [x for module in losses.modules[:1] for x in parameters_by_name(module)]
        training.looks = self._due

        def run() -> Gradients:
            own = [*rank.replicas.whole(), *(x for x in others if x.requires_grad)]
            with rank.replicas.beside(own) as beside:
                return self._run(training, partial(finish, own, beside))

        def finish(own: Sequence[Tensor], beside: Callable[[], Gradients]) -> Gradients:
            with self._messages_told():
                rank.replicas.enter_late()
                gradients = rank.ties.together(added(training.gradients, beside()))
            training.gradients.clear()  # They can be freed when they are reduced.

            def check() -> int:
                rank.check_learning(
                    training.learning, [*own, *rank.replicas.seen.values(), *losses.inputs]
                )
                return rank.replicas.check_late(gradients, own)

            # If that raises, no gradient has been added.
            whole.append(self._whole(losses, True, check))
            return gradients

        rank.replicas.run(run, others, self._compare_gradients)
        if return_output:
            return whole[0], self._gathered(start, training)
        return whole[0]

    def _compare_gradients(self, gradients: Gradients) -> None:
        """Compare the first reduced gradients of parameters that ranks share."""
        if self._compares_gradients and self._compare_every and self._rank.replicas.syncs:
            self._compares_gradients = False
            self._rank.compare_gradients(gradients)

    def _scheduled(self, start: _Start) -> tuple[Schedule, Sequence[Collection[int]]]:
        """Return the schedule with recomputations, and by stage their micro-batches."""
        model = self._model
        m = len(start.batches)
        workers = [('rank', place) for place in self._rank.places]
        stops = checkpoint_stops(model.checkpoint, m, len(model.balance))
        return recomputing(find_schedule(start.schedule, workers, m), tuple(map(range, stops)))

    @torch.inference_mode(False)  # Parts of parameters (DTensors) do not support it.
    @torch.no_grad()
    def call(self, input: Any) -> Any:
        """Run the forward alone, without graphs."""
        start = self._begin(input, 'call', str, True)
        evaluation = self._evaluation(start)
        evaluation.losses = monitor = seen_means(self._model.gather, start.sizes)
        self._rank.replicas.evaluate(lambda: self._run(evaluation))
        if monitor is not None:
            self._rank.together(
                'a call of this model', partial(monitor.check, no_mean_in_the_model)
            )
        return self._gathered(start, evaluation)

    @torch.inference_mode(False)
    @torch.no_grad()
    def evaluate(
        self, input: Any, ready: Callable[[], Any], loss: Sequence[Any], return_output: bool
    ) -> Any:
        """Run the forward and the loss; a replica may have no samples."""
        rank = self._rank
        start = self._begin(input, 'evaluation', ready, return_output)
        losses = self._losses(start.sizes, loss, trains=False)
        if not start.batches:
            way = self._way(_forward(tuple(rank.places), 1, rank.gathers_again), start)
            rank.replicas.evaluate(partial(rank.replicas.walk, way.row))
            return (self._whole(losses), losses.count, None)[: 2 + return_output]
        evaluation = self._evaluation(start)
        evaluation.losses = losses.in_layers
        if rank.is_last:
            evaluation.wrap_last(partial(losses.behind, keeps=return_output))
        rank.replicas.evaluate(lambda: self._run(evaluation))
        found = self._whole(losses), losses.count
        if return_output:
            return (*found, self._gathered(start, evaluation))
        return found

    def _evaluation(self, start: _Start) -> Evaluation:
        rank = self._rank
        found = _forward(tuple(rank.places), len(start.batches), rank.gathers_again)
        evaluation = Evaluation(
            rank.engine, start.batches, self._way(found, start), common=start.common
        )
        self._cast_output(evaluation)
        return evaluation

    def _cast_output(self, run: Run) -> None:
        """Cast the output of the last layer, as FSDP casts the outputs of its root module."""
        dtype = self._rank.replicas.precision.output_dtype
        if dtype is not None and self._rank.is_last:
            run.wrap_last(
                lambda layers: lambda *args, **kwargs: _cast_value(layers(*args, **kwargs), dtype)
            )

    def _run(self, run: Run, finish: Callable[[], Gradients] = list) -> Gradients:
        """Run the cells of this rank, and return the resulting gradients."""
        replicas = self._rank.replicas
        run.mini_batch.gather = replicas.gathering
        with self._messages_told():
            run.run()
            replicas.check_versions()
        return finish()

    @contextmanager
    def _messages_told(self) -> Iterator[None]:
        """Record an error between messages, because it is unknown which of them have arrived."""
        try:
            yield
        except BaseException as error:
            self._failed = f'{type(error).__name__}: {error}'
            raise

    def _begin(self, input: Any, what: str, ready: Callable[[], Any], gathers: bool) -> _Start:
        """Split the input on ranks that have it, and exchange its facts with all ranks."""
        if self._failed:
            raise RuntimeError(
                'this model cannot go on, as a rank failed in the middle of an '
                'earlier step, where others wait for its messages: start again '
                f'from a checkpoint. It had raised {self._failed}'
            )
        rank = self._rank
        model = self._model
        rank.draw_alike()
        cuts: list[tuple[list[Chunk], list[int], list[int]]] = []
        counts: list[Any] = []
        schedule: list[Any] = []
        autocast = ThreadState.capture().autocast

        def read() -> Facts:
            # The rows of a file count, not its name, because each rank reads its own file.
            schedule.append(read_schedule(ready()))
            text = [
                each.to_csv() if isinstance(each, Schedule) else str(each) for each in schedule
            ]
            model.partitions  # This applies replacements of layers.
            rank.check()
            modes = [
                (each.training, *(x.requires_grad for x in each.parameters(recurse=False)))
                for each in model.modules()
            ]
            settings = digest(what, text, rank.replicas.syncs, autocast)
            looks = digest(modes, autocast)
            facts = Facts(settings=settings, digest=looks, layers=rank.outline(looks))
            if self._is_due(what):
                facts = facts._replace(numbers=rank.numbers())
            if not rank.is_first or what == 'evaluation' and input is None:
                if rank.is_first and model.training:
                    raise ValueError(
                        'a replica without samples takes part in an evaluation in '
                        'evaluation mode only: model.eval()'
                    )
                return facts
            if isinstance(input, Arguments):
                check_arguments(*next(model.named_children()), input)
            empty = _without_samples(what, rank.data.size)
            cuts.append(
                cut(input, model.chunks, model.batch_dim, empty=empty, layers=model.children())
            )
            batches, sizes, common = cuts[0]
            if (
                what == 'step'
                and rank.data.group is not None
                and any(batches[0].tensors[k].requires_grad for k in common)
            ):
                raise ValueError(
                    'a NoChunk in the input requires grad, and replicas do not add '
                    'up gradients of inputs: let a layer have it as a parameter'
                )
            precision = rank.replicas.precision
            if precision.param_dtype is not None and precision.cast_forward_inputs:
                _replace(batches, partial(_cast, dtype=precision.param_dtype))
            if what != 'step':  # It may have been made in the inference mode of the caller.
                _replace(batches, _writable)
            counts[:] = counts_of(model.gather, batches) if gathers else []
            outlines = [
                [(x.shape, x.stride(), x.dtype, x.requires_grad) for x in batch.tensors]
                for batch in batches
            ]
            kind = batches[0].kind([None] * len(batches[0].tensors))  # type: ignore[list-item]
            return facts._replace(
                m=len(batches),
                size=sum(sizes),
                given=self._given(batches),
                digest=digest(looks, outlines, kind, common),
            )

        said = rank.together(f'a {what} of this model', read)
        rank.check_outlines(said)
        rank.check_samples(said)
        rank.compare(said)
        numbers = {each: said[each].m for each in rank.at_place[rank.places[0]]}
        if rank.exchanges or what == 'step' and rank.replicas.offloads and rank.gathers_again:
            check_alike(numbers)
        own = [said[each]._replace(numbers=(0, 0, 0), given=0) for each in rank.pipe.ranks]
        first = said[rank.ranks[0]]
        sizes = [first.size // first.m + (i < first.size % first.m) for i in range(first.m)]
        batches, _, common = cuts[0] if cuts else ([Chunk((), tuple) for _ in sizes], sizes, [])
        return _Start(
            batches,
            sizes,
            common,
            (what, *own),
            schedule[0],
            len({*numbers.values()}) == 1,
            counts,
        )

    def _is_due(self, what: str) -> bool:
        """Return whether ranks compare their tensors now."""
        tensors = sum(
            len(module._parameters) + len(module._buffers) for module in self._model.modules()
        )
        if tensors != self._tensors:
            self._tensors = tensors
            self._since = {}
        since = self._since[what] = self._since.get(what, -1) + 1
        # Compare often at first: gradients may be added up for some steps, or learning rates be 0.
        self._due = self._compare_every > 0 and (
            since & (since - 1) == 0 or since % self._compare_every == 0
        )
        self._is_first = self._due and since == 0
        self._rank.replicas.looks = self._due
        return self._due

    def _given(self, batches: Sequence[Chunk]) -> int:
        """Return a number for the samples of this rank, if other ranks share them; 0 otherwise."""
        if self._rank.tensor.group is None or not batches:
            return 0
        samples = [x for batch in batches for x in batch.tensors]
        first = batches[0]
        structure = first.kind([None] * len(first.tensors))  # type: ignore[list-item]
        return digest(digests(samples), structure)

    def _losses(self, sizes: list[int], loss: Sequence[Any], trains: bool = True) -> Losses:
        """Return the losses of micro-batches; on ranks without the last stage, an empty one."""
        rank = self._rank
        loss_fn, target, target_dim, normalizer, scale = loss
        found: list[Losses] = []
        tensors: dict[str, Tensor] = {}

        def count() -> Facts:
            if scale is not None and not rank.is_last:
                scale(torch.zeros((), device=rank.device))  # A scaler is made when it is used.
            found.append(
                Losses(loss_fn, target, sizes, target_dim, normalizer, scale, False)
                if rank.is_last
                else Losses(_nothing, None, sizes, 0, 1, None)
            )
            if rank.exchanges and trains:
                check_counts(found[0].counts)
            for module in found[0].modules[:1]:
                tensors.update(
                    ('loss_fn.' + name, x)
                    for name, x in (*module.named_parameters(), *module.named_buffers())
                )
            rank.check_own(tensors.items())
            rank.replicas.check_loss(found[0].modules)
            own = found[0].counted
            return Facts(
                counted=own or 0.0,
                digest=int(found[0].in_layers is not None),
                layers=digest(
                    [
                        (x.shape, x.requires_grad)
                        for each in found[0].modules
                        for x in each.parameters(recurse=False)
                    ]
                ),
                given=self._given(found[0].targets),
                numbers=rank.numbers(tensors) if self._due else (0, 0, 0),
                divisors=(found[0].count if own is None and rank.is_last else 0.0, 0.0),
            )

        said = rank.together('the loss of a step', count)
        rank.check_samples(said)
        rank.compare(said, tensors)
        number = check_losses({each: said[each] for each in sorted(rank.last)})
        losses = found[0]
        losses.error = error_of(normalizer)
        if not number:
            losses.count_in(rank.sum(said), trains)
        elif not rank.is_last:
            losses.count_in(number)
        if not rank.is_last and any(said[each].digest for each in rank.last):
            losses.monitor = losses.in_layers = LossMonitor(sizes)
        return losses

    def _whole(
        self, losses: Losses, trains: bool = False, check: Callable[[], int] = int
    ) -> Tensor:
        """Return the loss of the whole mini-batch, after a check."""
        rank = self._rank

        def count() -> Facts:
            late = check()
            losses.check()
            # A replica that counts nothing divides by nothing.
            m = len(losses.counts) if sum(losses.counts) else 0
            # Layers that change shared tensors are detected before they have an effect.
            numbers = rank.numbers(within_step=True) if trains and self._is_first else (0, 0, 0)
            facts = Facts(m=m, given=late, divisors=losses.divisors, numbers=numbers)
            if not rank.is_last:
                return facts
            total = losses.total(trains)
            return facts._replace(counted=float(total), digest=_DTYPES.index(total.dtype))

        said = rank.together('the loss of a step', count)
        rank.compare(said, within_step=True)
        rank.replicas.again = any(said[each].given for each in rank.at_place[rank.pipe.rank])
        for line in rank.lines['tensor']:
            check_same_losses({each: said[each].counted for each in line})
        for ranks in rank.at_place:
            _check_divisors(
                [said[each].divisors for each in sorted(ranks) if said[each].m], losses.error
            )
        # A replica that counts nothing has no loss. It reports the first type, float32.
        dtype = _DTYPES[max(said[each].digest for each in rank.last)]
        return torch.tensor(rank.sum(said), dtype=dtype, device=rank.device)

    def _way(self, schedule: Schedule, start: _Start, trains: bool = False) -> Way:
        """Return the row of this rank, and its messages."""
        rank = self._rank
        key = (start.kind, schedule)
        if key not in self._known and len(self._known) >= _KINDS:
            self._known.popitem(last=False)
        known, rows = self._known.setdefault(key, ({}, {}))
        messages = self._messages(known)
        early = rank.edges.apart and '' in rows and messages.know(rows[''])
        # An evaluation gathers in one order for all numbers of micro-batches.
        options = early, start.alike or not trains, trains and rank.replicas.syncs
        if options not in rows:
            row = rows[''] = rows.get('') or self._row(schedule)
            rows[options] = rank.replicas.row(
                receiving_early(row) if early else row, trains, options[1]
            )
        return Way(rows[options], messages, self._at, rank.replicas)

    def _row(self, schedule: Schedule) -> Row:
        """Return the actions and messages of this rank."""
        rank = self._rank
        return with_messages(schedule, sorted(rank.skips), rank.places)[rank.pipe.rank]

    def _messages(self, known: dict[Message, Header]) -> Messages:
        rank = self._rank
        return Messages(rank.edges.groups, rank.ranks, rank.device, known)

    def _gathered(self, start: _Start, run: Run) -> Any:
        """Return the output on ranks that have it."""
        rank = self._rank
        model = self._model
        counts = [start.counts]
        if count_functions(model.gather) and rank.places[0] != rank.places[-1]:
            # Functions count samples in the input, which is on another rank.
            dist.broadcast_object_list(counts, rank.ranks[0], rank.pipe.group, rank.device)
        if not rank.is_last:
            return None
        rule = with_counts(model.gather, iter(counts[0]))
        return gather(start.batches, start.sizes, rule, model.batch_dim, run.aliasing.common(0))


@lru_cache(maxsize=_KINDS)
def _forward(places: tuple[int, ...], m: int, in_turn: bool) -> Schedule:
    """Return the forward of micro-batches as a schedule."""
    rows = (
        [[j for j, place in enumerate(places) if place == rank] for rank in {*places}]
        if in_turn
        else [[j] for j in range(len(places))]
    )
    return Schedule(tuple(tuple(Action(j, 'F', i) for j in js for i in range(m)) for js in rows))


def _without_samples(what: str, replicas: int) -> str:
    """Return the way out for a mini-batch without samples."""
    if replicas == 1:
        return SKIP
    if what == 'evaluation':
        return 'a replica without samples passes None for input and target'
    return (
        f'all {replicas} replicas take part in each {what}, so leave it out on all of them, '
        'or divide it so that each one has samples, as DistributedSampler of '
        'torch.utils.data does'
    )


def _replace(batches: list[Chunk], function: Callable[[Tensor], Tensor]) -> None:
    """Apply a function to the tensors of micro-batches; a shared tensor stays one."""
    results: dict[int, Tensor] = {}
    for k, batch in enumerate(batches):
        for x in batch.tensors:
            if id(x) not in results:
                results[id(x)] = function(x)
        batches[k] = Chunk(tuple(results[id(x)] for x in batch.tensors), batch.kind)


def _writable(x: Tensor) -> Tensor:
    """Return a tensor that layers may change in place outside of inference mode."""
    return x.clone() if x.is_inference() else x


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _cast_value(value: Any, dtype: torch.dtype) -> Any:
    tensors, structure = flatten_nested(value)
    return structure([_cast(x, dtype) for x in tensors])


def _check_divisors(
    divisors: Sequence[tuple[float, float]], error: Callable[[str], ValueError]
) -> None:
    """Raise if replicas divide a loss by numbers that are not proportional to its weights."""
    same, ratios = zip(*divisors) if divisors else ((0.0,), (0.0,))
    differ = len({*same}) > 1 or any(map(isnan, same))
    if differ and max(ratios) - min(ratios) > 1e-5 * max(map(abs, ratios)):
        raise error('loss_fn')


def check_losses(said: dict[int, Facts]) -> float:
    """Return the number that the loss is divided by; 0 if that is a count.

    Raises:
        ValueError: They have different losses.
    """
    numbers = {rank: each.divisors[0] for rank, each in said.items()}
    if len({*numbers.values()}) > 1:
        raise ValueError(
            'all ranks divide the loss by the same number, or by a count, but '
            f'normalizer is, by rank, {numbers} (0 is a count)'
        )
    if len({each.layers for each in said.values()}) > 1:
        raise ValueError(
            f'loss_fn has other parameters on some of ranks {[*said]}; give all the '
            'same, of which the same ones require grad'
        )
    return max(numbers.values())


def check_same_losses(losses: dict[int, float]) -> None:
    """Raise if losses of ranks along the tensor axis differ by more than rounding."""
    most = max(losses.values())
    least = min(losses.values())
    if most - least > 0.01 * max(abs(most), abs(least)):
        raise RuntimeError(
            'ranks along the tensor axis compute one loss, but have, by rank, '
            f'{losses}: layers or loss_fn draw other numbers on each of them, by '
            'generators of their own or those of Python or NumPy, or use other '
            'values'
        )


def check_alike(numbers: dict[int, int]) -> None:
    """Raise if numbers of micro-batches differ, where replicas communicate in each of them."""
    if len({*numbers.values()}) > 1:
        raise ValueError(
            'replicas exchange the tokens of experts in each micro-batch, or gather parameters of '
            'one stage after the other, so all have the same number of micro-batches, but ranks '
            f'have {numbers}: give each replica as many samples as there are chunks, or make a '
            'model with fewer chunks'
        )


def check_counts(counts: Sequence[float]) -> None:
    """Raise if a micro-batch has no backward, where other replicas would wait for this one."""
    if 0 in counts:
        raise ValueError(
            f'replicas exchange the gradients of experts in each micro-batch, but that of number '
            f'{[*counts].index(0)} has nothing that counts in its loss, so no gradient: let each '
            'micro-batch have something, or pass a number as the normalizer'
        )


def _nothing(output: Any, target: Any) -> Tensor:
    """Raise an error, as the loss function of a rank without the last stage."""
    raise AssertionError('this rank does not have the last stage')
