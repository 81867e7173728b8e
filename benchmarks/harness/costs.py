"""The documentation's page on costs and gains of wrapping, made of the stored results."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.report import Part, describe, filled, written
from torchgpipe.plan import MACHINES

COSTS = Path(__file__).parents[2] / 'docs/costs.md'

START = """# Costs and gains

<!-- Written by `python -m benchmarks page` from benchmarks/results; do not edit. -->

The line below each heading names the command, the versions, the machine and the date of the
measurement. Results on another machine differ, so run the command there.
"""

#: Whose µs are shown: the row of the results, and which of the pair of loop and pipeline.
RUNS = {
    'loop over micro-batches and layers': ("forward + backward, 'never'", 0),
    "`loss.backward()`, `checkpoint='never'`": ("forward + backward, 'never'", 1),
    'loop with `torch.utils.checkpoint`': ("forward + backward, 'always'", 0),
    "`loss.backward()`, `checkpoint='always'`": ("forward + backward, 'always'", 1),
    "`step`, `checkpoint='never'`": ("step by 'gpipe', 'never'", 1),
}

#: The least milliseconds of an action on an H100.
ACTION = MACHINES['H100'].actions['F'] * 1e3

#: Partitions and micro-batches of these.
SIZE = 4, 8

#: Rows of schedules that are shown.
CONTENDERS = ('in sequence', 'plain call', 'gpipe', '1f1b', 'interleaved', 'zb-h1', 'torch 1F1B')

#: Micro-batches of a partition that stages hold at their peak, by schedule.
HELD = {
    'gpipe': ('m · n', lambda m, n: m * n),
    '1f1b': ('n · (n + 1) / 2', lambda m, n: sum(min(m, n - j) for j in range(n))),
}


def costs_page(stored: dict[str, dict[str, Any]], shares: Sequence[Part]) -> str:
    """Write the page.

    Args:
        stored: The results of ``overhead``, ``concurrency`` and ``schedules``, and of ``scaling``
            if there are some.
        shares: The text on the results of ``concurrency``.
    """
    parts = [
        START,
        *_cells(stored['overhead']),
        *_shares(stored['concurrency'], shares),
        *_schedules(stored['schedules']),
        *_processes(stored.get('scaling')),
    ]
    return '\n'.join(map(written, parts))


def _where(name: str, stored: dict[str, Any]) -> str:
    return f'`python -m benchmarks {name}`, {describe(stored["machine"])}:\n'


def _cells(stored: dict[str, Any]) -> list[Part]:
    """Return the time that the engine takes for each micro-batch in each partition."""
    times = {}
    for row in stored['results']:
        if (row['n'], row['m']) == SIZE:
            times[row['where']] = row['us_per_cell']
    one_device, many_devices = times['one device'], times['n devices']
    loop, plain_call = one_device["forward + backward, 'never'"]
    add = plain_call - loop
    step_loop, step = many_devices["step by 'gpipe', 'never'"]
    add_step = step - step_loop

    rows = []
    for name, (kind, k) in RUNS.items():
        on_workers = f'{many_devices[kind][k]:.0f}' if k else '—'
        rows.append([name, f'{one_device[kind][k]:.0f}', on_workers])
    header = [
        'µs for forward and backward of a linear layer of 8 × 8',
        'one device',
        'one CPU worker per partition',
    ]
    return [
        '## Overhead per micro-batch and partition\n',
        _where('overhead', stored),
        (header, rows),
        f"""
The overhead of the engine does not depend on the layers. Here the layers alone take
{loop:.0f} µs in the loop. On one device, the plain call adds {add:.0f} µs. If forward and
backward of a partition take one millisecond, this is {add / 10:.0f} %. From {add / 10:.1f} ms on,
it is less than 1 %. A step on CPU workers adds {add_step:.0f} µs, which is less than 1 %
from {add_step / 10:.0f} ms on. CPU workers share one interpreter. The host runs ahead
of an accelerator, so its time counts only where the device has less work. On an H100, an action
takes at least {ACTION:.1f} ms: see [On a GPU](gpu.md).
""",
    ]


def _shares(stored: dict[str, Any], shares: Sequence[Part]) -> list[Part]:
    """Return the picture and the tables of two partitions."""
    between: list[Part] = []
    for share in shares:
        between += [share, '']
    return [
        '## Speed-up of two partitions\n',
        _where('concurrency', stored),
        '![Share of the ideal, by size of cells and micro-batches]'
        '(../benchmarks/results/concurrency.svg)\n',
        *between,
        """On the CPU, autograd runs backward in one thread, where only large kernels use
several cores. In the next table, they do. To train on CPU workers, use [`step`](guide/step.md).
Each accelerator has its own autograd thread.
""",
    ]


def _schedules(stored: dict[str, Any]) -> list[Part]:
    """Show the memory of activations and the time of each schedule."""
    cases = stored['results']['cases']
    rows = []
    for case in cases:
        by_name = {row['name']: row for row in case['rows']}
        one = by_name['in sequence']['peak'] / case['partitions']
        cells = [f'{case["stack"]}, m = {case["chunks"]}']
        for name in CONTENDERS:
            if name in by_name:
                row = by_name[name]
                cells.append(f'{row["speed_up"]:.2f} ×, {row["peak"] / one:.1f}')
            else:
                cells.append('—')
        rows.append(cells)
    n, m = cases[0]['partitions'], cases[0]['chunks']
    formulas = ', '.join(
        f'{name} {formula} = {count(m, n)}' for name, (formula, count) in HELD.items()
    )
    return [
        '## Speed and memory of each schedule\n',
        _where('schedules', stored),
        (['two partitions', *CONTENDERS], rows),
        f"""
Each entry is the speed-up over execution in sequence, and the peak of activations without
checkpoints. The unit of the peak is the activations of one micro-batch in one partition. For
n = {n} and m = {m}, the schedule alone implies: {formulas}. A step also holds tensors that are in
transit between two partitions. `torch 1F1B` is torch.distributed.pipelining, with one process per
partition. [Schedules](schedules.md) shows the differences between the schedules, and
[Benchmarks](benchmarks.md) has all rows.
""",
    ]


#: Sentences on an axis: the name of a row, and the text for it.
AXES: dict[str, Callable[[dict[str, Any]], str]] = {
    'data 2': lambda row: (
        f'With `data 2`, each rank has all parameters, and sends {_mib(row, "data")} MiB of '
        'gradients in a step, for any size of the mini-batch.'
    ),
    'data 2, shard': lambda row: (
        'With `data 2, shard`, a rank keeps half of them. It gathers all once in a step, and '
        f'sends {_mib(row, "data")} MiB.'
    ),
    'FSDP2, data 2': lambda row: (
        f'FSDP2 gathers each block in each micro-batch. It sends {_mib(row, "data")} MiB, and '
        f'its peak is {row["memory"] / 2**20:.1f} MiB.'
    ),
    'pipe 2': lambda row: (
        f'With `pipe 2`, a rank sends {_mib(row, "pipe")} MiB of activations or of their '
        f'gradients, and waits for {row["bubble"] * 100:.0f} % of the time.'
    ),
    'tensor 2': lambda row: (
        f'With `tensor 2`, it sends {_mib(row, "tensor")} MiB, because all blocks exchange '
        'activations in forward and backward of each micro-batch.'
    ),
}


#: The axes whose traffic is shown.
LINKS = ('data', 'pipe', 'tensor')


def _mib(row: dict[str, Any], axis: str) -> str:
    return f'{row["sent"].get(axis, 0) / 2**20:.1f}'


def _processes(stored: dict[str, Any] | None) -> list[Part]:
    """Return speed, memory and traffic of each mesh, if they are stored."""
    if not stored:
        return []
    rows = [row for row in stored['results']['rows'] if row['kind'] in ('strong', 'weak')]
    # By the name of a mesh of torchgpipe, its row of each kind. Its first row is of equal batches.
    meshes: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row['library'] == 'torchgpipe':
            meshes.setdefault(row['name'], {})[row['kind']] = row
    firsts: dict[str, dict[str, Any]] = {}
    for row in rows:
        firsts.setdefault(row['name'], row)
    texts = [text(firsts[name]) for name, text in AXES.items() if name in firsts]
    header = [
        'mesh of a GPT',
        'cores per rank',
        'speed-up, same mini-batch',
        'speed-up, mini-batch per process',
        'memory of a rank, MiB',
        'sent in a step, MiB',
        'bubble, %',
        'against PyTorch',
    ]
    return [
        '## Several processes\n',
        _where('scaling', stored),
        (header, [_mesh_row(name, by_kind) for name, by_kind in meshes.items()]),
        _meaning(rows),
        filled(' '.join([*texts, '[Benchmarks](benchmarks.md) has all rows.'])) + '\n',
    ]


def _mesh_row(name: str, kinds: dict[str, dict[str, Any]]) -> list[str]:
    row = next(iter(kinds.values()))
    against = []
    for kind_row in kinds.values():
        if kind_row['against']:
            against.append(f'{kind_row["against"]["times_as_fast"]:.2f} ×')
    speed_ups = []
    for kind in ('strong', 'weak'):
        speed_ups.append(f'{kinds[kind]["speed_up"]:.2f} ×' if kind in kinds else '—')
    sent = [f'{axis} {_mib(row, axis)}' for axis in row['sent'] if axis in LINKS]
    return [
        name,
        f'{row["cores_per_rank"]:.2g}',
        *speed_ups,
        f'{row["memory"] / 2**20:.1f}',
        ', '.join(sent),
        f'{row["bubble"] * 100:.0f}',
        f'{", ".join(against)} {row["against"]["library"]}' if against else '—',
    ]


def _meaning(rows: Sequence[dict[str, Any]]) -> str:
    """Explain the columns."""
    one = next(row for row in rows if row['processes'] == 1)
    text = (
        'Speed-ups are relative to a loop of plain PyTorch in one process on one core, which '
        f'takes {one["seconds"] * 1e3:.0f} ms and {one["memory"] / 2**20:.1f} MiB for a '
        'mini-batch. Where ranks share cores, the largest speed-up is the number of cores. The '
        "last column is the speed relative to PyTorch's own library on the same mesh, for both "
        'mini-batches. Memory, traffic and bubble are for the same mini-batch on all meshes.'
    )
    return f'\n{filled(text)}\n'
