"""A GPT on meshes of processes: speed, memory and traffic of each axis, beside plain PyTorch."""

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click
import torch
from tqdm import tqdm

from benchmarks.experiments.scaling.meshes import (
    ALONE,
    MESHES,
    TORCHGPIPE,
    Contender,
    Mesh,
    SmallLayers,
    Work,
)
from benchmarks.experiments.scaling.tables import KINDS, panels, parts
from benchmarks.experiments.scaling.worker import COUNTED, Answer, Counts, Worker
from benchmarks.harness.options import choices_option, count_option, output_option
from benchmarks.harness.report import Section, chosen_options
from benchmarks.harness.timing import check_losses, order_of_round, quartiles, rounds_option
from torchgpipe.base.devices import accelerator, accelerators
from torchgpipe.trainer.config import require
from torchgpipe.trainer.files import output_folder
from torchgpipe.trainer.gpt import Sizes
from torchgpipe.trainer.launch import available_cores
from torchgpipe.trainer.processes import Processes, seconds

#: Steps that are recorded for a bubble. They are the last steps before the rounds. The ranks of a
#: DistributedGPipe compare their parameters in steps 0, 1, 2, 4, 8, …, so mostly before them.
RECORDED = 3


class Measurements(NamedTuple):
    """The answers of processes, by contender, for each step.

    Attributes:
        reference: The loss of the mini-batch before the first step, in one process.
        counts: The counts of the first steps.
        recorded: The steps with a bubble.
        runs: The timed steps.
    """

    reference: float
    counts: dict[Contender, list[Counts]]
    recorded: list[dict[Contender, list[Answer]]]
    runs: list[dict[Contender, list[Answer]]]


def measure(
    work: Work, contenders: Sequence[Contender], rounds: int, device: str, title: str
) -> list[dict[str, Any]]:
    """Let contenders with an equal number of processes take steps in turn.

    Args:
        work: The model and the mini-batch.
        contenders: The contenders; the first one is the loop in one process.
        rounds: The number of rounds.
        device: The type of the processes' devices.
        title: The title of the progress bar.

    Returns:
        A row of results for each contender.
    """
    measurements = take_steps(work, contenders, rounds, device, title)
    # A loop with another mini-batch has another loss.
    same = [one for one in contenders if one != ALONE or work.alone == work.batch]
    check_measurements(measurements, same)

    times = []
    for run in measurements.runs:
        times.append({})
        for contender, answers in run.items():
            times[-1][contender] = seconds(answer.span for answer in answers)
    peaks = {}
    for contender, counts in measurements.counts.items():
        peaks[contender] = max(rank.peak for rank in counts)

    rows = []
    for contender in contenders:
        row = _row(contender, times, work)
        row['memory'] = peaks[contender]
        row['against'] = _against(contender, times, peaks)
        row['sent'] = _sent(measurements.counts[contender])
        row['bubble'] = _bubble([run[contender] for run in measurements.recorded])
        rows.append(row)
    return rows


def take_steps(
    work: Work, contenders: Sequence[Contender], rounds: int, device: str, title: str
) -> Measurements:
    """Return the answers of processes in all steps, as in :func:`measure`."""
    n = contenders[-1].mesh.size
    cores = range(n) if device == 'cpu' else None
    total = len(contenders) * (1 + RECORDED + rounds)
    bar = tqdm(total=total, desc=title, leave=False)
    with bar, Processes(n, Worker, work, device, device=device, cores=cores) as processes:

        def call(name: str, order: Sequence[Contender]) -> dict[Contender, list[Any]]:
            """Call a method for each contender; return the answers of the processes in it."""
            answers = {}
            for contender in order:
                results = processes.call(name, contender)
                answers[contender] = [result for result in results if result is not None]
                bar.update()
            return answers

        return Measurements(
            processes.call('reference')[0],
            call('build', contenders),
            [call('record', contenders) for _ in range(RECORDED)],
            [call('step', order_of_round(contenders, k)) for k in range(rounds)],
        )


def check_measurements(measurements: Measurements, contenders: Sequence[Contender]) -> None:
    """Check that contenders have the same losses in all steps."""
    for k in range(COUNTED):
        losses = {}
        for contender in contenders:
            counts = measurements.counts[contender]
            losses[contender.name] = _mean(rank.losses[k] for rank in counts)
        check_losses(losses, None if k else measurements.reference)
    for run in (*measurements.recorded, *measurements.runs):
        losses = {}
        for contender in contenders:
            losses[contender.name] = _mean(answer.loss for answer in run[contender])
        check_losses(losses)


def _mean(losses: Iterable[float | None]) -> float:
    """Return the loss of the mini-batch from the losses of processes that have one."""
    return fmean(loss for loss in losses if loss is not None)


def _sent(counts: Sequence[Counts]) -> dict[str, float]:
    """Return the bytes that a rank sends in a step, by axis; of the rank that sends most."""
    most: dict[str, float] = {}
    for rank in counts:
        for axis, size in rank.sent.items():
            most[axis] = max(size, most.get(axis, 0.0))
    return most


def _bubble(recorded: Sequence[Sequence[Answer]]) -> float | None:
    bubbles = [answers[0].bubble for answers in recorded if answers[0].bubble is not None]
    return median(bubbles) if bubbles else None


Times = Sequence[Mapping[Contender, float]]


def _row(contender: Contender, times: Times, work: Work) -> dict[str, Any]:
    """Return the times of a contender, and its speed-up in each round."""
    mesh, alone = contender.mesh, work._replace(batch=work.alone)
    work = alone if contender == ALONE else work
    time = median(run[contender] for run in times)
    speed_up = median(run[ALONE] / run[contender] for run in times) * work.tokens / alone.tokens
    return {
        'name': contender.name,
        'library': contender.library,
        **mesh._asdict(),
        'processes': mesh.size,
        'cores_per_rank': min(1, len(available_cores()) / mesh.size),
        'chunks': work.chunks(mesh.data),
        'seconds': time,
        'tokens_per_second': work.tokens / time,
        'speed_up': speed_up,
        'share': speed_up / mesh.size,
    }


def _against(
    contender: Contender, times: Times, peaks: Mapping[Contender, int]
) -> dict[str, Any] | None:
    """Relate torchgpipe to PyTorch on the same mesh, if there is a contender."""
    peer = contender.peer
    if contender.library != TORCHGPIPE or peer is None or peer not in peaks:
        return None
    ratios = [run[peer] / run[contender] for run in times]
    return {
        'library': peer.library,
        'memory': peaks[contender] / peaks[peer],
        'times_as_fast': median(ratios),
        'quartiles': quartiles(ratios),
    }


@click.command()
@count_option('--layers', 4, 'Blocks of the GPT.')
@count_option('--width', 256, 'Features of a token.')
@count_option('--heads', 4, 'Heads of each block.')
@count_option('--words', 512, 'Different tokens.', least=2)
@count_option('--context', 128, 'Tokens of a sequence.')
@count_option('--batch', 8, 'Sequences of the mini-batch of one process.')
@count_option(
    '--chunks', 8, 'Micro-batches of this mini-batch. Micro-batches have one size in all cases.'
)
@choices_option('--mesh', 'meshes', MESHES)
@choices_option(
    '--kind',
    'kinds',
    KINDS,
    'strong: the same mini-batch on all meshes; weak: a mini-batch for each process; accumulated: '
    'gradients of four mini-batches are reduced once; small: 20 small layers for each process.',
)
@rounds_option(5)
@click.option(
    '--device',
    default='cpu',
    help="cpu; or the accelerators' type, such as cuda, with one device for each process.",
)
@click.option(
    '--python',
    'pythons',
    type=click.Path(exists=True, dir_okay=False),
    multiple=True,
    help='The Python of an environment with torchgpipe and another release of PyTorch, in which '
    'all is measured as well. May be given several times.',
)
@output_option
def scaling(
    layers: int,
    width: int,
    heads: int,
    words: int,
    context: int,
    batch: int,
    chunks: int,
    meshes: tuple[str, ...],
    kinds: tuple[str, ...],
    rounds: int,
    device: str,
    pythons: tuple[str, ...],
    output: str,
) -> None:
    """Time a training step of a GPT on meshes of processes.

    The model is in float32, without dropout and without a tied head. Steps are by SGD, without
    checkpoints. Each mesh is one of a DistributedGPipe. Plain PyTorch trains the same model
    by DistributedDataParallel, FSDP2 and torch.distributed.pipelining on the meshes that they are
    for. A loop in one process is the baseline. Contenders with an equal number of processes take
    steps in turn, in the same processes. Each process has one thread and one core, which it
    shares if there are more processes than cores.
    """
    sizes = Sizes(words, context, width, heads, layers, False)
    chosen = {name: MESHES[name] for name in meshes}
    _check(sizes, batch, chunks, chosen, device)
    folder = output_folder(output)
    results: dict[str, Any] = {
        'torch': torch.__version__,
        'model': sizes._asdict(),
        'batch': batch,
        'chunks': chunks,
        'device': device,
        'cores': len(available_cores()),
        'rows': [],
        'others': [],
    }
    for kind in kinds:
        suited = [mesh for mesh in chosen.values() if _is_suited(mesh, kind)]
        for n in sorted({mesh.size for mesh in suited}):
            work = _work(kind, n, Work(sizes, batch, batch, batch // chunks))
            title = f'{kind}, {n} processes'
            rows = measure(work, _contenders(n, suited), rounds, device, title)
            results['rows'] += [{'kind': kind, 'rounds': rounds, **row} for row in rows]
    for python in pythons:
        results['others'].append(_measured_by(python))
    SECTION.publish(results, folder, device != 'cpu')


def _is_suited(mesh: Mesh, kind: str) -> bool:
    """Return whether a mesh has rows of a kind."""
    if kind == 'small':
        return mesh.tensor == 1 and not mesh.shard
    return mesh.tensor == 1 or kind != 'accumulated'


def _work(kind: str, n: int, work: Work) -> Work:
    """Return the work of a kind for n processes, given the work of one."""
    if kind == 'weak':
        return work._replace(batch=work.batch * n)
    if kind == 'accumulated':
        return work._replace(accumulated=4)
    if kind == 'small':
        return SmallLayers(*work._replace(sizes=SmallLayers.sizes_for(n)))
    return work


def _measured_by(python: str) -> dict[str, Any]:
    """Run this command by the Python of another environment; return its release and its rows.

    Raises:
        click.ClickException: It has failed there.
    """
    words = chosen_options()
    while '--python' in words:
        place = words.index('--python')
        del words[place : place + 2]
    with TemporaryDirectory() as folder:
        command = [python, '-m', 'benchmarks', 'scaling', *words, '--output', folder]
        code = subprocess.run(command).returncode
        if code:
            raise click.ClickException(f'the command ended with code {code} by {python}')
        kept = json.loads((Path(folder) / 'scaling.json').read_text())
    return {'torch': kept['machine']['torch'], 'rows': kept['results']['rows']}


def _contenders(n: int, meshes: Iterable[Mesh]) -> list[Contender]:
    """Return the contenders on meshes of n processes, after the loop in one process."""
    contenders = [ALONE]
    for mesh in meshes:
        if mesh.size == n:
            contender = Contender(TORCHGPIPE, mesh)
            contenders.append(contender)
            if contender.peer:
                contenders.append(contender.peer)
    return contenders


def _check(sizes: Sizes, batch: int, chunks: int, meshes: dict[str, Mesh], device: str) -> None:
    """Check that options fit each other.

    Raises:
        click.UsageError: They do not.
    """
    require(
        sizes.width % sizes.heads == 0,
        f'--width {sizes.width} is not a multiple of --heads {sizes.heads}',
    )
    require(device in ('cpu', accelerator()), f'there are no devices of type {device}')
    require(batch % chunks == 0, f'--batch {batch} is not a multiple of --chunks {chunks}')
    for name, mesh in meshes.items():
        require(
            chunks % mesh.data == 0,
            f'--chunks {chunks} is not a multiple of the {mesh.data} replicas of {name}',
        )
        require(
            sizes.heads % mesh.tensor == 0 and sizes.vocabulary % mesh.tensor == 0,
            f'--heads {sizes.heads} or --words {sizes.vocabulary} is not a multiple of the '
            f'{mesh.tensor} ranks of {name}',
        )
        require(
            sizes.depth + 2 >= mesh.pipe,
            f'--layers {sizes.depth}, the embedding and the '
            f'head are fewer layers than the stages of {name}',
        )
        available = len(accelerators()) if device != 'cpu' else mesh.size
        require(
            mesh.size <= available,
            f'{name} takes {mesh.size} devices, but there are {available}: '
            'choose others by --mesh',
        )


SECTION = Section('A GPT on several processes', 'scaling', parts, panels)
COMMANDS = [scaling]
SECTIONS = [SECTION]
