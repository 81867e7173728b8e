"""One training step by a schedule: forward and backward, with the loss inside.

What the loss of a mini-batch is, told from those of its micro-batches::

    normalizer          loss_fn gives           the loss is
    None                a mean over samples     Σ loss · samples / all samples
    a function          a mean over what that   Σ loss · counted / all counted
                        counts in a target
    a number            a sum                   Σ loss / number
"""
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.engine.batch import Batch
from torchgpipe.engine.partition import Engine
from torchgpipe.engine.scatter import cut
from torchgpipe.engine.stepping import Step, leaf_of
from torchgpipe.errors import add_note
from torchgpipe.schedule import Schedule, make
from torchgpipe.structure import leaves_of

__all__ = ['Losses', 'ScheduleLike', 'find_schedule', 'run_step']

#: A schedule, its name, or the path of a file with one as CSV.
ScheduleLike = str | os.PathLike[str] | Schedule


def find_schedule(schedule: ScheduleLike, engine: Engine, m: int) -> Schedule:
    """Give a schedule whose stages are the partitions.

    Args:
        schedule: A schedule, its name, or the path of a CSV file.
        engine: The partitions.
        m: The number of micro-batches.

    Raises:
        ValueError: There is no such schedule, or it is for other partitions, devices or
            micro-batches.
    """
    n = len(engine.partitions)
    workers = [partition.worker for partition in engine.partitions]
    devices = len({*workers})
    if isinstance(schedule, Schedule):
        found = schedule
    elif isinstance(schedule, os.PathLike) or str(schedule).endswith('.csv'):
        found = Schedule.parse(Path(schedule).read_text())
    else:
        v = _stages_per_device(schedule, n, devices)
        found = _make(schedule, n // v, m, v)
    _check_fit(found, tuple(workers), m)
    return found


def _stages_per_device(name: str, n: int, devices: int) -> int:
    """Tell how many of ``n`` partitions a schedule takes to be on one device.

    One worker can do the work of several devices, so there may be fewer.
    """
    v = {'interleaved': n // devices, 'looped-bfs': n // devices, 'zb-v': 2}.get(name, 1)
    if n % v:
        raise ValueError(f'{name!r} takes {v} partitions on each device, but there are {n} '
                         f'partitions on {devices} devices')
    return v


#: The same in all steps of a training.
_make = lru_cache(maxsize=32)(make)


@lru_cache(maxsize=32)
def _check_fit(schedule: Schedule, workers: tuple[Any, ...], m: int) -> None:
    schedule.validate()
    n = 1 + max(stage for stages in schedule.stages for stage in stages)
    if (n, schedule.micro_batches) != (len(workers), m):
        raise ValueError(f'the schedule is for {n} stages and {schedule.micro_batches} '
                         f'micro-batches, but there are {len(workers)} partitions and {m} '
                         'micro-batches; make one of these numbers: '
                         f"torchgpipe.schedule.make('1f1b', {len(workers)}, {m})")
    if not any(action.kind in 'BI' for row in schedule.rows for action in row):
        raise ValueError('the schedule has no backward; a step takes F and B of each micro-batch')
    for stages in schedule.stages:
        if len({workers[stage] for stage in stages}) > 1:
            places = [next(device for device, own in enumerate(schedule.stages) if stage in own)
                      for stage in range(n)]
            raise ValueError(
                f'the schedule has stages {list(stages)} on one device, but these partitions are '
                f'on {[f"{kind}:{index}" for kind, index in (workers[j] for j in stages)]}; give '
                f'the partitions devices in this order: devices={places}')


class Losses:
    """The loss of each micro-batch, and what it counts in the whole.

    Args:
        function: ``loss_fn(output, target)``.
        target: A value of any nesting, or ``None``.
        sizes: The numbers of samples of micro-batches.
        batch_dim: The rule for the target.
        normalizer: See above.
        scale: Makes another loss of one for backward, as ``GradScaler.scale``.

    Raises:
        ValueError: The target has another number of samples, or the loss is known to be no mean.
    """

    def __init__(self, function: Callable[[Any, Any], Tensor], target: Any, sizes: Sequence[int],
                 batch_dim: Any, normalizer: Any, scale: Callable[[Tensor], Tensor] | None
                 ) -> None:
        self._function = function
        self._scale = scale
        self._targets = _scatter(target, sizes, batch_dim)
        #: The same as leaves, each of which has a graph of its own above it.
        self._leaves = [Batch.of(tuple(map(leaf_of, batch)), batch.kind)
                        for batch in self._targets]
        self._weights = _weights(function, [batch.value for batch in self._leaves], sizes,
                                 normalizer)
        self._losses: list[Tensor] = []

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that it is made of."""
        return [*self._function.modules()] if isinstance(self._function, nn.Module) else []

    def __call__(self, i: int, output: Any) -> Tensor:
        """Compute that of micro-batch ``i``, and give what its backward starts from."""
        if self._weights[i] == 0:  # The mean of nothing is no number.
            return torch.zeros((), requires_grad=True)
        try:
            loss = self._function(output, self._leaves[i].value)
            _check(loss)
        except Exception as error:
            add_note(error, f'in the loss of micro-batch {i} of {len(self._targets)}')
            raise
        loss = loss * self._weights[i]
        self._losses.append(loss.detach())
        return loss if self._scale is None else self._scale(loss)

    def total(self) -> Tensor:
        """Give the loss of the mini-batch, a scalar."""
        return torch.stack(self._losses).sum() if self._losses else torch.zeros(())

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Give the parts of the target that have a gradient, each with that."""
        return [(x, leaf.grad) for batch, leaves in zip(self._targets, self._leaves)
                for x, leaf in zip(batch, leaves) if leaf.grad is not None]


def _scatter(target: Any, sizes: Sequence[int], batch_dim: Any) -> list[Batch]:
    """Cut a target as the input was cut."""
    if not any(isinstance(leaf.value, Tensor) for leaf in leaves_of(target)):
        return [Batch.of((), lambda tensors: target)] * len(sizes)
    batches, own, _ = cut(target, len(sizes), batch_dim, 'target')
    if own != list(sizes):
        raise ValueError(f'the target has {sum(own)} samples, but the input has {sum(sizes)}; '
                         'both are cut along their batch dimensions. Say which one that of the '
                         'target is: target_dim=0')
    return batches


def _check(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f'a tensor of shape {tuple(loss.shape)}' if isinstance(loss, Tensor) else (
            type(loss).__name__)
        raise ValueError(f'loss_fn must give a scalar tensor, but gave {found}; reduce it, as by '
                         'loss.mean(), or give the plain call a loss of another form')
    if not loss.requires_grad:
        raise RuntimeError('the loss does not require grad, so there is nothing to train: neither '
                           'a parameter nor the input requires grad, or loss_fn has detached it')


def _weights(function: Any, targets: Sequence[Any], sizes: Sequence[int], normalizer: Any
             ) -> list[Any]:
    if normalizer is None:
        _check_mean(function, targets)
        return [size / sum(sizes) for size in sizes]
    if callable(normalizer):
        counts = [normalizer(target) for target in targets]
        if sum(counts) == 0:
            raise ValueError('normalizer counts nothing in the whole target, so there is no mean '
                             'over it; leave out this mini-batch')
        return [count / sum(counts) for count in counts]
    return [1 / normalizer] * len(sizes)


def _check_mean(function: Any, targets: Sequence[Any]) -> None:
    """Refuse losses of PyTorch's that are known to be no mean over samples."""
    if getattr(function, 'reduction', 'mean') == 'sum':
        raise ValueError("the loss adds up samples (reduction='sum'), and those of micro-batches "
                         'would be averaged; give normalizer=1')
    ignored = getattr(function, 'ignore_index', None)
    counts = ignored is not None and any(
        isinstance(target, Tensor) and not target.is_floating_point()
        and bool((target == ignored).any()) for target in targets)
    if counts or isinstance(getattr(function, 'weight', None), Tensor):
        raise ValueError(
            f'{type(function).__name__} divides by what it counts in a target (ignore_index, '
            'class weights), not by the number of samples; say what that is: normalizer=lambda '
            'target: (target != ignore_index).sum(), or weight[target].sum()')


_recomputing = lru_cache(maxsize=32)(Schedule.recomputing)


def run_step(engine: Engine, batches: list[Batch], losses: Losses, schedule: ScheduleLike,
             checkpoint_stops: Sequence[int], **options: Any) -> Step:
    """Run a step; afterwards the batches hold the outputs."""
    found = find_schedule(schedule, engine, len(batches))
    if not engine.one_worker:  # Otherwise it never waits for a gradient.
        found = _recomputing(found, tuple(checkpoint_stops))
    step = Step(engine, batches, found.rows, losses, checkpoint_stops=checkpoint_stops, **options)
    step.run()
    return step
