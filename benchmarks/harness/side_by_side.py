"""One process beside several that share its model: the same steps, in turn.

::

    plain             step 1                 step 2
    sharded over 1           step 1                 step 2
    sharded over 2             step 1                 step 2
                               step 1                 step 2
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from tqdm import tqdm

from benchmarks.harness.trainer import Step, Trainer
from torchgpipe.trainer.processes import Processes, seconds

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
        options: The options. numbers: Numbers of processes. steps: The number of steps. name: The
        label of the progress bar. tolerance: The allowed difference of losses, relative to the
        plain model's largest loss.

    Returns:
        A row for each: its losses, the largest difference from the plain model's, the median time
        of a step in seconds, and the figures of each rank.

    Raises:
        click.ClickException: A process has failed.
        RuntimeError: The losses differ from the plain model's.
    """
    with ExitStack() as stack:
        found = {PLAIN: stack.enter_context(Processes(1, make, options, False))}
        for n in numbers:
            found[f'sharded over {n}'] = stack.enter_context(Processes(n, make, options, True))
        runs: dict[str, list[list[Step]]] = {name: [] for name in found}
        for _ in tqdm(range(steps), desc=name, unit='step', leave=False):
            for each, processes in found.items():
                runs[each].append(processes.call('step'))
        figures = {each: processes.call('figures') for each, processes in found.items()}
    rows = [_row(each, runs[each], figures[each]) for each in found]
    for row in rows:
        row['difference'] = _difference(row, rows[0]['losses'], tolerance)
    return rows


def _row(
    name: str, steps: Sequence[Sequence[Step]], figures: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    for ranks in steps:
        if len({step.loss for step in ranks}) > 1:
            raise RuntimeError(
                f'{name}: these should be the same on all ranks, as each has the '
                f'whole loss: {[step.loss for step in ranks]}'
            )
    return {
        'name': name,
        'losses': [ranks[0].loss for ranks in steps],
        'seconds': median(seconds([step.span for step in ranks]) for ranks in steps),
        'ranks': [*figures],
    }


def _difference(row: dict[str, Any], expected: Sequence[float], tolerance: float) -> float:
    """Return by how much losses differ, and see that it is not more than rounding does."""
    differences = [abs(loss - other) for loss, other in zip(row['losses'], expected)]
    for step, (difference, loss) in enumerate(zip(differences, expected)):
        if not difference <= tolerance * max(map(abs, expected)):
            raise RuntimeError(
                f'{row["name"]}: the loss of step {step} should be {loss}, as that '
                f'of the plain model, but is {row["losses"][step]}'
            )
    return max(differences)
