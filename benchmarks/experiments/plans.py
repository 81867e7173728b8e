"""Plans of meshes against published trainings, and the meshes that a plan would choose."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import click
from tqdm import tqdm

from benchmarks.harness.report import Rows, markdown
from torchgpipe.base.errors import format_bytes
from torchgpipe.plan import MACHINES, Machine, MeshPlan, Transformer, plan
from torchgpipe.plan.transformers import shares_of

PAGE = Path(__file__).parents[2] / 'docs/plans.md'

LLAMA_8B, LLAMA_70B, LLAMA_405B = (
    Transformer(
        depth,
        width,
        heads,
        128256,
        8192,
        key_heads=8,
        features=features,
        gated=True,
        tied=False,
        biases=False,
    )
    for depth, width, heads, features in (
        (32, 4096, 32, 14336),
        (80, 8192, 64, 28672),
        (126, 16384, 128, 53248),
    )
)
GPT2_XL = Transformer(48, 1600, 25, 50257, 1024)
GPT3 = Transformer(96, 12288, 96, 51200, 2048)


class Training(NamedTuple):
    """A published training: its model, its mesh and a figure.

    Attributes:
        name: Its name.
        model: The sizes.
        machine: The name of the machine.
        mesh: Ranks along the data, pipe and tensor axis.
        batch: The samples of a step.
        published: The figure.
        options: Options of the plan.
    """

    name: str
    model: Transformer
    machine: str
    mesh: tuple[int, int, int]
    batch: int
    published: float
    options: dict[str, Any]

    def plan(self, known: dict[str, Machine], **more: Any) -> MeshPlan:
        """Return the plan of its mesh."""
        return plan(
            self.model,
            mesh=dict(zip(('data', 'pipe', 'tensor'), self.mesh)),
            **{
                'machine': known[self.machine],
                'batch': self.batch,
                'memory_limit': 1e15,
                **self.options,
                **more,
            },
        )

    @property
    def devices(self) -> int:
        """The number of its devices."""
        data, pipe, tensor = self.mesh
        return data * pipe * tensor


def _gpt(depth: int, width: int, heads: int, parallel: bool) -> Transformer:
    """Return a GPT of 2021 and 2022: dropout, and scores of attention in memory."""
    return Transformer(
        depth, width, heads, 51200, 2048, dropout=True, fused=False, sequence_parallel=parallel
    )


#: Korthikanti et al., 2022, tables 3 and 5, figure 1: layers, width, heads, ranks of the pipeline
#: and stages of each, samples of a micro-batch and of a step; seconds with full and with selective
#: recomputation; GiB of parameters and optimizer, of activations without and with selective
#: recomputation.
_FOUR = (
    ('22B', 48, 6144, 64, 1, 1, 4, 4, (1.42, 1.10), (45.6, 59.3, 9.6)),
    ('175B', 96, 12288, 96, 8, 3, 1, 64, (18.13, 13.75), (45.6, 66.8, 12.4)),
    ('530B', 105, 20480, 128, 35, 3, 1, 280, (49.05, 37.83), (31.6, 114.0, 23.1)),
    ('1T', 128, 25600, 160, 64, 1, 1, 512, (94.42, 71.49), (33.0, 131.3, 26.6)),
)


def _korthikanti(
    name: str,
    depth: int,
    width: int,
    heads: int,
    pipe: int,
    virtual: int,
    micro: int,
    batch: int,
    mode: str,
    published: float,
) -> Training:
    return Training(
        f'{name}, {mode}',
        _gpt(depth, width, heads, mode == 'selective'),
        'A100',
        (1, pipe, 8),
        batch,
        published,
        {
            'schedules': ['interleaved' if virtual > 1 else '1f1b'],
            'virtual': [virtual],
            'micro_batches': [micro],
            'recomputations': ['attention' if mode == 'selective' else mode],
            'shardings': ['replicate'],
            'overlap': [],
        },
    )


KORTHIKANTI = [
    _korthikanti(*row[:8], mode, seconds)
    for row in _FOUR
    for mode, seconds in zip(('full', 'selective'), row[8])
]
MEMORY = [
    (_korthikanti(*row[:8], mode, 0.0), row[9][0], gib)
    for row in _FOUR
    for mode, gib in zip(('none', 'selective'), row[9][1:])
]

#: Narayanan et al., 2021, table 1: interleaved stages, everything recomputed; TFLOP/s of a GPU,
#: with the recomputation.
NARAYANAN = [
    Training(
        f'{name}',
        _gpt(depth, width, heads, False),
        'A100',
        (data, pipe, tensor),
        batch,
        tflops,
        {
            'schedules': ['1f1b', 'interleaved'],
            'recomputations': ['full'],
            'shardings': ['replicate'],
            'micro_batches': [1, 2, 4, 8],
            'overlap': [],
        },
    )
    for name, depth, width, heads, tensor, pipe, data, batch, tflops in (
        ('1.7B', 24, 2304, 24, 1, 1, 32, 512, 137),
        ('3.6B', 30, 3072, 32, 2, 1, 32, 512, 138),
        ('7.5B', 36, 4096, 32, 4, 1, 32, 512, 142),
        ('18.4B', 40, 6144, 48, 8, 1, 32, 1024, 135),
        ('39.1B', 48, 8192, 64, 8, 2, 32, 1536, 138),
        ('76.1B', 60, 10240, 80, 8, 4, 32, 1792, 140),
        ('145.6B', 80, 12288, 96, 8, 8, 24, 2304, 148),
        ('310.1B', 96, 16384, 128, 8, 16, 15, 2160, 155),
        ('529.6B', 105, 20480, 128, 8, 35, 9, 2520, 163),
        ('1008B', 128, 25600, 160, 8, 64, 6, 3072, 163),
    )
]

#: Megatron-Core 0.8, table of models: TFLOP/s of a GPU, without recomputation.
MEGATRON_CORE = [
    Training(
        name,
        Transformer(depth, width, heads, 131072, 4096, tied=False, sequence_parallel=tensor > 1),
        'H100',
        (48, pipe, tensor),
        batch,
        tflops,
        {
            'schedules': ['1f1b', 'interleaved'],
            'recomputations': ['none'],
            'shardings': ['shard'],
            'micro_batches': [1, 2, 4],
            'virtual': 8,
            'overlap': ['data'],
        },
    )
    for name, depth, width, heads, tensor, pipe, batch, tflops in (
        ('1.7B', 24, 2048, 16, 1, 1, 192, 408.8),
        ('7.1B', 30, 4096, 32, 2, 1, 192, 465.9),
        ('16B', 32, 6144, 48, 4, 1, 192, 489.1),
        ('32B', 48, 7168, 56, 8, 1, 192, 459.6),
        ('70B', 84, 8192, 64, 8, 2, 384, 419.7),
        ('119B', 92, 10240, 80, 8, 4, 768, 420.5),
        ('177B', 96, 12288, 96, 8, 6, 1152, 432.8),
        ('314B', 96, 16384, 128, 8, 8, 1536, 474.4),
        ('462B', 112, 18432, 144, 8, 16, 3072, 459.9),
    )
]

#: SimuMax 1.2: milliseconds and GiB on eight B200; half of the layers on each of two stages.
SIMUMAX = [
    (
        Training(
            f'{name} of {depth} layers, {chunks} micro-batches',
            replace(model, layers=depth, length=4096, sequence_parallel=True),
            'B200',
            (data, pipe, tensor),
            data * chunks,
            milliseconds,
            {
                'schedules': ['1f1b'],
                'micro_batches': [1],
                'recomputations': ['none'],
                'shardings': ['shard'],
                'overlap': ['data'],
                'balance': [depth // 2 + 1] * 2 if pipe == 2 else None,
            },
        ),
        gib,
    )
    for name, model, depth, tensor, pipe, data, chunks, milliseconds, gib in (
        ('70B', LLAMA_70B, 12, 1, 2, 4, 4, 843.0, 66.55),
        ('70B', LLAMA_70B, 12, 2, 1, 4, 4, 725.5, 60.68),
        ('70B', LLAMA_70B, 12, 4, 1, 2, 4, 409.8, 39.07),
        ('70B', LLAMA_70B, 12, 8, 1, 1, 4, 280.9, 28.29),
        ('70B', LLAMA_70B, 12, 1, 2, 4, 32, 5436.5, None),
        ('405B', LLAMA_405B, 4, 1, 2, 4, 4, 1074.6, 87.08),
        ('405B', LLAMA_405B, 4, 1, 2, 4, 32, 7046.4, None),
    )
]

_FSDP: dict[str, Any] = {'schedules': ['1f1b'], 'shardings': ['shard'], 'overlap': ['data']}
_MPT_7B, _MPT_30B, _MPT_70B = (
    Transformer(depth, width, heads, 50368, 2048, biases=False)
    for depth, width, heads in ((32, 4096, 32), (48, 7168, 56), (80, 8192, 64))
)


def _others() -> list[tuple[Training, str]]:
    """Return further trainings: tokens/s of a GPU, and the assumptions of each."""
    several = (
        'there, some operations are recomputed, and normalization, rotation and gate are '
        'several operations each'
    )
    unknown = 'micro-batches are not published: 16 here; casts to float8 are not counted'

    def one(
        name: str,
        model: Transformer,
        machine: str,
        mesh: tuple[int, int, int],
        batch: int,
        published: float,
        note: str = '',
        **options: Any,
    ) -> tuple[Training, str]:
        return Training(name, model, machine, mesh, batch, published, {**_FSDP, **options}), note

    pipe = {'schedules': ['1f1b'], 'recomputations': ['full']}
    eight = replace(LLAMA_405B, dtype='float8', sequence_parallel=True)
    return [
        one(
            'torchtitan, 8B, FSDP',
            LLAMA_8B,
            'H100',
            (8, 1, 1),
            16,
            5762,
            several,
            micro_batches=[2],
            recomputations=['none'],
        ),
        one(
            'torchtitan, 8B, FSDP',
            LLAMA_8B,
            'H100',
            (128, 1, 1),
            256,
            5605,
            several,
            micro_batches=[2],
            recomputations=['none'],
        ),
        one(
            'torchtitan, 70B, bfloat16',
            replace(LLAMA_70B, sequence_parallel=True),
            'H100',
            (32, 1, 8),
            512,
            597.3,
            micro_batches=[16],
            recomputations=['full'],
        ),
        one(
            'torchtitan, 70B, float8',
            replace(LLAMA_70B, sequence_parallel=True, dtype='float8'),
            'H100',
            (32, 1, 8),
            512,
            829,
            'casts to float8 are not counted',
            micro_batches=[16],
            recomputations=['full'],
        ),
        one(
            'torchtitan, 405B, float8, 1F1B',
            eight,
            'H100',
            (8, 8, 8),
            256,
            100,
            unknown,
            micro_batches=[2],
            **pipe,
        ),
        one(
            'torchtitan, 405B, float8, interleaved',
            eight,
            'H100',
            (8, 8, 8),
            256,
            128,
            unknown,
            micro_batches=[2],
            schedules=['interleaved'],
            recomputations=['full'],
        ),
        one(
            'Megatron, 70B, float8',
            replace(LLAMA_70B, dtype='float8', sequence_parallel=True),
            'H100',
            (2, 8, 4),
            128,
            1621,
            micro_batches=[1],
            schedules=['interleaved'],
            virtual=[5],
            recomputations=['none'],
        ),
        one(
            'Llama 3, 405B, bfloat16',
            replace(LLAMA_405B, sequence_parallel=True),
            'H100',
            (64, 16, 8),
            2048,
            430e12 * 8192 / LLAMA_405B.flops(1),
            'from TFLOP/s; stages of a rank assumed',
            micro_batches=[1],
            schedules=['interleaved'],
            virtual=[2, 4, 8],
            recomputations=['none'],
        ),
        one(
            'Llama 3, 405B, bfloat16',
            replace(LLAMA_405B, sequence_parallel=True),
            'H100',
            (128, 16, 8),
            2048,
            400e12 * 8192 / LLAMA_405B.flops(1),
            'from TFLOP/s; stages of a rank assumed',
            micro_batches=[1],
            schedules=['interleaved'],
            virtual=[2, 4, 8],
            recomputations=['none'],
        ),
        one(
            'LLM Foundry, 7B, FSDP',
            _MPT_7B,
            'H100',
            (8, 1, 1),
            48,
            10643,
            micro_batches=[6],
            recomputations=['none'],
        ),
        one(
            'LLM Foundry, 70B, FSDP',
            _MPT_70B,
            'H100',
            (64, 1, 1),
            512,
            1039,
            micro_batches=[8],
            recomputations=['full'],
        ),
        one(
            'LLM Foundry, 70B, FSDP',
            _MPT_70B,
            'H100',
            (512, 1, 1),
            4096,
            1007,
            micro_batches=[8],
            recomputations=['full'],
        ),
        one(
            'LLM Foundry, 70B, FSDP',
            _MPT_70B,
            'A100',
            (64, 1, 1),
            512,
            410,
            micro_batches=[8],
            recomputations=['full'],
        ),
        one(
            'LLM Foundry, 30B, FSDP',
            _MPT_30B,
            'H100',
            (8, 1, 1),
            504,
            2002,
            micro_batches=[3],
            recomputations=['full'],
        ),
        one(
            'LLM Foundry, 30B, FSDP',
            _MPT_30B,
            'A100',
            (8, 1, 1),
            504,
            916,
            micro_batches=[3],
            recomputations=['full'],
        ),
        one(
            'Megatron-Turing, 530B',
            _gpt(105, 20480, 128, False),
            'A100',
            (8, 35, 8),
            1920,
            126e12 * 2048 / _recomputed(105, 20480, 1),
            'from TFLOP/s with the recomputation; the software of 2021',
            micro_batches=[1],
            **{**pipe, 'shardings': ['replicate'], 'overlap': []},
        ),
    ]


def _recomputed(depth: int, width: int, batch: int) -> float:
    """Return the FLOPs of a step with full recomputation, by the formula of 2021."""
    return (
        96
        * batch
        * 2048
        * depth
        * width**2
        * (1 + 2048 / (6 * width) + 51200 / (16 * depth * width))
    )


def fitted(change: Callable[[float], Machine], training: Training, published: float) -> Machine:
    """Return a machine on which a training takes the published seconds, by one constant."""
    low, high = 0.2, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        seconds = training.plan({training.machine: change(middle)}).seconds
        low, high = (middle, high) if seconds > published else (low, middle)
    return change(high)


def machines() -> dict[str, Machine]:
    """Return the machines, each with one constant that is fitted on one row."""
    a100, h100, b200 = MACHINES['A100'], MACHINES['H100'], MACHINES['B200']

    def shares(machine: Machine) -> Callable[[float], Machine]:
        return lambda largest: replace(
            machine, shares=shares_of(machine.name, machine.peak('bfloat16'), largest)
        )

    first = MEGATRON_CORE[0]
    return {
        'A100': fitted(shares(a100), KORTHIKANTI[1], KORTHIKANTI[1].published),
        'H100': fitted(
            lambda part: replace(
                h100, bandwidth=part * h100.bandwidth, attention_share=part * h100.attention_share
            ),
            first,
            first.model.flops(first.batch) / first.devices / first.published / 1e12,
        ),
        'B200': fitted(shares(b200), SIMUMAX[0][0], SIMUMAX[0][0].published / 1e3),
    }


def _off(predicted: float, published: float) -> str:
    return f'{100 * (predicted / published - 1):+.1f} %'


def korthikanti_rows(known: dict[str, Machine]) -> Rows:
    """Return seconds of an iteration."""
    found = [(x.name, x.plan(known).seconds, x.published) for x in KORTHIKANTI]
    return ['model, recomputation', 'published, s', 'predicted, s', 'off'], [
        [name, f'{published:.2f}', f'{seconds:.2f}', _off(seconds, published)]
        for name, seconds, published in found
    ]


def memory_rows(known: dict[str, Machine]) -> Rows:
    """Return GiB of activations on the first rank, and of parameters on one in the middle."""
    rows = []
    for training, state, activations in MEMORY:
        found = training.plan(known).simulation.peak_parts
        kept = found[len(found) // 2]['resident'] / 2**30
        head = training.model.profile(known['A100'], 8, training.batch).layers[-1]
        saved = (found[0]['activations'] - head.activation_bytes * (len(found) == 1)) / 2**30
        rows.append(
            [
                training.name,
                f'{state}',
                f'{kept:.1f}',
                _off(kept, state),
                f'{activations}',
                f'{saved:.1f}',
                _off(saved, activations),
            ]
        )
    return [
        'model, recomputation',
        'parameters and optimizer, GiB',
        'predicted',
        'off',
        'activations, GiB',
        'predicted',
        'off',
    ], rows


def tflops_rows(
    trainings: Iterable[Training], known: dict[str, Machine], recomputed: bool
) -> Rows:
    """Return TFLOP/s of a GPU, and the settings that the plan assumes."""
    rows = []
    for x in trainings:
        found = x.plan(known)
        flops = (
            _recomputed(x.model.layers, x.model.width, x.batch)
            if recomputed
            else (x.model.flops(x.batch))
        )
        predicted = flops / found.seconds / x.devices / 1e12
        stages = len(found.balance) // x.mesh[1]
        rows.append(
            [
                x.name,
                ' × '.join(map(str, x.mesh)),
                str(x.batch),
                f'{x.published:g}',
                f'{predicted:.1f}',
                _off(predicted, x.published),
                str(found.micro_batch),
                str(stages),
            ]
        )
    return [
        'model',
        'data × pipe × tensor',
        'batch',
        'published',
        'predicted',
        'off',
        'micro-batch',
        'stages of a rank',
    ], rows


def simumax_rows(known: dict[str, Machine]) -> Rows:
    """Return milliseconds of a step, and GiB of the largest rank."""
    rows = []
    for x, gib in SIMUMAX:
        found = x.plan(known)
        size = max(found.peaks) / 2**30
        rows.append(
            [
                x.name,
                ' × '.join(map(str, x.mesh)),
                f'{x.published}',
                f'{found.seconds * 1e3:.1f}',
                _off(found.seconds * 1e3, x.published),
                *(['', '', ''] if gib is None else [f'{gib}', f'{size:.2f}', _off(size, gib)]),
            ]
        )
    return [
        'model',
        'data × pipe × tensor',
        'published, ms',
        'predicted, ms',
        'off',
        'published, GiB',
        'predicted, GiB',
        'off',
    ], rows


def other_rows(known: dict[str, Machine]) -> Rows:
    """Return tokens/s of a GPU."""
    rows = []
    for x, note in _others():
        predicted = x.batch * x.model.length / x.plan(known).seconds / x.devices
        rows.append(
            [
                x.name,
                f'{x.devices} {x.machine}',
                ' × '.join(map(str, x.mesh)),
                f'{x.published:.0f}',
                f'{predicted:.0f}',
                _off(predicted, x.published),
                note,
            ]
        )
    return [
        'training',
        'devices',
        'data × pipe × tensor',
        'published, tokens/s',
        'predicted',
        'off',
        'assumptions',
    ], rows


def place_rows(trainings: Sequence[Training], known: dict[str, Machine]) -> Rows:
    """Return the places of published meshes among all factorisations of their devices."""
    rows = []
    for x in tqdm(trainings, 'places', leave=False):
        best = plan(
            x.model, mesh=x.devices, **{**x.options, 'machine': known[x.machine], 'batch': x.batch}
        )
        order = [best, *best.runners_up]
        number = len(order) + len(best.refused)
        names = [tuple(each.mesh.values()) for each in order]
        place = names.index(x.mesh) + 1 if x.mesh in names else None
        own = order[place - 1] if place else None
        rows.append(
            [
                x.name,
                ' × '.join(map(str, x.mesh)),
                f'{place} of {number}' if place else f'none of {number}',
                f'{place / number:.1%}' if place else '',
                best.name,
                f'{own.seconds / best.seconds - 1:.1%}' if own else '',
            ]
        )
    return ['model', 'data × pipe × tensor', 'place', 'of all', 'first', 'slower than it'], rows


def chosen_rows() -> Rows:
    """Return the plans of some models for H100, for steps of four million tokens."""
    rows = []
    cases = [
        (name, model, devices)
        for name, model in (
            ('GPT-2 XL', GPT2_XL),
            ('Llama 3 8B', LLAMA_8B),
            ('Llama 3 70B', LLAMA_70B),
            ('GPT-3 175B', GPT3),
        )
        for devices in (8, 64, 512, 4096)
    ]
    for name, model, devices in tqdm(cases, 'plans', leave=False):
        batch = 2**22 // model.length
        try:
            found = plan(model, mesh=devices, machine='H100', batch=batch)
        except ValueError as error:
            rows.append([name, str(devices), 'none: ' + _smallest(str(error)), *[''] * 6])
            continue
        rate = batch * model.length / found.seconds / devices
        rows.append(
            [
                name,
                str(devices),
                ' × '.join(map(str, found.mesh.values())),
                found.schedule,
                f'{found.micro_batch}',
                found.recomputation,
                found.data,
                format_bytes(max(found.bytes.values())),
                f'{rate:.0f} ({model.flops(batch) / found.seconds / devices / 989e12:.0%})',
            ]
        )
    return [
        'model',
        'H100',
        'data × pipe × tensor',
        'schedule',
        'micro-batch',
        'recomputation',
        'parameters',
        'memory',
        'tokens/s of a GPU (MFU)',
    ], rows


def _smallest(text: str) -> str:
    """Return the least memory that a mesh would take, from the error of a plan."""
    sizes = [line.split(' takes ')[1] for line in text.splitlines() if ' takes ' in line]
    return min(
        sizes, key=lambda each: float(each.split('GiB')[0].split()[-1]) if 'GiB' in each else 1e9
    )


def text(known: dict[str, Machine], places: Rows, chosen: Rows) -> str:
    """Write the page."""
    a100, h100, b200 = (known[name] for name in ('A100', 'H100', 'B200'))
    part = h100.bandwidth / MACHINES['H100'].bandwidth
    return f"""# Plans against published trainings

<!-- Written by `python -m benchmarks plans`; do not edit. -->

[`plan`](guide/planning.md#a-mesh) predicts the time and the memory of a step on a mesh. This page
compares predictions with published trainings. One constant of each machine is fitted on one row;
everything else is a prediction. FLOPs are matrix products with attention to all tokens; only in
the table of Narayanan et al. do they include the recomputation.

| machine | constant | value | fitted on |
| --- | --- | --: | --- |
| A100 80 GB | share of the peak that large products reach | \
{max(x for _, x in a100.shares):.3f} | \
Korthikanti et al., 22B, selective |
| H100 | speed of attention and of operations on elements, relative to the measured one | \
{part:.3f} | Megatron-Core, 1.7B |
| B200 | share of the peak that large products reach | {max(x for _, x in b200.shares):.3f} | \
SimuMax, first row |

## Korthikanti et al. (2022): seconds of an iteration on A100

Tensor parallel 8, sequence parallel with selective recomputation only. Gradients are not reduced.

{markdown(korthikanti_rows(known))}

## Korthikanti et al. (2022): memory of a GPU

The paper counts parameters and activations of blocks. So the table has the parameters of a rank in
the middle of the pipeline, and the activations of the first rank without the head. Messages are
not counted in either figure.

{markdown(memory_rows(known))}

## SimuMax 1.2: eight B200

{markdown(simumax_rows(known))}

## Megatron-Core 0.8: TFLOP/s of an H100

Micro-batches and stages are not published; the fastest ones that the plan finds are assumed.
Collectives along the data axis run concurrently with computation, those along the tensor axis do
not.

{markdown(tflops_rows(MEGATRON_CORE, known, False))}

## Narayanan et al. (2021): TFLOP/s of an A100, with the recomputation

Micro-batches and stages are not published; the fastest ones that the plan finds are assumed. No
row of this table was used for a fit.

{markdown(tflops_rows(NARAYANAN, known, True))}

## Further trainings: tokens/s of a GPU

{markdown(other_rows(known))}

FSDP gathers each layer in each forward and backward; the plan gathers once per step, concurrently.
Not predicted: mixtures of experts (DeepSeek-V3, Qwen3), context parallelism (8B and 405B of
Megatron, Llama 3 with long sequences), offloaded optimizers, ZeRO-3 on A100 with a sequence length
of 512, and trainings whose mesh is not published.

## Places of published meshes

The place of each published mesh among all factorisations of its devices, by the best plan of each.
Meshes that do not fit count as last.

{markdown(places)}

Four meshes of 2021, from 3.6B to 39.1B, are not among the first tenth. They have tensor
parallelism of up to a whole host before any pipeline. For these widths, the plan predicts that
interleaved stages of fewer tensor ranks are 8 to 25 % faster, because messages between stages cost
less than collectives in each layer.

## Plans for H100

For steps of 2²² tokens on H100 as measured, with Adam of mixed precision. MFU is relative to
989 TFLOP/s.

{markdown(chosen)}
"""


@click.command()
def plans() -> None:
    """Compare plans with published trainings, and write docs/plans.md: some minutes."""
    known = machines()
    places = place_rows(
        [*(x for x in KORTHIKANTI if 'selective' in x.name), *NARAYANAN, *MEGATRON_CORE], known
    )
    PAGE.write_text(text(known, places, chosen_rows()))
    click.echo(PAGE)


COMMANDS = [plans]
