"""Code shared by the commands that shard a model over processes.

One process trains beside several that share its model: the same steps, in turn::

    plain             step 1                 step 2
    sharded over 1           step 1                 step 2
    sharded over 2             step 1                 step 2
                               step 1                 step 2
"""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any, NamedTuple

import click
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

from benchmarks.harness.charts import Curves
from benchmarks.harness.memory import peak_memory, size_of_partition
from benchmarks.harness.options import (
    Decorator,
    all_options,
    count_option,
    distinct,
    output_option,
)
from benchmarks.harness.report import Rows, Section
from benchmarks.harness.timing import order_of_round
from torchgpipe.base.devices import CPU
from torchgpipe.trainer.files import output_folder
from torchgpipe.trainer.processes import Interval, Processes, seconds


class Step(NamedTuple):
    """When a step was, and its loss."""

    span: Interval
    loss: float


class Trainer:
    """A model in training, or this rank's part of one.

    Args:
        model: The model.
        optimizer: Changes its parameters.
        loss: Gives the model's loss on the next batch.
        clip: Changes the gradients of parameters, before the optimizer does its step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[], Tensor],
        clip: Callable[[Iterable[nn.Parameter]], object] = lambda parameters: None,
    ) -> None:
        self.model = model
        self._optimizer = optimizer
        self._loss = loss
        self._clip = clip

    def step(self) -> Step:
        """Train on a batch; its gradients stay."""
        losses: list[Tensor] = []
        span = Interval.of(lambda: losses.append(self._step()))
        return Step(span, losses[0].item())

    def _step(self) -> Tensor:
        self._optimizer.zero_grad()
        loss = self._loss()
        loss.backward()
        self._clip(self.model.parameters())
        self._optimizer.step()
        return loss.detach()

    def figures(self) -> dict[str, Any]:
        """Return the bytes of tensors that stay from step to step, and the peak within one.

        This is for the CPU. It takes one more step, after at least one, in which the optimizer has
        made its state. Memory of kernels and of communication other than tensors is not counted.
        """
        self._optimizer.zero_grad()
        without_gradients = sum(size_of_partition(self.model, self._optimizer).values())
        peak = without_gradients + peak_memory(self._step, [CPU])
        return {**size_of_partition(self.model, self._optimizer), 'peak': peak}


#: The name of the model in one process.
PLAIN = 'plain'


def side_by_side(
    make: Callable[..., Trainer],
    options: Any,
    numbers: Sequence[int],
    steps: int,
    name: str,
    tolerance: float,
) -> list[dict[str, Any]]:
    """Train by the plain model, and sharded over each number of processes.

    Args:
        make: Makes a trainer in each process: it is called with the options, and whether the model
            is sharded over the processes.
        options: The options.
        numbers: Numbers of processes.
        steps: The number of steps.
        name: The label of the progress bar.
        tolerance: The allowed difference of losses, relative to the plain model's largest loss.

    Returns:
        A row for each: its losses, the largest difference from the plain model's, the median time
        of a step in seconds, and the figures of each rank.

    Raises:
        click.ClickException: A process has failed.
        RuntimeError: The losses differ from the plain model's.
    """
    with ExitStack() as stack:
        groups = {PLAIN: stack.enter_context(Processes(1, make, options, False))}
        for n in numbers:
            groups[f'sharded over {n}'] = stack.enter_context(Processes(n, make, options, True))
        runs: dict[str, list[list[Step]]] = {name: [] for name in groups}
        for k in tqdm(range(steps), desc=name, unit='step', leave=False):
            for group in order_of_round([*groups], k):
                runs[group].append(groups[group].call('step'))
        figures = {group: processes.call('figures') for group, processes in groups.items()}
    rows = [_row(group, runs[group], figures[group]) for group in groups]
    for row in rows:
        row['difference'] = _difference(row, rows[0]['losses'], tolerance)
    return rows


def _row(
    name: str, steps: Sequence[Sequence[Step]], figures: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    losses = []
    times = []
    for ranks in steps:
        on_ranks = [step.loss for step in ranks]
        if len({*on_ranks}) > 1:
            raise RuntimeError(
                f'{name}: these should be the same on all ranks, as each has the '
                f'whole loss: {on_ranks}'
            )
        losses.append(on_ranks[0])
        times.append(seconds(step.span for step in ranks))
    return {
        'name': name,
        'losses': losses,
        'seconds': median(times[1:] or times),
        'ranks': [*figures],
    }


def _difference(row: dict[str, Any], expected: Sequence[float], tolerance: float) -> float:
    """Return the largest difference of losses, after a check that it is by rounding."""
    allowed = tolerance * max(map(abs, expected))
    differences = []
    for step, (loss, right) in enumerate(zip(row['losses'], expected)):
        differences.append(abs(loss - right))
        if not differences[-1] <= allowed:
            raise RuntimeError(
                f'{row["name"]}: the loss of step {step} should be {right}, as in the plain '
                f'model, but is {loss}'
            )
    return max(differences)


#: Titles of the columns of `memory_cells`.
MEMORY = ['model, MiB', 'peak, MiB']


def sharding_options(steps: int, processes: tuple[int, ...] = (1, 2, 4)) -> Decorator:
    """Return a decorator that gives a command the options of all of them."""
    return all_options(
        [
            click.option(
                '--processes',
                'numbers',
                type=click.IntRange(1),
                multiple=True,
                default=processes,
                show_default=True,
                callback=distinct,
                help='How many share the model; may be given several times.',
            ),
            count_option(
                '--steps', steps, 'Steps that all take, in turn; the first is not timed.'
            ),
            output_option,
        ]
    )


def memory_cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row for the rank with the most memory."""
    models = []
    for rank in row['ranks']:
        models.append(rank['parameters'] + rank['gradients'] + rank['optimizer'])
    return [f'{max(models) / 2**20:.2f}', f'{peak(row) / 2**20:.2f}']


def difference_cell(row: dict[str, Any]) -> str:
    """Return the difference of losses from the plain model's."""
    return f'{row["difference"]:.0e}' if row['difference'] else '0'


def peak(row: dict[str, Any]) -> int:
    """Return the peak in bytes of the rank that has most."""
    most: int = max(rank['peak'] for rank in row['ranks'])
    return most


def training_rows(rows: Sequence[dict[str, Any]]) -> Rows:
    """Return the header and the rows."""
    cells = []
    for row in rows:
        cells.append(
            [
                row['name'],
                f'{row["losses"][0]:.4f}',
                f'{row["losses"][-1]:.4f}',
                difference_cell(row),
                f'{row["seconds"] * 1e3:.1f}',
                *memory_cells(row),
            ]
        )
    header = ['', 'first loss', 'last loss', 'largest difference', 'ms per step', *MEMORY]
    return header, cells


def training_panels(results: dict[str, Any]) -> list[Curves]:
    """Return the losses, and the most that a process keeps."""
    losses, peaks = {}, {}
    for row in results['rows']:
        losses[row['name']] = range(len(row['losses'])), row['losses']
        peaks[row['name']] = [len(row['ranks'])], [peak(row) / 2**20]
    return [Curves('step', 'loss', losses), Curves('processes', 'peak, MiB per rank', peaks)]


def meaning(results: dict[str, Any]) -> str:
    """Return an explanation of the figures."""
    busy = ''
    if results['load'] is not None:
        busy = (
            ' Before the run, the load average of the machine over one minute was '
            f'{results["load"]:.1f}.'
        )
    return (
        'The plain model uses layers of torch.nn in one process. The sharded models use layers of '
        'torchgpipe.shard. The command starts the given number of processes, which exchange '
        'tensors by gloo. Each process has one thread. Processes beyond the number of cores wait '
        'for a core. Times are medians of steps (forward, backward, optimizer), and all models '
        f'take their steps in turn.{busy} Model memory consists of parameters, gradients and '
        'optimizer state. Peak memory is the maximum over a step of the model memory and all '
        'other live tensors. Both columns show the process with the largest value.'
    )


def training(section: Section, output: str, measure: Callable[[], dict[str, Any]]) -> None:
    """Measure, and publish the results with the load of the machine before."""
    folder = output_folder(output)
    load = os.getloadavg()[0] if hasattr(os, 'getloadavg') else None
    section.publish({'load': load, **measure()}, folder)
