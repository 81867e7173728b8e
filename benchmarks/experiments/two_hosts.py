"""A GPT on two hosts with a slow link between them: the time of each mesh, beside its plan.

::

    data 2 × pipe 2, data over the link         pipe over the link

    host 0    pipe 0 ── pipe 1   data 0         host 0    data 0 ── data 1   pipe 0
                 ║ link ║                                    ║ link ║
    host 1    pipe 0 ── pipe 1   data 1         host 1    data 0 ── data 1   pipe 1
"""

import re
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean, median
from subprocess import CalledProcessError
from typing import Any, NamedTuple

import click
from tqdm import tqdm

from benchmarks.experiments.scaling.meshes import TORCHGPIPE, Contender, Mesh, Work
from benchmarks.experiments.scaling.worker import Worker
from benchmarks.harness.hosts import Network, on_hosts, why_not
from benchmarks.harness.options import count_option, distinct, output_option
from benchmarks.harness.report import Part, Rows, Section
from benchmarks.harness.timing import (
    check_losses,
    one_thread,
    order_of_round,
    quartiles,
    rounds_option,
)
from torchgpipe.balance import Profile, profile
from torchgpipe.base.devices import CPU
from torchgpipe.plan import Link, Machine, MeshPlan, ParameterBytes, plan
from torchgpipe.trainer.config import require
from torchgpipe.trainer.files import output_folder
from torchgpipe.trainer.gpt import Sizes
from torchgpipe.trainer.launch import available_cores
from torchgpipe.trainer.measuring import Ring, RingCosts, measure_machine
from torchgpipe.trainer.processes import Processes, seconds

#: The hosts of a network.
HOSTS = 2

#: The rate of a link without a limit, as an option.
UNLIMITED = 'none'

#: Bytes of a parameter and its gradient, without the state of an optimizer.
SGD = ParameterBytes(4, 4, 0)

#: The bytes of a collective by which the link is measured: about as many as the gradients.
LARGE = 2**23


class Spread(NamedTuple):
    """A mesh on two hosts."""

    mesh: Mesh
    #: The axis whose neighbours are on different hosts.
    over: str

    @property
    def name(self) -> str:
        """The mesh in words."""
        return str(self.mesh)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the plan, from the outermost one, which is over the link."""
        inner = [axis for axis in self.mesh.axes if axis != self.over]
        return (self.over, *inner)

    @property
    def hosts(self) -> tuple[int, ...]:
        """The number of the host of each rank. The mesh of the ranks has the default axes."""
        ranks = range(self.mesh.size)
        if self.over == 'data':
            return tuple(rank // self.mesh.pipe for rank in ranks)
        return tuple(rank % self.mesh.pipe for rank in ranks)


#: The meshes that are measured.
SPREADS = (
    Spread(Mesh(2), 'data'),
    Spread(Mesh(2, shard=True), 'data'),
    Spread(Mesh(pipe=2), 'pipe'),
    Spread(Mesh(2, 2), 'data'),
    Spread(Mesh(2, 2, shard=True), 'data'),
    Spread(Mesh(2, 2), 'pipe'),
    Spread(Mesh(2, 2, shard=True), 'pipe'),
)


#: The times of a layer in a profile.
TIMES = ('forward_seconds', 'backward_seconds', 'forward_overhead', 'backward_overhead')


class LinkedWorker(Worker, Ring):
    """A process of a mesh, which also measures its layers and its link."""

    def profile(self) -> Profile:
        """Return the costs of the layers for one micro-batch, while others measure them too."""
        x, _ = self._work.samples(0, 1)
        return profile(self._work.model(), x[: self._work.micro_batch], device=CPU)


def mean_profile(profiles: Sequence[Profile]) -> Profile:
    """Return a profile with the mean times of others of the same layers."""
    layers = []
    for same_layer in zip(*[of_rank.layers for of_rank in profiles]):
        times = {}
        for name in TIMES:
            times[name] = fmean(getattr(layer, name) for layer in same_layer)
        layers.append(replace(same_layer[0], **times))
    return replace(profiles[0], layers=tuple(layers))


def planned(
    spread: Spread,
    work: Work,
    layers: Profile,
    host: Machine,
    inside: RingCosts,
    between: RingCosts,
) -> MeshPlan:
    """Return the plan of a mesh on two hosts.

    Args:
        spread: The mesh.
        work: The model and the mini-batch.
        layers: The costs of its layers for one micro-batch, on as many ranks of a host.
        host: A host. Its links are replaced.
        inside: The collectives of two ranks of a host.
        between: The collectives over the link, which the ranks of a host share.
    """
    ranks = spread.mesh.size // HOSTS
    of_replicas = between if spread.over == 'data' else inside
    hosts = replace(
        host,
        bandwidth=host.bandwidth / ranks,
        host=inside.link,
        network=Link(between.link.latency, between.link.bandwidth / ranks),
        devices_per_host=ranks,
        gather_ratio=of_replicas.gather_ratio,
        reduce_scatter_ratio=of_replicas.reduce_scatter_ratio,
    )
    return plan(
        layers,
        mesh=spread.mesh.axes,
        machine=hosts,
        batch=work.batch,
        state=SGD,
        schedules=['1f1b'],
        micro_batches=[work.micro_batch],
        recomputations=['none'],
        shardings=['shard' if spread.mesh.shard else 'replicate'],
        balance=work.balance(spread.mesh.pipe),
        axes=spread.axes,
    )


#: The processes of each layout: of the number of the host, by rank.
Groups = Mapping[tuple[int, ...], Processes]


def measure(work: Work, rate: str | None, rounds: int, host: Machine) -> dict[str, Any]:
    """Time steps of all meshes in turn, over a link with a rate.

    Returns:
        The link, and a row of results for each mesh.
    """
    with ExitStack() as stack:
        network = stack.enter_context(Network(rate))

        def processes(layout: Sequence[int]) -> Processes:
            hosts = [network.hosts[number] for number in layout]
            group = Processes(len(layout), LinkedWorker, work, 'cpu', **on_hosts(hosts))
            return stack.enter_context(group)

        groups = {}
        for layout in dict.fromkeys(spread.hosts for spread in SPREADS):
            groups[layout] = processes(layout)
        inside = RingCosts.of(processes([0, 0]), LARGE)
        between = RingCosts.of(groups[0, 1], LARGE)
        profiles = {}
        for layout, group in groups.items():
            profiles[layout] = mean_profile(group.call('profile'))

        total = len(SPREADS) * (1 + rounds)
        bar = stack.enter_context(tqdm(total=total, desc=rate or 'no limit', leave=False))
        sent = _build(groups, bar)
        steps = _time(groups, rounds, bar)

    rows = []
    for spread in SPREADS:
        prediction = planned(spread, work, profiles[spread.hosts], host, inside, between)
        rows.append(_row(spread, steps[spread], sent[spread], prediction))
    return {
        'rate': rate,
        'inside': _as_dict(inside),
        'between': _as_dict(between),
        'rows': rows,
    }


def _build(groups: Groups, bar: Any) -> dict[Spread, float]:
    """Make the models, and check their losses; return the bytes that each sends over the link."""
    sent = {}
    first: float | None = None
    for spread in SPREADS:
        counts = groups[spread.hosts].call('build', _contender(spread))
        loss = fmean(rank.losses[0] for rank in counts if rank.losses[0] is not None)
        check_losses({spread: loss}, first)
        first = first or loss
        sent[spread] = max(rank.sent.get(spread.over, 0.0) for rank in counts)
        bar.update()
    return sent


def _time(groups: Groups, rounds: int, bar: Any) -> dict[Spread, list[float]]:
    """Return the seconds of a step in each round, in which each mesh takes one step."""
    steps: dict[Spread, list[float]] = {spread: [] for spread in SPREADS}
    for number in range(rounds):
        losses = {}
        for spread in order_of_round(SPREADS, number):
            answers = groups[spread.hosts].call('step', _contender(spread))
            steps[spread].append(seconds(answer.span for answer in answers))
            losses[spread] = fmean(answer.loss for answer in answers if answer.loss is not None)
            bar.update()
        check_losses(losses)
    return steps


def _as_dict(measured: RingCosts) -> dict[str, Any]:
    return {**measured._asdict(), 'link': measured.link.to_dict()}


def _contender(spread: Spread) -> Contender:
    return Contender(TORCHGPIPE, spread.mesh)


def _row(
    spread: Spread, steps: Sequence[float], sent: float, prediction: MeshPlan
) -> dict[str, Any]:
    return {
        'mesh': spread.name,
        'over': spread.over,
        'shard': spread.mesh.shard,
        'measured': median(steps),
        'quartiles': quartiles(steps),
        'predicted': prediction.seconds,
        'parts': prediction.parts,
        'sent': sent,
    }


@click.command()
@click.option(
    '--rate',
    'rates',
    multiple=True,
    default=['100mbit', '400mbit', UNLIMITED],
    callback=distinct,
    help='Of the link, in the notation of tc, of at least 5mbit; or none for no limit. May be '
    'given several times.',
)
@count_option('--layers', 4, 'Blocks of the GPT.', least=2)
@count_option('--width', 256, 'Features of a token.', least=4)
@count_option('--context', 128, 'Tokens of a sequence.')
@count_option('--batch', 8, 'Sequences of a mini-batch.')
@count_option('--chunks', 4, 'Micro-batches of it.')
@rounds_option(9)
@output_option
def two_hosts(
    rates: tuple[str, ...],
    layers: int,
    width: int,
    context: int,
    batch: int,
    chunks: int,
    rounds: int,
    output: str,
) -> None:
    """Time meshes on two hosts with a slow link, beside their plans.

    The hosts are network namespaces of this machine, with one core each. It takes the right to
    make them, which root has, and iproute2. Without these, it says so and measures nothing.
    """
    require(width % 4 == 0, f'--width {width} is not a multiple of the 4 heads')
    require(
        chunks % HOSTS == 0 and batch % chunks == 0,
        f'--chunks {chunks} must divide --batch {batch}, and be a multiple of {HOSTS}',
    )
    require(len(available_cores()) >= HOSTS, f'{HOSTS} hosts take {HOSTS} cores, but there is one')
    folder = output_folder(output)
    reason = why_not()
    if reason:
        click.echo(f'skipped: {reason}')
        return
    sizes = Sizes(512, context, width, 4, layers, False)
    work = Work(sizes, batch, batch, batch // chunks)
    links = [None if rate == UNLIMITED else rate for rate in rates]
    for rate in links:
        _check_rate(rate)
    # A network would outlive a process that a signal ends at once.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))

    with one_thread():  # as in a rank
        host = measure_machine(CPU)
    results = {
        'model': sizes._asdict(),
        'batch': batch,
        'chunks': chunks,
        'rounds': rounds,
        'links': [measure(work, rate, rounds, host) for rate in links],
    }
    SECTION.publish(results, folder)


def _check_rate(rate: str | None) -> None:
    """Raise a :exc:`click.UsageError` if a rate is none, or tc does not know it."""
    require(
        rate is None or re.fullmatch(r'(?i)[0-9.]*[1-9][0-9.]*[a-z]+', rate),
        f'--rate {rate} is no rate above zero, such as 400mbit',
    )
    try:
        with Network(rate):
            return
    except CalledProcessError as error:
        raise click.UsageError(f'--rate {rate}: {error.stderr.strip()}') from None


MEANING = """All meshes have the same mini-batch. A host has one core, which its ranks share. The
plan gets the times of layers, measured on all ranks at the same time; and those of collectives
between two ranks, on a host and over the link. If a host has two ranks, each has half of the link.
The columns are:

- over the link: the axis whose neighbours are on different hosts.
- sent over it: the bytes along this axis in a step, of the rank that sends most. A collective
  counts as a ring, though Gloo's reduce-scatter sends twice as much.
- predicted, measured: the time of a step. Measured times are medians, with quartiles.
- exchanges: the part of the predicted time in which ranks wait for messages or collectives, over
  the link or on a host.

Two stages on one host take turns on its core, so their bubble is shorter than predicted."""


def link_rows(results: Mapping[str, Any]) -> Rows:
    """Return a table of all meshes, for one link."""
    header = [
        title_of(results),
        'over the link',
        'sent over it, MiB',
        'predicted, ms',
        'measured, ms',
        'predicted / measured',
        'exchanges',
    ]
    rows = []
    for row in results['rows']:
        low, high = (f'{value * 1e3:.0f}' for value in row['quartiles'])
        waits = row['parts']['data'] + row['parts']['messages']
        rows.append(
            [
                row['mesh'],
                row['over'],
                f'{row["sent"] / 2**20:.1f}',
                f'{row["predicted"] * 1e3:.0f}',
                f'{row["measured"] * 1e3:.0f} ({low} to {high})',
                f'{row["predicted"] / row["measured"]:.2f}',
                f'{waits / row["predicted"]:.0%}',
            ]
        )
    return header, rows


def title_of(results: Mapping[str, Any]) -> str:
    """Return the rate of a link, and its measured bandwidth and latency."""
    link = Link.from_dict(results['between']['link'])
    rate = results['rate'] or 'no limit'
    return f'{rate}: {link.bandwidth * 8e-6:.0f} Mbit/s, {link.latency * 1e3:.2f} ms'


def choice_rows(results: Mapping[str, Any]) -> Rows:
    """Return for each link the mesh that is fastest, and the one that the plans choose."""
    header = ['link', 'fastest', 'choice of the plan', 'its time / the fastest']
    rows = []
    for link in results['links']:
        fastest = min(link['rows'], key=lambda row: row['measured'])
        choice = min(link['rows'], key=lambda row: row['predicted'])
        rows.append(
            [
                link['rate'] or 'no limit',
                _words(fastest),
                _words(choice),
                f'{choice["measured"] / fastest["measured"]:.2f}',
            ]
        )
    return header, rows


def _words(row: Mapping[str, Any]) -> str:
    return f'{row["mesh"]}, {row["over"]} over the link'


def parts(results: Mapping[str, Any]) -> Iterable[Part]:
    """Yield the text and the tables for the documentation."""
    model = results['model']
    yield (
        f'The GPT has {model["depth"]} blocks of width {model["width"]}, {model["vocabulary"]} '
        f'words and {model["context"]} tokens per sequence, in float32, with SGD. The mini-batch '
        f'has {results["batch"]} sequences in {results["chunks"]} micro-batches. There are '
        f'{results["rounds"]} interleaved rounds. {MEANING}'
    )
    for link in results['links']:
        yield link_rows(link)
    yield choice_rows(results)


SECTION = Section('Two hosts with a slow link', 'two-hosts', parts)
COMMANDS = [two_hosts]
SECTIONS = [SECTION]
