"""Equal cells on workers of the CPU: the time of each schedule."""

import itertools
import math
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import click
import torch
from tqdm import tqdm

from benchmarks.experiments.schedules.contenders import CELLS, OTHERS, Stage, contenders
from benchmarks.experiments.schedules.prediction import Prediction, predict
from benchmarks.harness.charts import Bars, bar
from benchmarks.harness.options import choices_option, distinct, output_option
from benchmarks.harness.report import Part, Rows, Section
from benchmarks.harness.timing import (
    check_losses,
    one_thread,
    order_of_round,
    rounds_option,
)
from benchmarks.models.stacks import STACKS, Stack
from torchgpipe.schedule import NAMES
from torchgpipe.trainer.files import output_folder
from torchgpipe.trainer.launch import available_cores
from torchgpipe.trainer.processes import Processes, is_available

MEANING = """Times and ratios are medians over rounds. The columns are:

- predicted: the time by torchgpipe.plan.simulate. It uses a profile of the layers in each round,
  one layer after the other in one thread.
- ratio: measured to predicted time of the same round.
- speed-up: relative to the same cells in sequence, in the same round.
- of ideal: speed-up divided by m · n / (m + n − 1), the maximum for m micro-batches in n
  partitions with one stage each.
- idle: the share of the cores' time that the cells do not need in sequence. It includes bubbles
  and any slowdown of the cells.
- bubble: the share of time in which a device runs nothing, measured by torchgpipe.timeline, and
  then the predicted share.
- activations: the peak memory of the tensors that forward creates, without gradients, summed over
  devices."""

#: Steps that are recorded for a timeline.
RECORDED = 3


def depth_of(stack: Stack, milliseconds: float) -> int:
    """Return the layers of a cell, so that all cells of a device take so long in one thread."""
    return max(1, math.ceil(milliseconds / 1e3 / CELLS / stack.layer_seconds()))


def measure(stack: str, depth: int, n: int, m: int, rounds: int) -> dict[str, Any]:
    """Let all take steps in turn, and return the measurements of each."""
    cells = STACKS[stack].build(CELLS * n, depth)
    micro_batch, _ = STACKS[stack].data(1)
    runs: list[dict[str, float]] = []
    predictions: list[dict[str, Prediction]] = []
    with ExitStack() as exit:
        processes = None
        if is_available() and m >= n:
            options = (stack, CELLS * n, depth, m, [*OTHERS.values()])
            processes = exit.enter_context(Processes(n, Stage, *options))
        by_name = contenders(cells, STACKS[stack].data(m), n, m, processes)
        check_losses({name: contender.run().loss for name, contender in by_name.items()})

        for k in tqdm(range(rounds), desc=f'{stack}, {m} micro-batches', leave=False):
            runs.append({})
            for name in order_of_round([*by_name], k):
                runs[-1][name] = by_name[name].run().seconds
            torch.set_num_threads(1)
            predictions.append(predict(cells, micro_batch, n, m))

        ideal = m * n / (m + n - 1)
        rows = []
        for name, contender in by_name.items():
            bubbles = [contender.bubble() for _ in range(RECORDED)]
            rows.append(
                {
                    **_row(name, runs, contender.peak(), ideal, n),
                    'bubble': None if None in bubbles else median(bubbles),
                    'predicted': _prediction(name, runs, predictions),
                }
            )
    return {
        'stack': stack,
        'partitions': n,
        'chunks': m,
        'depth': CELLS * depth,
        'ideal': ideal,
        'rows': rows,
    }


def _row(
    name: str, runs: Sequence[dict[str, float]], peak: int, ideal: float, n: int
) -> dict[str, Any]:
    speed_up = median(run['in sequence'] / run[name] for run in runs)
    workers = 1 if 'one worker' in name or name == 'in sequence' else n
    cores = min(workers, len(available_cores()))
    return {
        'name': name,
        'seconds': median(run[name] for run in runs),
        'speed_up': speed_up,
        'share': speed_up / ideal if workers == n else None,
        'idle': 1 - speed_up / cores,
        'peak': peak,
    }


def _prediction(
    name: str, runs: Sequence[dict[str, float]], predictions: Sequence[dict[str, Prediction]]
) -> dict[str, float] | None:
    """Relate the prediction in each round to the measurement in it."""
    if name not in predictions[0]:
        return None
    of_rounds = [prediction[name] for prediction in predictions]
    return {
        'seconds': median(prediction.seconds for prediction in of_rounds),
        'bubble': median(prediction.bubble for prediction in of_rounds),
        'ratio': median(run[name] / round.seconds for run, round in zip(runs, of_rounds)),
    }


@click.command()
@choices_option('--stack', 'stacks', STACKS)
@click.option(
    '--partitions',
    type=click.IntRange(2),
    multiple=True,
    default=(2,),
    callback=distinct,
    help='On cpu:0, cpu:1 and so on; may be given several times.',
)
@click.option(
    '--chunks',
    type=click.IntRange(1),
    multiple=True,
    default=(8, 16),
    callback=distinct,
    help='Micro-batches; may be given several times.',
)
@click.option(
    '--milliseconds',
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    help='How long forward of a micro-batch takes at least in a partition, in one thread.',
)
@rounds_option(11)
@output_option
def schedules(
    stacks: tuple[str, ...],
    partitions: tuple[int, ...],
    chunks: tuple[int, ...],
    milliseconds: float,
    rounds: int,
    output: str,
) -> None:
    """Time a training step by each schedule, on one core per partition.

    The models are stacks of equal cells, without checkpoints and without optimizer. Schedules of
    GPipe.step are compared with the plain call and with the same cells in sequence in one thread.
    On one worker there are no bubbles, so the time that zero bubble adds is the cost of splitting
    backward. With a process for each partition, torchgpipe.distributed and
    torch.distributed.pipelining are measured. Interleaved and zb-v cut each partition in two.
    """
    folder = output_folder(output)
    cases = []
    with one_thread():
        for name in stacks:
            torch.set_num_threads(1)  # A contender has another number.
            depth = depth_of(STACKS[name], milliseconds)
            for n, m in itertools.product(partitions, chunks):
                cases.append(measure(name, depth, n, m, rounds))
    results = {'milliseconds': milliseconds, 'rounds': rounds, 'cases': cases}
    SECTION.publish(results, folder)


def schedule_rows(case: dict[str, Any]) -> Rows:
    """Return the header and the rows of one stack, partitions and micro-batches."""
    header = [
        f'{case["stack"]}, n = {case["partitions"]}, m = {case["chunks"]}',
        'ms per step',
        'predicted',
        'ratio',
        'speed-up',
        'of ideal',
        'idle, %',
        'bubble, %',
        'predicted, %',
        'activations, MiB',
    ]
    return header, [_cells(row) for row in case['rows']]


def _cells(row: dict[str, Any]) -> list[str]:
    predicted: dict[str, Any] = row['predicted'] or dict.fromkeys(('seconds', 'ratio', 'bubble'))
    return [
        row['name'],
        _number(row['seconds'], 1e3, 1),
        _number(predicted['seconds'], 1e3, 1),
        _number(predicted['ratio']),
        _number(row['speed_up']),
        _number(row['share']),
        _number(row['idle'], 100, 0),
        _number(row['bubble'], 100, 0),
        _number(predicted['bubble'], 100, 0),
        _number(row['peak'], 2**-20, 1),
    ]


def _number(value: float | None, scale: float = 1, digits: int = 2) -> str:
    return '—' if value is None else f'{value * scale:.{digits}f}'


#: The ratios in the summary: a figure, and two rows of a case.
RATIOS = {
    '1f1b, times as fast as torch 1F1B': ('speed_up', '1f1b', 'torch 1F1B'),
    'in processes, 1f1b, times as fast as torch 1F1B': (
        'speed_up',
        '1f1b, processes',
        'torch 1F1B',
    ),
    '1f1b, times as fast as the plain call': ('speed_up', '1f1b', 'plain call'),
    'zb-h1, times as fast as 1f1b': ('speed_up', 'zb-h1', '1f1b'),
    'on one worker, 1f1b, times as fast as zb-h1': (
        'speed_up',
        '1f1b, one worker',
        'zb-h1, one worker',
    ),
    'activations, 1f1b to gpipe': ('peak', '1f1b', 'gpipe'),
}


def summary_rows(cases: Sequence[dict[str, Any]]) -> Rows:
    """Return the main results, in medians over stacks."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        name = f'n = {case["partitions"]}, m = {case["chunks"]}'
        groups.setdefault(name, []).append({row['name']: row for row in case['rows']})
    shares = ['1f1b, of ideal']
    errors = ['largest error of a prediction, %']
    ratios = {name: [name] for name in RATIOS}
    for group in groups.values():
        shares.append(f'{median(rows["1f1b"]["share"] for rows in group):.2f}')
        errors.append(f'{max(map(_deviation, group)):.0f}')
        for name, (figure, one, other) in RATIOS.items():
            ratios[name].append(_ratio(group, figure, one, other))
    return ['median over stacks', *groups], [shares, *ratios.values(), errors]


def _deviation(rows: dict[str, Any]) -> float:
    """Return the largest deviation of a schedule's time from the prediction, in percent."""
    return max(
        abs(row['predicted']['ratio'] - 1) * 100 for name, row in rows.items() if name in NAMES
    )


def _ratio(group: Sequence[dict[str, Any]], figure: str, one: str, other: str) -> str:
    if not {one, other} <= group[0].keys():
        return '—'
    return f'{median(rows[one][figure] / rows[other][figure] for rows in group):.2f}'


def speed_up_panels(results: dict[str, Any]) -> list[Bars]:
    """Return a panel per stack and number of partitions, with a line at each ideal."""
    cases = results['cases']
    names: dict[str, None] = {}
    groups: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        names |= dict.fromkeys(row['name'] for row in case['rows'])
        groups.setdefault(f'{case["stack"]}, n = {case["partitions"]}', []).append(case)
    names.pop('in sequence')

    panels = []
    for title, group in groups.items():
        series = {}
        for case in group:
            speed_ups = {row['name']: row['speed_up'] for row in case['rows']}
            series[f'm = {case["chunks"]}'] = [bar(speed_ups.get(name)) for name in names]
        # The names of the first panel are the ones of all of them.
        labels = [''] * len(names) if panels else [*names]
        ideals = [case['ideal'] for case in group]
        label = 'times as fast as in sequence; dotted: the ideal'
        panels.append(Bars(title, label, labels, series, ideals))
    return panels


def _parts(results: dict[str, Any]) -> list[Part]:
    """Return the summary, and a table for each case."""
    cases = results['cases']
    return [
        f'The forward of a micro-batch takes at least {results["milliseconds"]:g} ms in a '
        f'partition, in one thread. There are {results["rounds"]} rounds. {MEANING}',
        summary_rows(cases),
        *map(schedule_rows, cases),
    ]


SECTION = Section('Schedules on workers of the CPU', 'schedules', _parts, speed_up_panels)
COMMANDS = [schedules]
SECTIONS = [SECTION]
