"""The page of results on one GPU.

Steps with all partitions on one device are predicted from a machine of plans. The
device runs the actions of all rows, one after the other. Given the time of the layers in a
step without a split, the costs of actions and of a split backward give the other schedules.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.experiments.machine import machine_parts
from benchmarks.harness.experiment import OURS, Experiment
from benchmarks.harness.memory import GIB
from benchmarks.harness.published import EXPERIMENTS, MODEL
from benchmarks.harness.report import Part, describe, filled, written
from benchmarks.harness.tables import number, published
from torchgpipe.plan import MACHINES, Costs, Machine, StageCosts, search_schedule, simulate
from torchgpipe.schedule import Schedule, make
from torchgpipe.schedule.schedule import by_step, steps

#: Two thirds of a step without recomputation are backward, half of it for gradients of weights.
FORWARD, BACKWARD, WEIGHTS = 1 / 3, 2 / 3, 1 / 3


class Order(NamedTuple):
    """The order of a step.

    Attributes:
        schedule: The name of the schedule, or ``'searched'``.
        devices: The number of devices of the schedule.
        recomputes: Whether all micro-batches are recomputed.
    """

    schedule: str
    devices: int
    recomputes: bool = False


def predicted_seconds(order: Order, micro_batches: int, layers: float, machine: Machine) -> float:
    """Return the seconds of a step, with all partitions on one device.

    >>> from torchgpipe.plan import MACHINES
    >>> f"{predicted_seconds(Order('1f1b', 4), 16, 0.2, MACHINES['H100']):.3f}"
    '0.200'

    Args:
        order: The order of the step.
        micro_batches: The number of micro-batches.
        layers: The seconds of all layers in a step, forward and backward.
        machine: The machine, which has the costs of actions and of a split.
    """
    if order.schedule == 'searched':
        costs = _costs(order.devices, micro_batches, layers, machine, 0)
        limit = 2 * costs.stages[0].activation_bytes
        schedule = search_schedule(costs, order.devices, micro_batches, limit).schedule
    else:
        schedule = make(order.schedule, order.devices, micro_batches)
        stages = sum(map(len, schedule.stages))
        recomputed = micro_batches if order.recomputes else 0
        costs = _costs(stages, micro_batches, layers, machine, recomputed)
    one_row = Schedule((tuple(by_step(steps(schedule.rows)[0])),))
    return simulate(one_row, costs).seconds


def _costs(
    stages: int, micro_batches: int, layers: float, machine: Machine, recomputed: int
) -> Costs:
    """Return the costs of equal stages."""
    cell = layers / (stages * micro_batches)
    seconds = {
        'F': cell * FORWARD,
        'B': cell * BACKWARD,
        'R': cell * FORWARD,
        'I': cell * (BACKWARD - WEIGHTS),
        'W': cell * (WEIGHTS + machine.split * BACKWARD),
    }
    for kind, least in machine.actions.items():
        seconds[kind] = max(seconds[kind], least)
    stage = StageCosts(
        seconds['F'],
        seconds['B'],
        seconds['W'],
        seconds['I'],
        seconds['R'],
        recomputed=recomputed,
        activation_bytes=1.0,
    )
    return Costs([stage] * stages)


ROOT = Path(__file__).parents[3]
GPU_PAGE = ROOT / 'docs/gpu.md'
RESULTS = ROOT / 'benchmarks/results'

START = """# On a GPU

<!-- Written by `python -m benchmarks gpu` and `page` from benchmarks/results; do not edit. -->

`python -m benchmarks gpu` measures everything that one GPU can show. All partitions are on that
GPU. After eight minutes it starts nothing more. The next run goes on where an earlier one stopped.
All of it should take a quarter of an hour on an H100, which is an estimate.

One device cannot show everything:

- There are no bubbles, because the device always has work. Times here say nothing about the speed
  of a pipeline on several devices. They show the costs of the engine, of a split backward
  and of more stages.
- There are no copies between devices, so there is no overlap of copies with computation.
- The memory is the sum over partitions. On several devices, each device holds its own part.
"""

#: The orders of the schedules that were measured on an H100.
ORDERS = {
    'gpipe 4': Order('gpipe', 4),
    '1f1b 4': Order('1f1b', 4),
    'zb-h1 4': Order('zb-h1', 4),
    '1f1b 4 always': Order('1f1b', 4, recomputes=True),
    'zb-v 8': Order('zb-v', 4),
    'v-half 8': Order('v-half', 4),
    'v-min 8': Order('v-min', 4),
    'searched, 2 of 4 activations': Order('searched', 4),
}

#: Micro-batches of that measurement.
MICRO_BATCHES = 16

#: PyTorch's default.
TF32 = 'Convolutions use TF32 on GPUs that have it, matrix products do not.'


def make_gpu_page() -> str:
    """Return the page of the documentation, from the stored results."""
    path = RESULTS / 'gpu.json'
    parts = [START]
    if path.exists():
        stored = json.loads(path.read_text())
        parts += _sections(stored['machine'], stored['results'])
    # Measurements of earlier versions, by hand.
    parts.append((RESULTS / 'h100.md').read_text())
    parts += _written(_orders(json.loads((RESULTS / 'h100.json').read_text())))
    return '\n'.join(parts)


def gpu_page(machine: dict[str, Any], results: dict[str, Any]) -> str:
    """Return a page.

    Args:
        machine: The machine of the measurements.
        results: The device, the scale and the parts.
    """
    return '\n'.join([START, *_sections(machine, results)])


def _sections(machine: dict[str, Any], results: dict[str, Any]) -> list[str]:
    parts = results['parts']
    accelerated = not results['device'].startswith('cpu')
    # Of several GPUs, one was measured.
    where = describe({**machine, 'gpus': [results['name']]}, accelerated)
    command = f'python -m benchmarks gpu --devices {results["device"]}'
    if results['scale'] < 1:
        command += f' --scale {results["scale"]:g}'
    return _written(
        [
            f'`{command}`, {where}:',
            *_tests(parts),
            *_cells(parts),
            *_gpt(parts),
            *_memory(EXPERIMENTS['amoebanetd-memory'], parts),
            *_memory(EXPERIMENTS['unet-memory'], parts),
            *_resnet(parts),
            *_machine(parts),
            *_failures(parts),
        ]
    )


def _written(parts: Iterable[Part]) -> list[str]:
    """Return parts of a page as text, with an empty line after each."""
    return [f'{written(part)}\n' for part in parts]


def _tests(parts: dict[str, Any]) -> Iterator[Part]:
    tests = parts.get('tests')
    if not tests or 'failure' in tests:
        return
    yield '## Tests'
    if tests['status'] != 'run':
        yield f'The tests were {tests["status"]}.'
        return
    yield filled(
        f'`{tests["command"]}`: {tests["passed"]} passed, {tests["failed"]} failed, '
        f'{tests["skipped"]} skipped.'
    )
    if tests['names']:
        yield '\n'.join(f'- failed: `{name}`' for name in tests['names'])


def _cells(parts: dict[str, Any]) -> Iterator[Part]:
    cells = [parts.get(name, {}) for name in ('small cells', 'large cells')]
    cells = [part for part in cells if 'us_per_cell' in part]
    if not cells:
        return
    yield '## Engine per cell'
    yield filled(
        'A cell is one linear layer of one micro-batch. The table has the µs of a cell in '
        'a loop of plain PyTorch and by the engine; a column names its part of a step. With '
        "'always', the loop uses torch.utils.checkpoint. For small cells the host is the "
        'limit, which starts operations one after the other.'
    )
    rows = []
    for part in cells:
        row = [f'{part["width"]} features, {part["rows"]} rows']
        for loop, engine in part['us_per_cell'].values():
            row.append(f'{loop:.0f} → {engine:.0f}')
        rows.append(row)
    yield ['loop → engine, µs', *cells[0]['us_per_cell']], rows


def _gpt(parts: dict[str, Any]) -> Iterator[Part]:
    part = parts.get('GPT', {})
    if 'rows' not in part:
        return
    sizes = part['sizes']
    yield '## A GPT on one device'
    yield filled(
        f'{sizes["depth"]} blocks of width {sizes["width"]}, {sizes["context"]} tokens, '
        f'{part["micro_batches"]} micro-batches of {part["sequences"]} sequences; forward '
        f'and backward of a mini-batch; medians of {part["rounds"]} interleaved rounds. '
        'The peak is in addition to parameters, and includes gradients. Schedules with '
        'several partitions run in the order for 4 or 8 devices, V-shaped ones with two '
        'partitions of each device.'
    )
    first = part['rows']['plain PyTorch'].get('seconds', float('nan'))
    rows = []
    for name, row in part['rows'].items():
        if 'status' in row:
            rows.append([name, row['status'], '—', '—'])
            continue
        rows.append(
            [
                name,
                f'{row["seconds"] * 1e3:.1f}',
                f'{row["seconds"] / first:.3f}',
                f'{row["peak"] / 2**20:.0f}',
            ]
        )
    yield ['step', 'ms', 'relative to plain PyTorch', 'peak, MiB'], rows


def _memory(experiment: Experiment, parts: dict[str, Any]) -> Iterator[Part]:
    rows = []
    for setting in experiment.settings:
        part = parts.get(f'{experiment.name} {setting.name}')
        if part is None or 'failure' in part:
            continue
        parameters = f'{part["parameters"]:,}' if 'parameters' in part else '—'
        row = [setting.name, str(setting.model), parameters]
        if part['status'] == 'measured':
            model, activations = part['model'] / GIB, part['activations'] / GIB
            row += [number(model), number(activations), number(model + activations)]
            row.append(f'{part["batch"]} in {part["chunks"]}, {part["resolution"]}²')
        else:
            row += [part['status'], '—', '—', '—']
        model_published = setting.details.get(MODEL, {}).get(OURS)
        row.append('—' if model_published is None else published(model_published))
        row.append(published(setting.published[OURS]))
        rows.append(row)
    if not rows:
        return
    yield f'## {experiment.title}'
    yield filled(
        'All partitions are on the one device. Model memory is parameters, gradients and '
        'optimizer state. Activations are the peak of a step above it, as the allocator '
        'counts tensors. Published totals are sums over devices of the reserved memory. '
        f'{TF32}'
    )
    yield (
        [
            'setting',
            'model',
            'parameters',
            'model memory, GiB',
            'activations, GiB',
            'total, GiB',
            'batch, images',
            'published model',
            'published total',
        ],
        rows,
    )


def _resnet(parts: dict[str, Any]) -> Iterator[Part]:
    part = parts.get('ResNet-101', {})
    if 'rows' not in part:
        return
    experiment = EXPERIMENTS['resnet101-speed']
    yield '## ResNet-101'
    yield f'Images of {part["resolution"]}² in float32. {TF32}'
    first = part['rows']['baseline'].get('samples_per_second')
    rows = []
    for name, row in part['rows'].items():
        if 'status' in row:
            rows.append([name, row['status'], '—', '—', '—'])
            continue
        speed = row['samples_per_second']
        published_ratio = experiment.published_ratio(experiment.setting(name), OURS)
        rows.append(
            [
                name,
                f'{row["batch"]} in {row["chunks"]}',
                number(speed),
                number(speed / first if first else None, '—'),
                number(published_ratio),
            ]
        )
    yield ['setting', 'batch', 'samples/s', 'ratio', 'published ratio'], rows


def _machine(parts: dict[str, Any]) -> Iterator[Part]:
    part = parts.get('machine', {})
    if 'machine' not in part:
        return
    yield '## The machine for plans'
    yield from machine_parts(part)


def _failures(parts: dict[str, Any]) -> Iterator[Part]:
    lines = []
    for name, part in parts.items():
        if 'failure' in part:
            lines.append(f'- {name}: {part["failure"]}')
        elif part.get('status') == 'out of memory':
            lines.append(f'- {name}: out of memory ({part["reason"]})')
    if lines:
        yield '## Not measured'
        yield '\n'.join(lines)


def _orders(results: dict[str, Any]) -> Iterator[Part]:
    """Yield a measurement of schedules on an H100, beside predictions."""
    yield '### Schedules with all partitions on the device, version 0.21'
    yield (
        f'torchgpipe {results["torchgpipe"]}, torch {results["torch"]}, {results["device"]}, '
        f'{results["date"]}.'
    )
    yield filled(f'{results["experiment"]}.')
    peaks = results['peak in addition to parameters, MiB']
    times, machine = results['milliseconds'], MACHINES['H100']
    layers = times['1f1b 4'] / 1e3
    rows = []
    for name, time in times.items():
        predicted = 1e3 * predicted_seconds(ORDERS[name], MICRO_BATCHES, layers, machine)
        off = predicted / time - 1
        rows.append([name, f'{time:.1f}', f'{predicted:.1f}', f'{off:+.1%}', str(peaks[name])])
    yield ['schedule and partitions', 'ms', 'predicted, ms', 'off', 'peak, MiB'], rows
    yield filled(
        f"Each time was measured once. `MACHINES['H100']` has two constants from them: an "
        f'action of a stage takes at least {machine.actions["F"] * 1e3:.2f} ms of the '
        'host, which is the mean of the V-shaped schedules, and a split makes a backward '
        f'{machine.split:.1%} longer, which is the difference between zb-h1 and 1f1b. The '
        'layers take the time of 1f1b. With these, the schedules without a split are '
        'first, then zb-h1, then the schedules with two partitions per device. The '
        'difference between v-min and the other two is not predicted, because they have '
        'the same number of actions.'
    )
