"""The start of a step, a call or an evaluation: its facts, checked on all ranks.

::

    rank with the first stage    cut the input ─────┐                ┌─▶ sizes of micro-batches
    rank with the last stage     cut the target, ───┼──▶ facts ──▶ ──┼─▶ the count of the loss
                                 count the loss     │   of all       │
    other ranks                  settings, state ───┘                └─▶ or an error on all ranks

A target without tensors does not say how many samples the mini-batch has. Then the loss is counted
in a second exchange.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.base.context import Autocast
from torchgpipe.base.settings import LossOptions
from torchgpipe.base.structure import Arguments, flatten_nested
from torchgpipe.distributed.agreement import LastDigest, check_settings, digest
from torchgpipe.distributed.comparison import BitwiseComparison, Cadence
from torchgpipe.distributed.rank import Rank
from torchgpipe.divisors import LossMonitor
from torchgpipe.engine.microbatches import SKIP, Chunk, check_arguments, cut, sizes_of
from torchgpipe.engine.partition import all_modules, parameters_by_name
from torchgpipe.losses import (
    Losses,
    LossSettings,
    check_samples,
    counts_of,
    cut_target,
    error_of,
    itself,
)
from torchgpipe.pipeline_module import PipelineModule
from torchgpipe.schedule import Schedule
from torchgpipe.shard.digests import digests
from torchgpipe.step import read_schedule


class StepFacts(NamedTuple):
    """The facts of a rank about a step, a call or an evaluation."""

    #: A digest of the settings, which have to be the same on all ranks.
    settings: int = 0
    #: A digest of the state that ranks with the same stages share.
    state: int = 0
    #: 1 + the number of steps before, if ranks compare their tensors now; otherwise 0.
    comparison: int = 0
    #: A digest of the names of these tensors.
    names: int = 0
    #: The number of micro-batches, and of samples, on ranks with the first stage.
    m: int = 0
    size: int = 0
    #: A digest of all that determines the form of this rank's messages.
    messages: int = 0
    #: Digests of the input and the target, equal on ranks along the tensor axis.
    samples: int = 0
    target: int = 0
    #: The number of samples in the target, on ranks with the last stage; -1 if it is not known.
    target_size: int = -1
    #: Whether the loss is counted when the sizes of micro-batches are known.
    counts_later: int = 0
    #: The count of the loss, if its normalizer is not a number.
    counted: float = 0.0
    #: The normalizer of the loss, if it is a number; 0 for a count.
    normalizer: float = 0.0
    #: A digest of the parameters of the loss.
    loss: int = 0
    #: Whether divisors of losses in layers are recorded.
    records_divisors: int = 0


@dataclass
class Start:
    """A step, a call or an evaluation that begins.

    Args:
        task: ``'step'``, ``'call'`` or ``'evaluation'``.
        loss: ``None`` for a call.
        gathers: Whether the output is returned.
    """

    task: str
    input: Any
    loss: LossOptions | None
    gathers: bool
    schedule: Any = None
    #: The micro-batches, empty ones on ranks without the first stage.
    batches: list[Chunk] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    #: The indices of tensors that all micro-batches share.
    common: list[int] = field(default_factory=list)
    #: The counts of functions of ``gather``, on ranks with the first stage.
    counts: Sequence[Any] = ()
    losses: Losses | None = None
    #: The form of all messages; equal steps have the same headers.
    kind: Any = None
    #: Whether replicas have the same number of micro-batches.
    is_equal: bool = True
    comparison: BitwiseComparison | None = None
    #: Whether ranks compare for the first time.
    is_first: bool = False

    @property
    def loss_function(self) -> Any:
        """The function or the module of the loss."""
        return None if self.loss is None else self.loss.function

    @property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return self.task == 'step'


class Starts:
    """Begins steps, calls and evaluations of one rank.

    Args:
        cadence: The steps at which ranks compare their tensors.
    """

    def __init__(self, rank: Rank, model: PipelineModule, cadence: Cadence) -> None:
        self._rank = rank
        self._model = model
        self._cadence = cadence
        self._state = LastDigest()

    def begin(self, start: Start, ready: Callable[[], Any]) -> None:
        """Begin a step, a call or an evaluation, on all ranks.

        Args:
            ready: Checks the model, and returns the schedule.

        Raises:
            ValueError: Arguments do not fit. All ranks raise an error.
            RuntimeError: Ranks have different settings, states or tensors.
        """
        rank = self._rank
        task = f'a {start.task} of this model'
        rank.share_generator()
        facts = rank.agree(task, partial(self._read, start, ready), StepFacts())
        check_settings(task, facts)
        rank.check_states(facts)
        check_same_samples(facts, rank.mesh.lines['tensor'])
        self._set_sizes(start, facts)

        if start.loss is not None:
            if any(fact.counts_later for fact in facts.values()):
                facts = rank.agree(task, partial(self._count_later, start, facts), StepFacts())
                check_same_samples(facts, rank.mesh.lines['tensor'])
            self._weigh_losses(start, facts)
        self._compare(start, facts)

    def _read(self, start: Start, ready: Callable[[], Any]) -> StepFacts:
        """Return the facts of this rank; split its input, and count its loss."""
        rank = self._rank
        model = self._model
        # The rows of a file count, not its name, because each rank reads its own file.
        start.schedule = read_schedule(ready())
        text = str(start.schedule)
        if isinstance(start.schedule, Schedule):
            text = start.schedule.to_csv()
        model.partitions  # This applies replacements of layers.
        # Once in a step: a model may have thousands of modules.
        modules = all_modules(model)
        parameters = [x for module in modules for x in module._parameters.values()]
        rank.check(parameters)

        modes = [bool(module.training) for module in modules]
        learning = [x is not None and x.requires_grad for x in parameters]
        autocast = Autocast.capture()
        state = self._state.of(modes, learning, autocast)
        facts = StepFacts(
            settings=digest(start.task, text, rank.replicas.syncs, autocast),
            state=rank.state_of_layers(state),
            messages=state,
        )
        facts = self._read_input(start, facts)
        if start.loss is not None:
            facts = self._read_loss(start, facts)

        count = self._cadence.next(start.task, modules)
        if count >= 0:
            facts = facts._replace(comparison=count + 1, names=self._comparison(start).names)
        # Values of whole parameters are compared when they are freed.
        for unit in rank.units.values():
            unit.compares_values = count >= 0
        return facts

    def _comparison(self, start: Start) -> BitwiseComparison:
        if start.comparison is None:
            modules = []
            if start.loss is not None and self._rank.is_last:
                modules = [itself(start.loss_function)]
            start.comparison = self._rank.comparison(modules)
        return start.comparison

    def _read_input(self, start: Start, facts: StepFacts) -> StepFacts:
        """Split the input on a rank that has it."""
        rank = self._rank
        model = self._model
        if not rank.is_first:
            return facts
        if start.task == 'evaluation' and start.input is None:
            if model.training:
                raise ValueError(
                    'a replica without samples takes part in an evaluation in '
                    'evaluation mode only: model.eval()'
                )
            return facts
        if isinstance(start.input, Arguments):
            check_arguments(*next(model.named_children()), start.input)
        start.batches, start.sizes, start.common = cut(
            start.input,
            model.chunks,
            model.batch_dim,
            empty=_without_samples(start.task, rank.mesh.data.size),
            layers=model.children(),
        )
        first = start.batches[0]
        is_reduced = start.trains and rank.mesh.data.group is not None
        if is_reduced and any(first.tensors[k].requires_grad for k in start.common):
            raise ValueError(
                'a NoChunk in the input requires grad, and replicas do not add '
                'up gradients of inputs: let a layer have it as a parameter'
            )
        precision = rank.placement.precision
        if precision.param_dtype is not None and precision.cast_forward_inputs:
            _replace(start.batches, partial(cast, dtype=precision.param_dtype))
        if not start.trains:  # It may have been made in the inference mode of the caller.
            _replace(start.batches, _writable)
        if start.gathers:
            start.counts = counts_of(model.gather, start.batches)

        outlines = []
        for batch in start.batches:
            for x in batch.tensors:
                outlines.append((x.shape, x.stride(), x.dtype, x.requires_grad))
        structure = _structure_of(start.batches[0])
        return facts._replace(
            m=len(start.batches),
            size=sum(start.sizes),
            samples=self._digest_of(start.batches),
            messages=digest(facts.messages, outlines, structure, start.common),
        )

    def _read_loss(self, start: Start, facts: StepFacts) -> StepFacts:
        """Begin the records of a step; count the loss on a rank that has it, and knows sizes."""
        rank = self._rank
        loss = start.loss
        assert loss is not None
        if not rank.is_last:
            if loss.scale is not None:  # A scaler is made when it is used.
                loss.scale(torch.zeros((), device=rank.mesh.device))
            if start.trains:
                rank.replicas.refresh()
            return facts
        sizes: list[int] | None = start.sizes
        targets = None
        if not rank.is_first:
            targets, sizes = cut_target(loss.target, self._model.chunks, loss.target_dim)
            if sizes is None:
                return facts._replace(counts_later=1)
        return self._count(start, facts, sizes or [], targets)

    def _count(
        self,
        start: Start,
        facts: StepFacts,
        sizes: list[int],
        targets: list[Chunk] | None = None,
    ) -> StepFacts:
        """Count the loss of micro-batches of known sizes, and begin the records of a step."""
        rank = self._rank
        assert start.loss is not None
        losses = start.losses = self._make_losses(start.loss, sizes, targets)
        if rank.exchanges_samples and start.trains:
            check_counts(losses.counts)
        for module in losses.modules[:1]:  # The first one has the others.
            rank.check_used(module, 'loss_fn')
        if start.trains:
            parameters: list[Tensor] = []
            for module in losses.modules[:1]:
                parameters += parameters_by_name(module)
            rank.replicas.refresh(parameters)
        rank.replicas.check_loss(losses.modules)

        forms = []
        for module in losses.modules:
            for x in module.parameters(recurse=False):
                forms.append((x.shape, x.requires_grad))
        is_counted = losses.counted is not None
        return facts._replace(
            target=self._digest_of(losses.targets),
            target_size=sum(sizes),
            counted=losses.counted or 0.0,
            normalizer=0.0 if is_counted else losses.count,
            loss=digest(forms),
            records_divisors=int(losses.in_layers is not None),
        )

    def _make_losses(
        self, loss: LossOptions, sizes: list[int], targets: list[Chunk] | None
    ) -> Losses:
        return Losses(loss, sizes, targets, alone=False)

    def _count_later(self, start: Start, facts: Mapping[int, StepFacts]) -> StepFacts:
        """Count a loss whose target does not say how many samples there are."""
        local = facts[self._rank.number]
        if not local.counts_later:
            return local
        return self._count(start, local._replace(counts_later=0), start.sizes)

    def _digest_of(self, batches: Sequence[Chunk]) -> int:
        """Return a number for the samples of this rank, if other ranks share them; 0 otherwise."""
        if self._rank.mesh.tensor.group is None or not batches:
            return 0
        samples = [x for batch in batches for x in batch.tensors]
        return digest(digests(samples), _structure_of(batches[0]))

    def _set_sizes(self, start: Start, facts: Mapping[int, StepFacts]) -> None:
        """Take the sizes of micro-batches from the rank with the first stage."""
        rank = self._rank
        same_stages = rank.mesh.same_stages[rank.placement.places[0]]
        m_by_rank = {k: facts[k].m for k in sorted(same_stages)}
        start.is_equal = len({*m_by_rank.values()}) == 1
        offloads = start.trains and rank.placement.offloads and rank.gathers_again
        if rank.exchanges_samples or offloads:
            check_equal(m_by_rank)
        first = facts[rank.ranks[0]]
        if not rank.is_first:
            start.sizes = sizes_of(first.size, first.m)
            start.batches = [Chunk((), tuple) for _ in start.sizes]
        forms = []
        for k in rank.mesh.pipe.ranks:
            forms.append((facts[k].settings, facts[k].state, facts[k].messages))
        start.kind = start.task, first.m, first.size, *forms

    def _weigh_losses(self, start: Start, facts: Mapping[int, StepFacts]) -> None:
        """Let losses have their weights in the loss of the whole mini-batch."""
        rank = self._rank
        assert start.loss is not None
        places = rank.placement.places
        for line in rank.mesh.lines['pipe']:
            in_target = facts[line[places[-1]]].target_size
            if in_target >= 0:
                check_samples(in_target, facts[line[places[0]]].size)
        last = {k: facts[k] for k in rank.ranks_with_last}
        normalizer = check_losses(last)
        if start.losses is None:
            options = LossOptions(_nothing, normalizer=1)
            start.losses = Losses(
                options, start.sizes, targets=[], alone=False, settings=_SETTINGS_OF_NOTHING
            )
        losses = start.losses
        losses.error = error_of(start.loss.normalizer)
        if not normalizer:
            losses.count_in(rank.sum(last, 'counted'), start.trains)
        elif not rank.is_last:  # An evaluation returns the count on all ranks.
            losses.count_in(normalizer)
        if not rank.is_last and any(fact.records_divisors for fact in last.values()):
            losses.monitor = losses.in_layers = LossMonitor(start.sizes)

    def _compare(self, start: Start, facts: Mapping[int, StepFacts]) -> None:
        """Compare the tensors that ranks share, if it is time."""
        steps = [fact.comparison for fact in facts.values() if fact.comparison]
        if not steps:
            return
        start.is_first = 1 in steps
        comparison = self._comparison(start)
        comparison.agree_names(facts)
        comparison.check()


def _without_samples(task: str, replicas: int) -> str:
    """Return the way out for a mini-batch without samples."""
    if replicas == 1:
        return SKIP
    if task == 'evaluation':
        return 'a replica without samples passes None for input and target'
    return (
        f'all {replicas} replicas take part in each {task}, so leave it out on all of them, '
        'or divide it so that each one has samples, as DistributedSampler of '
        'torch.utils.data does'
    )


def _structure_of(batch: Chunk) -> Any:
    """Return the structure of a batch, without its tensors."""
    return batch.kind([None] * len(batch.tensors))  # type: ignore[list-item]


def _replace(batches: list[Chunk], function: Callable[[Tensor], Tensor]) -> None:
    """Apply a function to the tensors of micro-batches; a shared tensor stays one."""
    results: dict[int, Tensor] = {}
    for k, batch in enumerate(batches):
        for x in batch.tensors:
            if id(x) not in results:
                results[id(x)] = function(x)
        batches[k] = Chunk(tuple([results[id(x)] for x in batch.tensors]), batch.kind)


def _writable(x: Tensor) -> Tensor:
    """Return a tensor that layers may change in place outside of inference mode."""
    return x.clone() if x.is_inference() else x


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a floating-point type; other tensors stay as they are."""
    return x.to(dtype) if x.is_floating_point() else x


def cast_value(value: Any, dtype: torch.dtype) -> Any:
    """Cast all tensors of a value."""
    tensors, structure = flatten_nested(value)
    return structure([cast(x, dtype) for x in tensors])


def _nothing(output: Any, target: Any) -> Tensor:
    """Raise an error, as the loss function of a rank without the last stage."""
    raise AssertionError('this rank does not have the last stage')


#: The settings of this function, which are the same in each step.
_SETTINGS_OF_NOTHING = LossSettings.of(_nothing)


# Checks, which have the same result on all ranks.


def check_same_samples(facts: Mapping[int, StepFacts], lines: Sequence[Sequence[int]]) -> None:
    """Check that ranks along the tensor axis were given the same samples.

    Raises:
        ValueError: The samples differ.
    """
    for ranks in lines:
        samples = {(facts[rank].samples, facts[rank].target) for rank in ranks}
        if len(samples) > 1:
            raise ValueError(
                f'ranks {ranks} along the tensor axis compute each layer '
                'together, so they take the same samples, but were given others'
            )


def check_losses(facts: Mapping[int, StepFacts]) -> float:
    """Return the number that the loss is divided by; 0 if that is a count.

    Raises:
        ValueError: Ranks have different losses.
    """
    normalizers = {rank: fact.normalizer for rank, fact in facts.items()}
    if len({*normalizers.values()}) > 1:
        raise ValueError(
            'all ranks divide the loss by the same number, or by a count, but '
            f'normalizer is, by rank, {normalizers} (0 is a count)'
        )
    if len({fact.loss for fact in facts.values()}) > 1:
        raise ValueError(
            f'loss_fn has other parameters on some of ranks {[*facts]}; give all the '
            'same, of which the same ones require grad'
        )
    return max(normalizers.values())


def check_equal(m_by_rank: Mapping[int, int]) -> None:
    """Raise if numbers of micro-batches differ, where replicas communicate in each of them."""
    if len({*m_by_rank.values()}) > 1:
        raise ValueError(
            'replicas exchange the tokens of experts in each micro-batch, or gather parameters of '
            'one stage after the other, so all have the same number of micro-batches, but ranks '
            f'have {m_by_rank}: give each replica as many samples as there are chunks, or make a '
            'model with fewer chunks'
        )


def check_counts(counts: Sequence[float]) -> None:
    """Raise if a micro-batch has no backward, where other replicas would wait for this one."""
    if 0 in counts:
        raise ValueError(
            f'replicas exchange the gradients of experts in each micro-batch, but micro-batch '
            f'{[*counts].index(0)} has nothing that counts in its loss, so no gradient: let each '
            'micro-batch have something, or pass a number as the normalizer'
        )
