"""The tables and the picture of results, and an explanation of their columns."""

from typing import Any

from benchmarks.experiments.scaling.meshes import TORCHGPIPE
from benchmarks.harness.charts import Curves
from benchmarks.harness.report import Part, Rows

#: The kinds of scaling, with an explanation of each.
KINDS = {
    'strong': 'all meshes have the same mini-batch',
    'weak': 'the mini-batch grows with the number of processes',
    'accumulated': 'the gradients of four mini-batches are reduced once',
    'small': 'a model of 20 small layers for each process, and the same mini-batch',
}

#: Their titles.
TITLES = {
    'strong': 'Strong scaling',
    'weak': 'Weak scaling',
    'accumulated': 'Accumulated gradients',
    'small': 'Small layers',
}

MEANING = """Rows with a library are plain PyTorch, and all others are torchgpipe. All contenders
have the same losses in all steps. The columns are:

- cores per rank: less than 1 if processes share cores.
- speed-up: tokens per second relative to one process on one core, median over rounds.
- of n: the speed-up divided by the number of processes.
- of cores: the speed-up divided by the number of cores in use.
- memory: the peak of parameters, gradients, buffers of the library and activations, of the rank
  with the most memory.
- sent: the bytes that a rank sends in a step along each axis. A collective counts as a ring.
- bubble: the share of time in which a rank runs no layers, measured by torchgpipe.timeline. It
  ends before gradients are reduced.

FSDP2 gathers a block in forward and backward of each micro-batch, and torchgpipe once in a step.

Ratios are medians over rounds, with their quartiles, of contenders in the same processes. They
were also measured in an environment of its own for each other release of PyTorch that has a row.
In the rows with small layers, each process has 20 linear layers of 48 features, and a sequence is
32 samples. torch.distributed.pipelining with FSDP2 reduces the gradients of each mini-batch."""

#: Curves of the picture: the axes of a mesh, and whether it shards.
CURVES = {
    'data': ('data', False),
    'data, shard': ('data', True),
    'pipe': ('pipe', False),
    'tensor': ('tensor', False),
}

#: The axes whose traffic is shown. Messages of a few bytes are between all ranks.
AXES = ('data', 'pipe', 'tensor')


def describe_model(results: dict[str, Any]) -> str:
    """Describe the model and its mini-batch."""
    model = results['model']
    numbers = sorted({row['rounds'] for row in results['rows']})
    rounds = ' to '.join(map(str, dict.fromkeys([numbers[0], numbers[-1]])))
    text = (
        f'The GPT has {model["depth"]} blocks of width {model["width"]} with '
        f'{model["heads"]} heads, {model["vocabulary"]} words and {model["context"]} tokens '
        'per sequence. It is trained in float32 by SGD, without checkpoints. The mini-batch '
        f'of one process has {results["batch"]} sequences in {results["chunks"]} '
        f'micro-batches. There are {rounds} rounds. '
    )
    if results['device'] == 'cpu':
        return text + (
            'Each process has one thread on one core, and processes beyond the '
            f'{results["cores"]} cores share them.'
        )
    return text + f'Each process has a device of type {results["device"]}.'


def rows_of(results: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the rows of a kind of scaling, with one row of a model for one process."""
    rows = [row for row in results['rows'] if row['kind'] == kind]
    if kind == 'small':  # Each number of processes has another model.
        return rows
    return [row for k, row in enumerate(rows) if k == 0 or row['processes'] > 1]


def mesh_rows(results: dict[str, Any], kind: str) -> Rows:
    """Return the header and a row for each contender of a kind of scaling."""
    header = [
        TITLES[kind].lower(),
        'processes',
        'cores per rank',
        'micro-batches',
        'ms per step',
        'tokens/s',
        'speed-up',
        'of n',
        'of cores',
        'memory, MiB',
        'sent, MiB',
        'bubble, %',
    ]
    rows = []
    for row in rows_of(results, kind):
        bubble = '—' if row['bubble'] is None else f'{row["bubble"] * 100:.0f}'
        rows.append(
            [
                row['name'],
                str(row['processes']),
                f'{row["cores_per_rank"]:.2g}',
                str(row['chunks']),
                f'{row["seconds"] * 1e3:.0f}',
                f'{row["tokens_per_second"]:.0f}',
                f'{row["speed_up"]:.2f}',
                f'{row["share"]:.2f}',
                f'{of_cores(row):.2f}',
                f'{row["memory"] / 2**20:.1f}',
                sent_cell(row),
                bubble,
            ]
        )
    return header, rows


def of_cores(row: dict[str, Any]) -> float:
    """Return the speed-up divided by the number of cores in use."""
    share: float = row['speed_up'] / (row['processes'] * row['cores_per_rank'])
    return share


def sent_cell(row: dict[str, Any]) -> str:
    """Return the MiB that a rank sends along each axis."""
    cells = []
    for axis in AXES:
        if axis in row['sent']:
            cells.append(f'{axis} {row["sent"][axis] / 2**20:.1f}')
    return ', '.join(cells) or '—'


def ratio_rows(results: dict[str, Any]) -> Rows:
    """Return how many times as fast torchgpipe is as plain PyTorch, and the ratio of memory.

    There is a row for each mesh in each environment.
    """
    kinds = kinds_of(results)
    header = ['torchgpipe', 'torch']
    for kind in kinds:
        header += [f'{kind}, times as fast', f'{kind}, memory']

    # The cells of each kind, by name, and by the number of the environment and its PyTorch.
    cells: dict[str, dict[tuple[int, str], dict[str, list[str]]]] = {}
    for number, environment in enumerate([results, *results['others']]):
        for row in environment['rows']:
            against = row['against']
            if against:
                name = f'{row["name"]}, against {against["library"]}'
                environments = cells.setdefault(name, {})
                by_kind = environments.setdefault((number, environment['torch']), {})
                by_kind[row['kind']] = _ratio_cells(against)

    rows = []
    for name, environments in cells.items():
        for (_, release), by_kind in environments.items():
            rows.append([name, release])
            for kind in kinds:
                rows[-1] += by_kind.get(kind, ['—', '—'])
    return header, rows


def kinds_of(results: dict[str, Any]) -> list[str]:
    """Return the measured kinds of scaling."""
    return [kind for kind in KINDS if rows_of(results, kind)]


def _ratio_cells(against: dict[str, Any]) -> list[str]:
    """Return the ratio of speeds with its quartiles, and the ratio of memory."""
    low, high = against['quartiles']
    return [
        f'{against["times_as_fast"]:.2f} ({low:.2f} to {high:.2f})',
        f'{against["memory"]:.2f}',
    ]


def panels(results: dict[str, Any]) -> list[Curves]:
    """Return speed-ups by the number of processes: a panel for each kind of scaling."""
    return [_panel(results, kind) for kind in kinds_of(results)]


def _panel(results: dict[str, Any], kind: str) -> Curves:
    rows = [row for row in results['rows'] if row['kind'] == kind]
    sizes = sorted({row['processes'] for row in rows})
    most = max(sizes)
    cores = results['cores'] if results['device'] == 'cpu' else most
    ideal = 'ideal' if cores >= most else f'ideal on {cores} cores'
    curves: dict[str, tuple[list[int], list[float]]] = {
        ideal: (sizes, [min(n, cores) for n in sizes])
    }
    for name, (axis, shard) in CURVES.items():
        xs, ys = [1], [1.0]
        for row in sorted(rows, key=lambda row: row['processes']):
            is_on_axis = row['shard'] == shard and row[axis] == row['processes'] > 1
            if row['library'] == TORCHGPIPE and is_on_axis:
                xs.append(row['processes'])
                ys.append(row['speed_up'])
        curves[name] = xs, ys
    return Curves(f'processes, {kind} scaling', 'speed-up', curves)


def parts(results: dict[str, Any]) -> list[Part]:
    """Return the text and the tables for the documentation."""
    result: list[Part] = [f'{describe_model(results)} {MEANING}']
    for kind in kinds_of(results):
        result += [f'{TITLES[kind]}: {KINDS[kind]}.', mesh_rows(results, kind)]
    if ratio_rows(results)[1]:
        result.append(ratio_rows(results))
    return result
