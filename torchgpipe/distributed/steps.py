"""Steps and calls of a model on many ranks: how they begin on all of them, and what comes of them.

::

    cut the input ──▶ say so ──▶ count the target ──▶ say so ──▶ row ──▶ say the loss
    on the first                 on the last                 messages    from the last

What ranks say is a few numbers: :mod:`torchgpipe.distributed.start`.
"""
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import isnan
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchgpipe.distributed.messages import Header, Messages
from torchgpipe.distributed.rank import Rank
from torchgpipe.distributed.replicas import Gradients
from torchgpipe.distributed.start import Facts, digest
from torchgpipe.distributed.transport import Evaluation, Training, Way
from torchgpipe.engine.gather import gather
from torchgpipe.engine.run import Run
from torchgpipe.engine.scatter import Batch, cut, fit_rule
from torchgpipe.engine.thread_state import ThreadState
from torchgpipe.losses import Losses
from torchgpipe.means import no_mean_over_samples
from torchgpipe.schedule import Action, Schedule, make
from torchgpipe.schedule.messages import Message, Row, with_messages
from torchgpipe.settings import Checkpoint, checkpoint_stops
from torchgpipe.step import find_schedule

__all__ = ['Steps', 'check_alike', 'check_counts']

#: The types that a loss may have.
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)

#: So many kinds of steps are remembered, with the headers of their messages.
_KINDS = 32


class Model(Protocol):
    """What has the layers of this rank, and settings."""

    balance: list[int]
    chunks: int
    batch_dim: Any
    gather: Any
    offload: bool

    def modules(self) -> Any:
        """Return all modules."""

    def children(self) -> Any:
        """Return the layers."""


class _Start(NamedTuple):
    """What is known when a step begins.

    Args:
        batches: The micro-batches, empty ones on ranks without the first stage.
        sizes: Their numbers of samples.
        common: Which of their tensors all share.
        kind: What the step is like; messages of one kind have the same headers.
    """

    batches: list[Batch]
    sizes: list[int]
    common: list[int]
    kind: Any


class Steps:
    """The steps and calls of one rank.

    Args:
        rank: What it has.
        model: The model.
        at: Called before each action and message.
    """

    def __init__(self, rank: Rank, model: Model,
                 at: Callable[[Action | Message | None], None]) -> None:
        self._rank = rank
        self._model = model
        self._at = at
        #: The headers of messages, by what ranks have said of a step.
        self._known: OrderedDict[Any, dict[Message, Header]] = OrderedDict()
        #: What was raised in the middle of a step.
        self._failed = ''

    def train(self, input: Any, schedule: Any, checkpoint: Checkpoint, return_output: bool,
              loss: Sequence[Any]) -> Any:
        """Take a step.

        Args:
            input: The input.
            schedule: The schedule, or its name.
            checkpoint: The mode of checkpointing.
            return_output: Whether to return the output, too.
            loss: The function, the target, its batch dimension, the normalizer, and the scale.
        """
        rank, model = self._rank, self._model
        start = self._begin(input, 'step', schedule)
        losses = self._losses(start.sizes, *loss)
        m = len(start.batches)
        stops = checkpoint_stops(checkpoint, m, len(model.balance))
        workers = [('rank', place) for place in rank.places]
        found = find_schedule(schedule, workers, m).recomputing(stops)
        training = Training(rank.engine, start.batches, self._way(found, start.kind), losses,
                            checkpoint_stops=stops, common=start.common, offload=model.offload)
        training.mini_batch.gather = rank.replicas.gather

        whole: list[Tensor] = []

        def run() -> Gradients:
            with self._messages_told():
                training.run()
                gradients = rank.ties.together(training.gradients)
            whole.append(self._whole(losses))  # If that raises, no gradient has been added.
            return gradients

        rank.replicas.run(run, [x for module in losses.modules
                                for x in module.parameters(recurse=False)])
        return (whole[0], self._gathered(start, training)) if return_output else whole[0]

    def evaluate(self, input: Any) -> Any:
        """Run the forward alone, without graphs."""
        rank, start = self._rank, self._begin(input, 'call', 'gpipe')
        found = _forward(len(self._model.balance), len(start.batches))
        with torch.no_grad():
            evaluation = Evaluation(rank.engine, start.batches, self._way(found, start.kind),
                                    common=start.common)
            evaluation.mini_batch.gather = rank.replicas.gather

            def run() -> Gradients:
                with self._messages_told():
                    evaluation.run()
                return []

            rank.replicas.evaluate(run)
            return self._gathered(start, evaluation)

    @contextmanager
    def _messages_told(self) -> Iterator[None]:
        """Take note of an error between messages: nobody knows then which of them have come."""
        try:
            yield
        except BaseException as error:
            self._failed = f'{type(error).__name__}: {error}'
            raise

    def _begin(self, input: Any, what: str, schedule: Any) -> _Start:
        """Cut the input on ranks that have it, and let all know of it."""
        if self._failed:
            raise RuntimeError('this model can not go on, as a rank failed in the middle of an '
                               'earlier step, where others wait for its messages: start again '
                               f'from a checkpoint. It had raised {self._failed}')
        rank, model = self._rank, self._model
        rank.draw_alike()
        cuts: list[tuple[list[Batch], list[int], list[int]]] = []
        text = schedule.to_csv() if isinstance(schedule, Schedule) else str(schedule)
        autocast = ThreadState.capture().autocast
        modes = [(module.training, *(x.requires_grad for x in module.parameters(recurse=False)))
                 for module in model.modules()]

        def read() -> Facts:
            settings, looks = digest(what, text, rank.replicas.syncs), digest(modes, autocast)
            if not rank.is_first:
                return Facts(settings=settings, digest=looks)
            rule = fit_rule(model.batch_dim, input, model.children())
            cuts.append(cut(input, model.chunks, rule))
            batches, sizes, common = cuts[0]
            outlines = [[(x.shape, x.stride(), x.dtype, x.requires_grad) for x in batch.tensors]
                        for batch in batches]
            kind = batches[0].kind([None] * len(batches[0].tensors))  # type: ignore[list-item]
            return Facts(len(batches), sum(sizes), 0., settings,
                         digest(looks, outlines, kind, common))

        said = rank.together(f'a {what} of this model', read)
        if rank.exchanges:
            check_alike({number: each.m for number, each in said.items() if each.m})
        own, first = [said[each] for each in rank.pipe.ranks], said[rank.ranks[0]]
        sizes = [first.size // first.m + (i < first.size % first.m) for i in range(first.m)]
        batches, _, common = cuts[0] if cuts else ([Batch((), tuple) for _ in sizes], sizes, [])
        return _Start(batches, sizes, common, (what, *own))

    def _losses(self, sizes: list[int], loss_fn: Any, target: Any, target_dim: Any,
                normalizer: Any, scale: Any) -> Losses:
        """Return the losses of micro-batches; on ranks without the last stage, of nothing."""
        rank = self._rank
        found: list[Losses] = []

        def count() -> Facts:
            if scale is not None and not rank.is_last:
                scale(torch.zeros((), device=rank.device))  # A scaler is made when it is used.
            found.append(Losses(loss_fn, target, sizes, target_dim, normalizer, scale, False)
                         if rank.is_last else Losses(_nothing, None, sizes, 0, 1, None))
            if rank.exchanges:
                check_counts(found[0].counts)
            return Facts(counted=found[0].counted or 0.)

        said = rank.together('the loss of a step', count)
        if found[0].counted is not None:
            found[0].count_in(rank.sum(said))
        return found[0]

    def _whole(self, losses: Losses) -> Tensor:
        """Return the loss of the whole mini-batch."""
        rank = self._rank

        def count() -> Facts:
            if not rank.is_last:
                return Facts()
            total = losses.total()
            return Facts(counted=float(total), digest=_DTYPES.index(total.dtype),
                         divisors=losses.divisors)

        said = rank.together('the loss of a step', count)
        _check_divisors([each.divisors for number, each in said.items()
                         if number in rank.last])
        # A replica that counts nothing has no loss; float32, the first one, is no type of its own.
        dtype = _DTYPES[max(said[each].digest for each in rank.last)]
        return torch.tensor(rank.sum(said), dtype=dtype, device=rank.device)

    def _way(self, schedule: Schedule, kind: Any) -> Way:
        """Return what this rank does, and its messages."""
        rank, key = self._rank, (kind, schedule)
        if key not in self._known and len(self._known) >= _KINDS:
            self._known.popitem(last=False)
        known = self._known.setdefault(key, {})
        row = _rows(schedule, rank.skips, tuple(rank.places))[rank.pipe.rank]
        return Way(row, Messages(rank.pipe.group, rank.ranks, rank.device, known), self._at)

    def _gathered(self, start: _Start, run: Run) -> Any:
        """Return the output on ranks that have it."""
        if not self._rank.is_last:
            return None
        dim = self._model.batch_dim if isinstance(self._model.batch_dim, int) else 0
        return gather(start.batches, start.sizes, self._model.gather, dim, run.aliasing.common(0))


@lru_cache(maxsize=_KINDS)
def _rows(schedule: Schedule, skips: frozenset[tuple[int, int]], places: tuple[int, ...]
          ) -> tuple[Row, ...]:
    return with_messages(schedule, sorted(skips), places)


@lru_cache(maxsize=_KINDS)
def _forward(stages: int, m: int) -> Schedule:
    """Return the forward of micro-batches as a schedule."""
    rows = make('gpipe', stages, m).rows
    return Schedule(tuple(tuple(each for each in row if each.kind == 'F') for row in rows))


def _check_divisors(divisors: Sequence[tuple[float, float]]) -> None:
    """Refuse a loss that replicas divide by other numbers than those of their samples."""
    same, ratios = zip(*divisors)
    differ = len({*same}) > 1 or any(map(isnan, same))
    if differ and max(ratios) - min(ratios) > 1e-5 * max(map(abs, ratios)):
        raise no_mean_over_samples('loss_fn')


def check_alike(numbers: dict[int, int]) -> None:
    """Refuse numbers of micro-batches that differ, where replicas meet in each of them."""
    if len({*numbers.values()}) > 1:
        raise ValueError(
            'replicas exchange the tokens of experts in each micro-batch, so all have the same '
            f'number of these, but ranks have {numbers}: give each replica as many samples as '
            'there are chunks, or make a model with fewer chunks')


def check_counts(counts: Sequence[float]) -> None:
    """Refuse a micro-batch without a backward, in which other replicas would wait for this one."""
    if 0 in counts:
        raise ValueError(
            f'replicas exchange the gradients of experts in each micro-batch, but that of number '
            f'{[*counts].index(0)} has nothing that counts in its loss, so no gradient: let each '
            'micro-batch have something, or pass a number as the normalizer')


def _nothing(output: Any, target: Any) -> Tensor:
    """Stand for a loss where there is none."""
    raise AssertionError('this rank does not have the last stage')
