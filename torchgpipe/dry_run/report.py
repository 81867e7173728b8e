"""The report of a dry run: memory, work and traffic of each rank, as data, text and picture.

The memory of a rank::

    parameters   buffers   optimizer │ gradients   activations   messages   gathered
    ───────── all the time ───────── │ ─────────── at the peak of a step ───────────
"""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from torchgpipe.base.errors import format_bytes, table
from torchgpipe.base.html import figure_as_html, text_as_html
from torchgpipe.base.settings import AXES
from torchgpipe.dry_run.counters import Entry
from torchgpipe.schedule import Action
from torchgpipe.schedule.messages import Item, Send

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: The kinds of memory of a rank, in the order of the report.
KINDS = ('parameters', 'gradients', 'optimizer', 'buffers', 'activations', 'messages', 'gathered')


class Kept(NamedTuple):
    """A tensor that a rank keeps from step to step.

    Args:
        splits: The axes of the mesh along which it is split, each with the dimension. An axis
            splits the parts that the axes before it have left.
    """

    kind: str
    name: str
    #: The shape of the whole tensor.
    shape: tuple[int, ...]
    #: The bytes of an element.
    itemsize: int
    splits: tuple[tuple[str, int], ...]

    def part(self, sizes: Mapping[str, int], at: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the part of one rank."""
        shape = [*self.shape]
        for axis, dim in self.splits:
            part = -(-shape[dim] // sizes[axis])
            shape[dim] = max(0, min(part, shape[dim] - at[axis] * part))
        return tuple(shape)


class Account(NamedTuple):
    """The account of the ranks at one place along the pipe axis."""

    stages: tuple[int, ...]
    row: tuple[tuple[Item | None, Entry], ...]
    kept: tuple[Kept, ...]
    groups: Mapping[str, str]
    names: Mapping[str, str]

    def peak(self) -> dict[str, int]:
        """Return the memory at the peak of a step, by kind."""
        now = messages = gathered = most = 0
        found = {'step': 0, 'messages': 0, 'gathered': 0}
        for _, entry in self.row:
            if now + entry.peak >= most:
                most = now + entry.peak
                found = {
                    'step': most,
                    'messages': messages + max(0, entry.messages),
                    'gathered': gathered + max(0, entry.gathered),
                }
            now += entry.bytes
            messages += entry.messages
            gathered += entry.gathered
        return found


class RankMemory(NamedTuple):
    """The memory of one rank in bytes.

    Args:
        rank: Its number among all processes.
        data, pipe, tensor: Its position along the axes.
        parameters: Its parameters, or its parts of them.
        gradients: The gradients after a step.
        optimizer: The state of the optimizer.
        buffers: The buffers.
        activations: At the peak of a step, all that is in no other column: tensors that autograd
            saves, inputs of recomputations, and temporary tensors.
        messages: At this peak, the messages in flight, also received ones that no cell has used.
        gathered: At this peak, the gathered parameters of ``data='shard'``.
        total: The sum on the device. With an offload policy, parameters, gradients and optimizer
            are on the host, and are not in it.
    """

    rank: int
    data: int
    pipe: int
    tensor: int
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    messages: int
    gathered: int
    total: int


class StageWork(NamedTuple):
    """The work of a stage in a step, on one of the ranks that share it.

    Args:
        stage: The stage.
        pipe: Its place along the pipe axis.
        layers: The number of layers.
        forward_flops: The floating-point operations of forward.
        backward_flops: The floating-point operations of backward and recomputations.
    """

    stage: int
    pipe: int
    layers: int
    forward_flops: int
    backward_flops: int


class Traffic(NamedTuple):
    """Equal messages or collectives in a step.

    Args:
        axis: The axis of the mesh along which they go; ``'all'`` for all ranks.
        operation: ``'send'``, ``'send of a tied parameter'``, or the collective.
        source: The place along the pipe axis of the ranks that send.
        target: For a message, the place of the ranks that receive.
        bytes: The size of one.
        times: How many each of these ranks has in a step.
        link: ``'host'`` within one host, ``'network'`` between hosts, '' if hosts are not known.
    """

    axis: str
    operation: str
    source: int
    target: int | None
    bytes: int
    times: int
    link: str


@dataclass(frozen=True)
class DryRun:
    """The needs of each rank of a mesh; :func:`~torchgpipe.distributed.dry_run` makes it.

    Attributes:
        mesh: The sizes of the axes.
        balance: The number of layers of each stage.
        places: The place along the pipe axis of each stage.
        micro_batches: The number of micro-batches of a replica.
        offloads: Whether parameters, gradients and optimizer state are on the host.
        devices_per_host: The number of devices of a host, if it is known.
        memory_limit: The memory of a device in bytes, if it is known.
        axes: The axes of the mesh, from the outermost one.
    """

    mesh: Mapping[str, int]
    balance: tuple[int, ...]
    places: tuple[int, ...]
    micro_batches: int
    # The account of each place along the pipe axis.
    accounts: tuple[Account, ...]
    offloads: bool = False
    devices_per_host: int | None = None
    memory_limit: float | None = None
    axes: tuple[str, ...] = AXES

    @cached_property
    def ranks(self) -> tuple[RankMemory, ...]:
        """The memory of each rank, in the order of ranks."""
        kept = lru_cache(maxsize=None)(self._kept)
        peaks = [account.peak() for account in self.accounts]
        first = {id(account.kept): pipe for pipe, account in reversed([*enumerate(self.accounts)])}
        found = []
        for rank in range(prod(self.mesh.values())):
            at = self._position(rank)
            bytes = kept(first[id(self.accounts[at['pipe']].kept)], at['data'], at['tensor'])
            found.append(self._memory(rank, at, bytes, peaks[at['pipe']]))
        return tuple(found)

    @cached_property
    def totals(self) -> dict[str, int]:
        """The memory of all ranks together, in bytes, by kind."""
        return {
            kind: sum(getattr(each, kind) for each in self.ranks) for kind in (*KINDS, 'total')
        }

    def _position(self, rank: int) -> dict[str, int]:
        """Return the position of a rank along each axis."""
        at = dict.fromkeys(AXES, 0)
        for axis in reversed(self.axes):
            rank, at[axis] = divmod(rank, self.mesh[axis])
        return at

    def _rank_at(self, data: int, pipe: int, tensor: int) -> int:
        at = {'data': data, 'pipe': pipe, 'tensor': tensor}
        rank = 0
        for axis in self.axes:
            rank = rank * self.mesh[axis] + at[axis]
        return rank

    def _kept(self, pipe: int, data: int, tensor: int) -> dict[str, int]:
        at = {'data': data, 'pipe': pipe, 'tensor': tensor}
        found = dict.fromkeys(KINDS[:4], 0)
        for each in self.accounts[pipe].kept:
            found[each.kind] += prod(each.part(self.mesh, at)) * each.itemsize
        return found

    def _memory(
        self, rank: int, at: Mapping[str, int], kept: Mapping[str, int], peak: Mapping[str, int]
    ) -> RankMemory:
        on_device = 0 if self.offloads else kept['gradients']
        rest = peak['step'] - peak['messages'] - peak['gathered'] - on_device
        always = kept['buffers'] + (0 if self.offloads else kept['parameters'] + kept['optimizer'])
        return RankMemory(
            rank,
            **at,
            **kept,
            activations=max(0, rest),
            messages=peak['messages'],
            gathered=peak['gathered'],
            total=always + peak['step'],
        )

    @cached_property
    def stages(self) -> tuple[StageWork, ...]:
        """The work of each stage."""
        flops = Counter[tuple[int, bool]]()
        for account in self.accounts:
            for item, entry in account.row:
                if isinstance(item, Action):
                    flops[item.stage, item.kind == 'F'] += entry.flops
        return tuple(
            StageWork(j, pipe, self.balance[j], flops[j, True], flops[j, False])
            for j, pipe in enumerate(self.places)
        )

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a rank's parameters, or of its parts of them, by name."""
        at = self._position(rank)
        account = self.accounts[at['pipe']]
        return {
            account.names.get(each.name, each.name): each.part(self.mesh, at)
            for each in account.kept
            if each.kind == 'parameters'
        }

    def messages(self, rank: int) -> list[tuple[int, int]]:
        """Return the messages that a rank sends in a step, in order: receiver and bytes."""
        return [(to, bytes) for _, to, bytes in self._sends(rank)]

    def _sends(self, rank: int) -> Iterator[tuple[str, int, int]]:
        """Yield the messages of a rank: their kind, receiver and bytes."""
        at = self._position(rank)
        for item, entry in self.accounts[at['pipe']].row:
            for to, bytes in entry.sent:  # The rank that has run may stand for another place.
                place = (
                    self.places[item.stage]
                    if isinstance(item, Send)
                    else self._position(to)['pipe']
                )
                yield (
                    'send' if item else 'send of a tied parameter',
                    self._rank_at(at['data'], place, at['tensor']),
                    bytes,
                )

    def collectives(self, rank: int) -> list[tuple[str, str, int]]:
        """Return the collectives of a rank in a step, in order: operation, axis and bytes."""
        account = self.accounts[self._position(rank)['pipe']]
        return [
            (each.name.strip('_'), account.groups[each.group], each.bytes)
            for _, entry in account.row
            for each in entry.collectives
        ]

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        """The messages and collectives of a step, as the ranks of the first replica see them.

        Their link is the slowest one of all replicas.
        """
        found = []
        for pipe in range(self.mesh['pipe']):
            rank = self._rank_at(0, pipe, 0)
            for (kind, to, bytes), count in Counter(self._sends(rank)).items():
                target = self._position(to)['pipe']
                pairs = [
                    [self._rank_at(data, pipe, tensor), self._rank_at(data, target, tensor)]
                    for data in range(self.mesh['data'])
                    for tensor in range(self.mesh['tensor'])
                ]
                found.append(Traffic('pipe', kind, pipe, target, bytes, count, self._link(pairs)))
            for (name, axis, bytes), count in Counter(self.collectives(rank)).items():
                found.append(
                    Traffic(
                        axis, name, pipe, None, bytes, count, self._link(self._along(axis, pipe))
                    )
                )
        return tuple(found)

    def _along(self, axis: str, pipe: int) -> Iterator[Sequence[int]]:
        """Yield the groups of ranks along an axis, with ranks of a place."""
        if axis == 'all':
            yield range(prod(self.mesh.values()))
            return
        sizes = {**self.mesh, axis: 1}
        for data, tensor in product(range(sizes['data']), range(sizes['tensor'])):
            at = {'data': data, 'pipe': pipe, 'tensor': tensor}
            yield [self._rank_at(**{**at, axis: k}) for k in range(self.mesh[axis])]

    def _link(self, groups: Iterable[Sequence[int]]) -> str:
        """Return the slowest link within any of the groups."""
        if self.devices_per_host is None:
            return ''
        for ranks in groups:
            if len({rank // self.devices_per_host for rank in ranks}) > 1:
                return 'network'
        return 'host'

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """The places whose ranks need more than the memory limit, each with its largest part."""
        limit = self.memory_limit
        found = []
        over = [] if limit is None else [each for each in self.ranks if each.total > limit]
        for pipe, each in groupby(sorted(over, key=_pipe), _pipe):
            ranks = [*each]
            worst = max(ranks, key=lambda rank: rank.total)
            largest = max(KINDS, key=lambda kind: int(getattr(worst, kind)))
            assert limit is not None
            found.append(
                f'rank {worst.rank} (pipe {pipe}'
                + (f', and {len(ranks) - 1} others there' if len(ranks) > 1 else '')
                + f') needs {format_bytes(worst.total)}, {format_bytes(worst.total - limit)} more '
                f'than the limit of {format_bytes(limit)}: {largest} take the most, '
                f'{format_bytes(getattr(worst, largest))}'
            )
        return tuple(found)

    @cached_property
    def uneven(self) -> tuple[str, ...]:
        """The differences between places and between ranks that cost time or memory."""
        found = []
        flops = Counter[int]()
        for stage in self.stages:
            flops[stage.pipe] += stage.forward_flops + stage.backward_flops
        most = max(flops, key=lambda k: flops[k])
        least = min(flops, key=lambda k: flops[k])
        if flops[most] > 1.05 * flops[least]:
            mean = sum(flops.values()) / len(flops)
            found.append(
                f'pipe {most} has {flops[most] / max(1, flops[least]):.2f} times the '
                f'FLOPs of pipe {least}, and {flops[most] / mean:.2f} times the mean'
            )
        large = max(self.ranks, key=_total)
        small = min(self.ranks, key=_total)
        if large.total > 1.05 * small.total:
            found.append(
                f'rank {large.rank} (pipe {large.pipe}) needs '
                f'{large.total / max(1, small.total):.2f} times the memory of rank '
                f'{small.rank} (pipe {small.pipe})'
            )
        for pipe in range(self.mesh['pipe']):
            ranks = [rank for rank in self.ranks if rank.pipe == pipe]
            sizes = {rank.parameters for rank in ranks}
            if len(sizes) > 1:
                found.append(
                    f'ranks at pipe {pipe} have {format_bytes(min(sizes))} to '
                    f'{format_bytes(max(sizes))} of parameters, as a dimension is no '
                    'multiple of an axis'
                )
        return tuple(found)

    # Text, data and picture.

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return {
            'mesh': dict(self.mesh),
            'axes': [*self.axes],
            'balance': [*self.balance],
            'places': [*self.places],
            'micro_batches': self.micro_batches,
            'ranks': [each._asdict() for each in self.ranks],
            'totals': self.totals,
            'stages': [each._asdict() for each in self.stages],
            'traffic': [each._asdict() for each in self.traffic],
            'uneven': [*self.uneven],
            'problems': [*self.problems],
        }

    def __str__(self) -> str:
        size = prod(self.mesh.values())
        axes = ' × '.join(f'{name} {number}' for name, number in self.mesh.items())
        parts = [
            f'{size:,} ranks: {axes}; {self.micro_batches} micro-batches',
            '\n'.join(self._memory_table()),
            '\n'.join(self._traffic_table()),
        ]
        for title, lines in (('uneven', self.uneven), ('problems', self.problems)):
            if lines:
                parts.append('\n'.join([f'{title}:', *(f'  {line}' for line in lines)]))
        return '\n\n'.join(parts)

    def _memory_table(self) -> list[str]:
        """Return a line for each place, or for several equal places after each other."""
        kinds = [kind for kind in KINDS if any(getattr(each, kind) for each in self.ranks)]
        largest: dict[int, RankMemory] = {}
        for each in self.ranks:
            if each.pipe not in largest or each.total > largest[each.pipe].total:
                largest[each.pipe] = each
        flops = Counter[int]()
        for stage in self.stages:
            flops[stage.pipe] += stage.forward_flops + stage.backward_flops
        cells = [
            [
                ','.join(map(str, [j for j, at in enumerate(self.places) if at == pipe])),
                *(format_bytes(getattr(each, kind)) for kind in (*kinds, 'total')),
                f'{flops[pipe] / 1e12:,.3g}',
            ]
            for pipe, each in sorted(largest.items())
        ]
        rows = [
            [*_span(pipes, [cells[pipe][0] for pipe in pipes]), *values]
            for pipes, values in _runs([each[1:] for each in cells])
        ]
        rows.append(
            ['all ranks', '', *(format_bytes(self.totals[kind]) for kind in (*kinds, 'total')), '']
        )
        return table(['pipe', 'stages', *kinds, 'total', 'TFLOP'], rows).split('\n')

    def _traffic_table(self) -> list[str]:
        """Return a line for each kind of traffic, with the places that have it."""
        places: dict[Any, list[int]] = {}
        for each in self.traffic:
            step = None if each.target is None else each.target - each.source
            places.setdefault(
                (each.axis, each.operation, step, each.bytes, each.times, each.link), []
            ).append(each.source)
        rows = []
        for (axis, operation, step, bytes, count, link), pipes in sorted(
            places.items(), key=lambda item: (item[0][0], -item[0][3] * item[0][4])
        ):
            where = _numbers(pipes) + ('' if step is None else f' to pipe {step:+}')
            rows.append(
                [
                    f'{axis} {operation}',
                    where,
                    f'{count:,}',
                    format_bytes(bytes),
                    format_bytes(bytes * count),
                    link,
                ]
            )
        return table(['traffic of a rank', 'pipe', 'times', 'each', 'a step', 'link'], rows).split(
            '\n'
        )

    def _repr_html_(self) -> str:
        return text_as_html(str(self)) + figure_as_html(self.draw)

    def draw(self, title: str | None = None) -> 'Figure':
        """Draw the memory of each place by kind, and the bytes that places send each other.

        Raises:
            ImportError: There is no matplotlib, which the extra ``pictures`` brings.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4.5), layout='constrained')
        memory, sends = figure.subplots(1, 2, width_ratios=[3, 2])
        worst = [
            max((each for each in self.ranks if each.pipe == pipe), key=_total)
            for pipe in range(self.mesh['pipe'])
        ]
        below = [0.0] * len(worst)
        for kind in KINDS:
            values = [getattr(each, kind) / 2**30 for each in worst]
            if any(values):
                memory.bar(range(len(worst)), values, bottom=below, label=kind)
            below = [one + other for one, other in zip(below, values)]
        if self.memory_limit is not None:
            memory.axhline(self.memory_limit / 2**30, color='black', label='limit')
        memory.set(xlabel='place along the pipe axis', ylabel='memory of a rank, GiB')
        memory.legend(fontsize='small')
        size = self.mesh['pipe']
        bytes = [[0.0] * size for _ in range(size)]
        for each in self.traffic:
            if each.target is not None:
                bytes[each.source][each.target] += each.bytes * each.times / 2**30
        image = sends.imshow(bytes, cmap='Blues')
        sends.set(xlabel='to place', ylabel='from place', title='messages in a step, GiB')
        figure.colorbar(image, ax=sends)
        for axis in (memory.xaxis, sends.xaxis, sends.yaxis):
            axis.get_major_locator().set_params(integer=True)
        if title is not None:
            figure.suptitle(title)
        return figure

    def save(self, path: str | os.PathLike[str], title: str | None = None) -> None:
        """Draw the report into a file, ``….svg`` or ``….png``.

        Raises:
            ImportError: There is no matplotlib, which the extra ``pictures`` brings.
        """
        self.draw(title).savefig(path)


def _total(rank: RankMemory) -> int:
    return rank.total


def _pipe(rank: RankMemory) -> int:
    return rank.pipe


def _runs(rows: Sequence[Any]) -> Iterator[tuple[list[int], Any]]:
    """Yield each run of equal rows: their numbers, and the row."""
    for row, each in groupby(enumerate(rows), lambda pair: pair[1]):
        yield [k for k, _ in each], row


def _span(numbers: Sequence[int], names: Sequence[str]) -> tuple[str, str]:
    """Return the text of consecutive places, and of their stages."""
    if len(numbers) == 1:
        return str(numbers[0]), names[0]
    return f'{numbers[0]}–{numbers[-1]}', f'{names[0]} … {names[-1]}'


def _numbers(numbers: Sequence[int]) -> str:
    """Return the text of numbers, with runs as ranges.

    >>> _numbers([0, 1, 2, 5])
    '0–2, 5'
    """
    runs: list[list[int]] = []
    for number in sorted({*numbers}):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ', '.join(_span(run, [''] * len(run))[0] for run in runs)
