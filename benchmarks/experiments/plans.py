"""Plans of meshes against published trainings, and the meshes that a plan would choose.

``trainings.json`` has the trainings: models by the arguments of ``Transformer``, and in groups by
source the mesh (data, pipe, tensor), the samples of a step, the published figure in the unit of
the group, and the options of the plan.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from benchmarks.harness.report import Rows, markdown
from torchgpipe.base.errors import format_bytes
from torchgpipe.plan import MACHINES, Machine, MeshPlan, Transformer, plan
from torchgpipe.plan.transformers import shares_of

PAGE = Path(__file__).parents[2] / 'docs/plans.md'

DATA = json.loads(Path(__file__).with_name('trainings.json').read_text())

Machines = dict[str, Machine]


@dataclass(frozen=True)
class Training:
    """A published training."""

    name: str
    model: Transformer
    #: The name of the machine.
    machine: str
    #: Ranks along the data, pipe and tensor axis.
    mesh: tuple[int, int, int]
    #: The samples of a step.
    batch: int
    #: The figure, in the unit of its group.
    published: float
    #: The options of the plan.
    options: dict[str, Any]
    #: The published memory of the largest rank, and of parameters and optimizer.
    memory_gib: float | None = None
    state_gib: float | None = None
    #: Assumptions of the prediction.
    note: str = ''

    def plan(self, machines: Machines) -> MeshPlan:
        """Return the plan of its mesh."""
        data, pipe, tensor = self.mesh
        return plan(
            self.model,
            mesh={'data': data, 'pipe': pipe, 'tensor': tensor},
            machine=machines[self.machine],
            batch=self.batch,
            memory_limit=1e15,
            **self.options,
        )

    @property
    def devices(self) -> int:
        """The number of its devices."""
        data, pipe, tensor = self.mesh
        return data * pipe * tensor

    @property
    def mesh_name(self) -> str:
        """The mesh in a table."""
        return ' × '.join(map(str, self.mesh))


def trainings(group: str) -> list[Training]:
    """Return the trainings of a source."""
    common = DATA[group]['options']
    result = []
    for row in DATA[group]['trainings']:
        fields = dict(row)
        fields['model'] = Transformer(**row['model'])
        fields['mesh'] = tuple(row['mesh'])
        fields['options'] = {**common, **row.get('options', {})}
        result.append(Training(**fields))
    return result


KORTHIKANTI = trainings('korthikanti')
MEMORY = trainings('korthikanti_memory')
NARAYANAN = trainings('narayanan')
MEGATRON_CORE = trainings('megatron_core')
SIMUMAX = trainings('simumax')
OTHERS = trainings('others')


def recomputed_flops(depth: int, width: int, batch: int) -> float:
    """Return the FLOPs of a step with full recomputation, by the formula of 2021."""
    tokens = batch * 2048
    products = 96 * tokens * depth * width**2
    return products * (1 + 2048 / (6 * width) + 51200 / (16 * depth * width))


def fitted(change: Callable[[float], Machine], training: Training, published: float) -> Machine:
    """Return a machine on which a training takes the published seconds, by one constant."""
    low, high = 0.2, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        seconds = training.plan({training.machine: change(middle)}).seconds
        if seconds > published:
            low = middle
        else:
            high = middle
    return change(high)


def fitted_machines() -> Machines:
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
        'B200': fitted(shares(b200), SIMUMAX[0], SIMUMAX[0].published / 1e3),
    }


def largest(machine: Machine) -> float:
    """Return the largest share of the peak that products reach."""
    return max(share for _, share in machine.shares)


def _off(predicted: float, published: float) -> str:
    return f'{100 * (predicted / published - 1):+.1f} %'


def korthikanti_rows(machines: Machines) -> Rows:
    """Return seconds of an iteration."""
    rows = []
    for training in KORTHIKANTI:
        seconds, published = training.plan(machines).seconds, training.published
        rows.append(
            [training.name, f'{published:.2f}', f'{seconds:.2f}', _off(seconds, published)]
        )
    return ['model, recomputation', 'published, s', 'predicted, s', 'off'], rows


def memory_rows(machines: Machines) -> Rows:
    """Return GiB of activations on the first rank, and of parameters on one in the middle."""
    rows = []
    for training in MEMORY:
        parts = training.plan(machines).simulation.peak_parts
        resident = parts[len(parts) // 2]['resident'] / 2**30
        activations = parts[0]['activations']
        if len(parts) == 1:
            # The only rank also has the head.
            head = training.model.profile(machines['A100'], 8, training.batch).layers[-1]
            activations -= head.activation_bytes
        activations /= 2**30
        state, published = training.state_gib, training.published
        rows.append(
            [
                training.name,
                f'{state}',
                f'{resident:.1f}',
                _off(resident, state),
                f'{published}',
                f'{activations:.1f}',
                _off(activations, published),
            ]
        )
    header = ['model, recomputation', 'parameters and optimizer, GiB', 'predicted', 'off']
    return [*header, 'activations, GiB', 'predicted', 'off'], rows


def tflops_rows(group: Sequence[Training], machines: Machines, recomputed: bool) -> Rows:
    """Return TFLOP/s of a GPU, and the settings that the plan assumes."""
    rows = []
    for training in group:
        fastest = training.plan(machines)
        model = training.model
        flops = model.flops(training.batch)
        if recomputed:
            flops = recomputed_flops(model.layers, model.width, training.batch)
        predicted = flops / fastest.seconds / training.devices / 1e12
        stages = len(fastest.balance) // training.mesh[1]
        rows.append(
            [
                training.name,
                training.mesh_name,
                str(training.batch),
                f'{training.published:g}',
                f'{predicted:.1f}',
                _off(predicted, training.published),
                str(fastest.micro_batch),
                str(stages),
            ]
        )
    header = ['model', 'data × pipe × tensor', 'batch', 'published', 'predicted', 'off']
    return [*header, 'micro-batch', 'stages of a rank'], rows


def simumax_rows(machines: Machines) -> Rows:
    """Return milliseconds of a step, and GiB of the largest rank."""
    rows = []
    for training in SIMUMAX:
        prediction = training.plan(machines)
        milliseconds, published = prediction.seconds * 1e3, training.published
        memory = ['', '', '']
        if training.memory_gib is not None:
            size = max(prediction.peaks) / 2**30
            memory = [
                f'{training.memory_gib}',
                f'{size:.2f}',
                _off(size, training.memory_gib),
            ]
        rows.append(
            [
                training.name,
                training.mesh_name,
                f'{published}',
                f'{milliseconds:.1f}',
                _off(milliseconds, published),
                *memory,
            ]
        )
    header = ['model', 'data × pipe × tensor', 'published, ms', 'predicted, ms', 'off']
    return [*header, 'published, GiB', 'predicted, GiB', 'off'], rows


def other_rows(machines: Machines) -> Rows:
    """Return tokens/s of a GPU."""
    rows = []
    for training in OTHERS:
        tokens = training.batch * training.model.length
        predicted = tokens / training.plan(machines).seconds / training.devices
        rows.append(
            [
                training.name,
                f'{training.devices} {training.machine}',
                training.mesh_name,
                f'{training.published:.0f}',
                f'{predicted:.0f}',
                _off(predicted, training.published),
                training.note,
            ]
        )
    header = ['training', 'devices', 'data × pipe × tensor', 'published, tokens/s', 'predicted']
    return [*header, 'off', 'assumptions'], rows


def place_rows(group: Sequence[Training], machines: Machines) -> Rows:
    """Return the places of published meshes among all factorisations of their devices."""
    rows = []
    for training in tqdm(group, 'places', leave=False):
        best = plan(
            training.model,
            mesh=training.devices,
            machine=machines[training.machine],
            batch=training.batch,
            **training.options,
        )
        order = [best, *best.runners_up]
        number = len(order) + len(best.refused)
        place = [f'none of {number}', '', best.name, '']
        for index, candidate in enumerate(order):
            if tuple(candidate.mesh.values()) == training.mesh:
                slower = candidate.seconds / best.seconds - 1
                rank = index + 1
                place = [f'{rank} of {number}', f'{rank / number:.1%}', best.name, f'{slower:.1%}']
        rows.append([training.name, training.mesh_name, *place])
    return ['model', 'data × pipe × tensor', 'place', 'of all', 'first', 'slower than it'], rows


def chosen_rows() -> Rows:
    """Return the plans of some models for H100, for steps of four million tokens."""
    rows = []
    for name, arguments in DATA['models'].items():
        model = Transformer(**arguments)
        for devices in tqdm((8, 64, 512, 4096), name, leave=False):
            rows.append([name, str(devices), *_chosen(model, devices)])
    header = ['model', 'H100', 'data × pipe × tensor', 'schedule', 'micro-batch']
    return [*header, 'recomputation', 'parameters', 'memory', 'tokens/s of a GPU (MFU)'], rows


def _chosen(model: Transformer, devices: int) -> list[str]:
    """Return the cells of the fastest plan for some H100."""
    batch = 2**22 // model.length
    try:
        fastest = plan(model, mesh=devices, machine='H100', batch=batch)
    except ValueError as error:
        return [f'none: {_smallest(str(error))}', *[''] * 6]
    rate = batch * model.length / fastest.seconds / devices
    mfu = model.flops(batch) / fastest.seconds / devices / 989e12
    return [
        ' × '.join(map(str, fastest.mesh.values())),
        fastest.schedule,
        f'{fastest.micro_batch}',
        fastest.recomputation,
        fastest.data,
        format_bytes(max(fastest.bytes.values())),
        f'{rate:.0f} ({mfu:.0%})',
    ]


def _smallest(text: str) -> str:
    """Return the least memory that a mesh would take, from the error of a plan."""
    sizes = [line.split(' takes ')[1] for line in text.splitlines() if ' takes ' in line]

    def gib(size: str) -> float:
        number, _, _ = size.partition('GiB')
        return float(number.split()[-1]) if 'GiB' in size else 1e9

    return min(sizes, key=gib)


def text(machines: Machines, places: Rows, chosen: Rows) -> str:
    """Write the page."""
    a100, h100, b200 = (machines[name] for name in ('A100', 'H100', 'B200'))
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
{largest(a100):.3f} | \
Korthikanti et al., 22B, selective |
| H100 | speed of attention and of operations on elements, relative to the measured one | \
{part:.3f} | Megatron-Core, 1.7B |
| B200 | share of the peak that large products reach | {largest(b200):.3f} | \
SimuMax, first row |

## Korthikanti et al. (2022): seconds of an iteration on A100

Tensor parallel 8, sequence parallel with selective recomputation only. Gradients are not reduced.

{markdown(korthikanti_rows(machines))}

## Korthikanti et al. (2022): memory of a GPU

The paper counts parameters and activations of blocks. So the table has the parameters of a rank in
the middle of the pipeline, and the activations of the first rank without the head. Messages are
not counted in either figure.

{markdown(memory_rows(machines))}

## SimuMax 1.2: eight B200

{markdown(simumax_rows(machines))}

## Megatron-Core 0.8: TFLOP/s of an H100

Micro-batches and stages are not published; the fastest ones that the plan finds are assumed.
Collectives along the data axis run concurrently with computation, those along the tensor axis do
not.

{markdown(tflops_rows(MEGATRON_CORE, machines, False))}

## Narayanan et al. (2021): TFLOP/s of an A100, with the recomputation

Micro-batches and stages are not published; the fastest ones that the plan finds are assumed. No
row of this table was used for a fit.

{markdown(tflops_rows(NARAYANAN, machines, True))}

## Further trainings: tokens/s of a GPU

{markdown(other_rows(machines))}

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
    """Compare plans with published trainings, and write docs/plans.md: half an hour."""
    machines = fitted_machines()
    selective = [training for training in KORTHIKANTI if 'selective' in training.name]
    places = place_rows([*selective, *NARAYANAN, *MEGATRON_CORE], machines)
    PAGE.write_text(text(machines, places, chosen_rows()))
    click.echo(PAGE)


COMMANDS = [plans]
