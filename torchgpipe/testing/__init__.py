"""Compare a model in a pipeline with the unwrapped model: differences, sizes and reasons.

Terms of this folder:

culprit
    The first module whose output or gradient differs.
form
    The way in which a copy of the model is trained: unwrapped, in parts, or wrapped.
in parts
    The unwrapped layers on one micro-batch after the other, in one thread.
parity
    The comparison of all forms, with the differences and their reasons.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from textwrap import fill
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.base.devices import forked_rng, is_cpu
from torchgpipe.base.distance import arbitrary_loss
from torchgpipe.base.errors import add_note, table
from torchgpipe.engine.split import parse_balance
from torchgpipe.schedule import Schedule, ScheduleLike
from torchgpipe.testing.differences import (
    Difference,
    Differences,
    compare,
    quiet,
    ways_out,
    why_of_micro_batches,
    why_of_the_pipeline,
)
from torchgpipe.testing.runs import RESULTS, InParts, Setup, Unwrapped, Wrapped

__all__ = ['Difference', 'Differences', 'Parity', 'check_parity']


@dataclass(frozen=True)
class Parity:
    """The result of :func:`check_parity`; as a string, a table.

    Attributes:
        mini_batch: The wrapped model compared with the unwrapped one; ``None`` if they could not
            be compared, because layers draw random numbers also in evaluation mode.
        micro_batches: The wrapped model compared with the unwrapped layers on the same
            micro-batches, one after the other. The pipeline causes these differences.
        reasons: The reasons of differences, and further notes.
    """

    mini_batch: Differences | None
    micro_batches: Differences
    reasons: list[str]
    title: str

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not (
            self.micro_batches.differences or (self.mini_batch and self.mini_batch.differences)
        )

    def __str__(self) -> str:
        rows = [*_rows('mini-batch', self.mini_batch), *_rows('micro-batches', self.micro_batches)]
        found = table(['unwrapped', 'tensors', 'differ', 'by', 'in step', 'most of all'], rows)
        why = [
            fill(reason, 96, initial_indent='- ', subsequent_indent='  ')
            for reason in self.reasons
        ]
        return '\n'.join([self.title, '', found, *([''] if why else []), *why])


def _rows(form: str, comparison: Differences | None) -> Iterator[list[str]]:
    if comparison is None:
        yield [f'on the {form}', *['?'] * 5]
        return
    for kind in RESULTS:
        found = [each for each in comparison.differences if each.kind == kind]
        if found:
            first = found[0]
            cells = [str(len(found)), f'{first.distance:.1e}', str(first.step), first.name]
        else:
            cells = ['0', f'{comparison.largest[kind]:.1e}', '', '']
        if comparison.tensors[kind]:
            yield [f'on the {form}: {kind}', str(comparison.tensors[kind]), *cells]


def check_parity(
    module: nn.Sequential,
    sample: Any,
    balance: Iterable[int] | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    target: Any = None,
    schedule: ScheduleLike | None = None,
    normalizer: Any = None,
    steps: int = 3,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    dtype: torch.dtype | None = torch.float64,
    tolerance: float | None = None,
    raise_exception: bool = True,
    **options: Any,
) -> Parity:
    """Train copies of a model, wrapped and unwrapped, and compare all results.

    Outputs, the loss, gradients, buffers and parameters are compared after each step. If they
    differ, experiments determine why: the first layer that differs, and the options with which it
    would not.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    >>> parity = check_parity(model, torch.randn(7, 4), [2, 1], chunks=3, checkpoint='always')
    >>> parity.equal
    True
    >>> check_parity(model, torch.randn(7, 4), [2, 1], chunks=3, schedule='zb-h1').equal
    True

    If layers draw random numbers, the wrapped model has to draw the same numbers as the unwrapped
    layers on the same micro-batches, one after the other. The unwrapped model draws other numbers
    on the mini-batch. So these layers are in evaluation mode for that comparison.

    Args:
        module: A model for :class:`~torchgpipe.GPipe`. It stays as it is; if it is in evaluation
            mode, so are the copies.
        sample: The input: a tensor of shape ``(batch, …)``, any structure, or
            :class:`~torchgpipe.Arguments` for several inputs, with :class:`~torchgpipe.NoChunk`
            where needed. Gradients of tensors in it are compared if they require grad.
        balance: The number of layers in each partition; by default two halves.
        loss_fn: Computes a scalar from the output, which is on the last device, and from the
            target if there is one. By default, the mean squared distance of all tensors of the
            output from arbitrary constant tensors.
        target: The target of the loss, of as many samples as the input.
        schedule: As in :meth:`GPipe.step <torchgpipe.GPipe.step>`, by which the wrapped model is
            then trained: without a normalizer, the loss has to be a mean over samples, or one of
            PyTorch's. By default, the wrapped model is trained by the plain call.
        normalizer: As in :meth:`GPipe.step <torchgpipe.GPipe.step>`, for a schedule.
        steps: The number of steps to train.
        optimizer: Makes an optimizer of parameters, by default SGD with momentum.
        dtype: The type of the copies, so that rounding hides no difference; ``None`` for the
            model's own types.
        tolerance: The largest difference that counts as rounding, relative to the size of a
            tensor; see :class:`Difference`. By default ``eps ** (2 / 3)`` of ``dtype``; if that
            is ``None``, of the coarsest type in the model and the sample.
        raise_exception: Whether to raise if anything differs.
        **options: Further options of ``GPipe``. By default, ``chunks`` is 3, which divides few
            batch sizes, and each partition has a worker on the CPU. To reproduce an error of
            accelerators, pass ``devices`` and ``dtype=None``.

    Returns:
        The comparisons and reasons; printed, a table.

    Raises:
        AssertionError: Something differs; the message is the table.
        ValueError: The unwrapped model's loss is not finite, or there is no step to take.
        Exception: An error of one of the models, with a note that names the model. If options are
            found with which it would not raise, another note names them.
    """
    if steps < 1:
        raise ValueError(
            f'steps must be one or more, but is {steps}: without a step there is '
            'nothing to compare'
        )
    if loss_fn is None:
        if target is not None:
            raise ValueError(
                'a target needs a loss_fn, which computes the loss from the output and the target'
            )
        loss_fn = arbitrary_loss
        if schedule is not None:
            loss_fn = partial(arbitrary_loss, batch_dim=options.get('batch_dim', 0))
    options['schedule'] = schedule
    setup = _setup(
        module,
        sample,
        balance,
        options,
        target=target,
        normalizer=normalizer,
        loss_fn=loss_fn,
        optimizer=optimizer or partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        dtype=dtype,
    )
    if tolerance is None:
        tolerance = setup.rounding
    with forked_rng():
        try:
            parity = _check(setup, steps, tolerance)
        except Exception as error:
            for way_out in ways_out(setup, steps):
                add_note(error, way_out)
            raise
    if raise_exception and not parity.equal:
        raise AssertionError(f'the wrapped model differs from the unwrapped one\n\n{parity}')
    return parity


def _setup(
    module: nn.Sequential,
    sample: Any,
    balance: Iterable[int] | None,
    options: dict[str, Any],
    **others: Any,
) -> Setup:
    number = len(module)
    if balance is None:
        balance = [part for part in (number - number // 2, number // 2) if part]
    balance = parse_balance(balance, number)
    n = len(balance)
    devices = options.get('devices') or [f'cpu:{j}' for j in range(n)]
    options = {'chunks': 3, **options, 'devices': list(devices)[:n]}
    return Setup(module, sample, balance, options, **others)


def _check(setup: Setup, steps: int, tolerance: float) -> Parity:
    still, loud = quiet(setup)
    if _draws_in_any_order(setup):
        setup = still
    parts = compare(InParts(setup), Wrapped(setup), steps, tolerance)
    whole = None
    reasons = []
    if not loud:
        whole = compare(Unwrapped(still), Wrapped(still), steps, tolerance)
    if still.quiet:
        names = ', '.join(map(repr, sorted(still.quiet)))
        reasons.append(
            'random numbers are drawn by ' + names + ', which were in evaluation mode '
            'for the comparison on the mini-batch'
            + (' and on the micro-batches' if setup is still else '')
        )
    if loud:
        reasons.append(
            f'in evaluation mode, too, random numbers are drawn by {loud}, so there is '
            'no comparison on the mini-batch'
        )
    if parts.differences:
        reasons += why_of_the_pipeline(setup, parts.differences)
    if whole is not None and whole.differences:
        apart = compare(Unwrapped(still), InParts(still), steps, tolerance).differences
        if apart:
            reasons += why_of_micro_batches(still, apart)
        elif not parts.differences:
            reasons += why_of_the_pipeline(still, whole.differences)
    schedule = setup.options['schedule']
    title = (
        f'{steps} steps in {setup.dtype or "its own dtype"}, balance {setup.balance}, '
        f'{setup.options["chunks"]} chunks, '
        + ('' if schedule is None else f'schedule {_name_of(schedule)}, ')
        + f'tolerance {tolerance:.0e}'
    )
    return Parity(whole, parts, reasons, title)


def _name_of(schedule: ScheduleLike) -> str:
    if isinstance(schedule, Schedule):
        return f'of {len(schedule.rows)} devices'
    return str(schedule)


def _draws_in_any_order(setup: Setup) -> bool:
    """Return whether the order of draws on one accelerator depends on other devices."""
    places = [setup.device_of(j) for j in range(len(setup.balance))]
    accelerators = [place for place in places if not is_cpu(place)]
    return len(set(places)) > 1 and len(set(accelerators)) < len(accelerators)
