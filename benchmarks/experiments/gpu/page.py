"""The page of results on one GPU.

Steps with all partitions on one device are predicted from a machine of plans. The
device runs the actions of all rows, one after the other. Given the time of the layers in a
step without a split, the costs of actions and of a split backward give the other schedules.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from benchmarks.experiments.machine import machine_parts
from benchmarks.harness.experiment import OURS, Experiment
from benchmarks.harness.memory import GIB
from benchmarks.harness.published import EXPERIMENTS, MODEL
from benchmarks.harness.report import Rows, describe, markdown
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
        stages = 1 + max(action.stage for row in schedule.rows for action in row)
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

#: The schedules that were measured on an H100: their orders.
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

#: Sections, by the results that they have.
Section = Iterator[str | Rows]


def make_gpu_page() -> str:
    """Return the page of the documentation, from the stored results."""
    path = RESULTS / 'gpu.json'
    parts = [START]
    if path.exists():
        stored = json.loads(path.read_text())
        parts += _sections(stored['machine'], stored['results'])
    parts += _written(_h100(json.loads((RESULTS / 'h100.json').read_text())))
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


def _written(parts: Iterable[str | Rows]) -> list[str]:
    """Return parts of a page as text, with an empty line after each."""
    return [(part if isinstance(part, str) else markdown(part)) + '\n' for part in parts]


def _text(text: str) -> str:
    return fill(text, 99, break_on_hyphens=False, break_long_words=False)


def _tests(parts: dict[str, Any]) -> Section:
    tests = parts.get('tests')
    if not tests or 'failure' in tests:
        return
    yield '## Tests'
    if tests['status'] != 'run':
        yield f'The tests were {tests["status"]}.'
        return
    yield _text(
        f'`{tests["command"]}`: {tests["passed"]} passed, {tests["failed"]} failed, '
        f'{tests["skipped"]} skipped.'
    )
    if tests['names']:
        yield '\n'.join(f'- failed: `{name}`' for name in tests['names'])


def _cells(parts: dict[str, Any]) -> Section:
    names = [
        name
        for name in ('small cells', 'large cells')
        if name in parts and 'us_per_cell' in parts[name]
    ]
    if not names:
        return
    yield '## Engine per cell'
    yield _text(
        'A cell is one linear layer of one micro-batch. The table has the µs of a cell in '
        'a loop of plain PyTorch and by the engine, for forward and backward. With '
        "'always', the loop uses torch.utils.checkpoint. For small cells the host is the "
        'limit, which starts operations one after the other.'
    )
    kinds = list(parts[names[0]]['us_per_cell'])
    rows = []
    for name in names:
        part = parts[name]
        cells = [f'{loop:.0f} → {engine:.0f}' for loop, engine in part['us_per_cell'].values()]
        rows.append([f'{part["width"]} features, {part["rows"]} rows', *cells])
    yield ['loop → engine, µs', *kinds], rows


def _gpt(parts: dict[str, Any]) -> Section:
    part = parts.get('GPT', {})
    if 'rows' not in part:
        return
    sizes = part['sizes']
    yield '## A GPT on one device'
    yield _text(
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


def _memory(experiment: Experiment, parts: dict[str, Any]) -> Section:
    rows = []
    for setting in experiment.settings:
        part = parts.get(f'{experiment.name} {setting.name}')
        if part is None or 'failure' in part:
            continue
        if part['status'] == 'measured':
            model, activations = part['model'] / GIB, part['activations'] / GIB
            cells = [
                number(model),
                number(activations),
                number(model + activations),
                f'{part["batch"]} in {part["chunks"]}, {part["resolution"]}²',
            ]
        else:
            cells = [part['status'], '—', '—', '—']
        total = setting.published[OURS]
        model_published = setting.details.get(MODEL, {}).get(OURS)
        parameters = f'{part["parameters"]:,}' if 'parameters' in part else '—'
        rows.append(
            [
                setting.name,
                str(setting.model),
                parameters,
                *cells,
                '—' if model_published is None else published(model_published),
                published(total),
            ]
        )
    if not rows:
        return
    yield f'## {experiment.title}'
    yield _text(
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


def _resnet(parts: dict[str, Any]) -> Section:
    part = parts.get('ResNet-101', {})
    if 'rows' not in part:
        return
    yield '## ResNet-101'
    yield f'Images of {part["resolution"]}² in float32. {TF32}'
    first = part['rows']['baseline'].get('samples_per_second')
    rows = []
    for name, row in part['rows'].items():
        setting = EXPERIMENTS['resnet101-speed'].setting(name)
        if 'status' in row:
            rows.append([name, row['status'], '—', '—', '—'])
            continue
        ratio = EXPERIMENTS['resnet101-speed'].published_ratio(setting, OURS)
        rows.append(
            [
                name,
                f'{row["batch"]} in {row["chunks"]}',
                number(row['samples_per_second']),
                number(row['samples_per_second'] / first if first else None, '—'),
                number(ratio),
            ]
        )
    yield ['setting', 'batch', 'samples/s', 'ratio', 'published ratio'], rows


def _machine(parts: dict[str, Any]) -> Section:
    part = parts.get('machine', {})
    if 'machine' not in part:
        return
    yield '## The machine for plans'
    yield from machine_parts(part)


def _failures(parts: dict[str, Any]) -> Section:
    lines = []
    for name, part in parts.items():
        if 'failure' in part:
            lines.append(f'- {name}: {part["failure"]}')
        elif part.get('status') == 'out of memory':
            lines.append(f'- {name}: out of memory ({part["reason"]})')
    if lines:
        yield '## Not measured'
        yield '\n'.join(lines)


def _where(results: dict[str, Any], device: str, version: str) -> str:
    torch, date = results['torch'], results['date']
    return f'torchgpipe {version}, torch {torch}, {device}, {date}.'


def _h100(results: dict[str, Any]) -> Section:
    """Yield the measurements of earlier versions on an H100."""
    device = results['device']
    yield '## Earlier versions on an H100'
    yield _text('These were measured by hand before the command existed.')

    tests = results['tests']
    yield '### Tests of version 0.16'
    yield _where(results, device, tests['torchgpipe'])
    yield _text(
        f'`{tests["command"]}`: {tests["passed"]} passed, {tests["skipped"]} skipped; '
        f'failed: {tests["failed"]}.'
    )

    yield '### Engine per cell in versions 0.15 and 0.16'
    yield _where(results, device, '0.15.2 and 0.16.0')
    for name in ('cells', 'cells on the CPU'):
        cells = results[name]
        yield _text(
            f'{cells["experiment"]}; above a plain loop. Rounds differ by up to a factor of two.'
        )
        rows = []
        for k, pair in enumerate(cells['above a plain loop']):
            for version, times in pair.items():
                rows.append([f'{k + 1}, {version}', *(f'{x:.0f}' for x in times.values())])
        yield ['round, version', 'torch.utils.checkpoint', "'always'"], rows

    transformer = results['transformer']
    yield '### A transformer in versions 0.15 and 0.16'
    yield _where(results, device, '0.15.2 and 0.16.0')
    yield _text(f'{transformer["experiment"]}.')
    names = list(transformer['MiB'])
    rows = [
        [row['version'], *(f'{row[name]:.1f}' for name in names)]
        for row in transformer['milliseconds']
    ]
    rows.append(['MiB', *(str(transformer['MiB'][name]) for name in names)])
    yield ['ms', *names], rows

    orders = results['less memory']
    yield '### Schedules with all partitions on the device, version 0.21'
    yield _where(orders, orders['device'], orders['torchgpipe'])
    yield _text(f'{orders["experiment"]}.')
    peaks = orders['peak in addition to parameters, MiB']
    machine, times = MACHINES['H100'], orders['milliseconds']
    rows = []
    for name, time in times.items():
        predicted = 1e3 * predicted_seconds(
            ORDERS[name], MICRO_BATCHES, times['1f1b 4'] / 1e3, machine
        )
        rows.append(
            [
                name,
                f'{time:.1f}',
                f'{predicted:.1f}',
                f'{predicted / time - 1:+.1%}',
                str(peaks[name]),
            ]
        )
    yield ['schedule and partitions', 'ms', 'predicted, ms', 'off', 'peak, MiB'], rows
    yield _text(
        f"Each time was measured once. `MACHINES['H100']` has two constants from them: an "
        f'action of a stage takes at least {machine.actions["F"] * 1e3:.2f} ms of the '
        'host, which is the mean of the V-shaped schedules, and a split makes a backward '
        f'{machine.split:.1%} longer, which is the difference between zb-h1 and 1f1b. The '
        'layers take the time of 1f1b. With these, the schedules without a split are '
        'first, then zb-h1, then the schedules with two partitions per device. The '
        'difference between v-min and the other two is not predicted, because they have '
        'the same number of actions.'
    )

    earlier = results['machine']
    yield '### The machine for plans, version 0.18'
    yield _where({**results, 'date': earlier['date']}, device, earlier['torchgpipe'])
    yield from machine_parts(earlier)

    steps = results['steps by a plan']
    yield '### Steps by a plan, version 0.19'
    yield _where({**results, 'date': steps['date']}, device, steps['torchgpipe'])
    yield _text(f'{steps["experiment"]}.')
    rows = []
    for step in steps['steps']:
        rows.append(
            [
                str(step['width']),
                str(step['blocks']),
                step['recomputation'],
                ' / '.join(map(str, step['ms'])),
                ' / '.join(map(str, step['GiB'])),
            ]
        )
    yield (
        [
            'width',
            'blocks',
            'recomputation',
            'ms, predicted / measured',
            'GiB, predicted / measured',
        ],
        rows,
    )
    yield _text(f'Memory is {steps["memory"]}.')
