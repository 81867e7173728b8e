"""Profiles: costs of a model's layers, and balances computed from them."""
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from math import inf
from typing import Any, TypeVar

from torchgpipe.balance.blockpartition import (bounded_cuts, check_partitions, even_cuts, positive,
                                               reachable)
from torchgpipe.base.text import format_bytes, table
from torchgpipe.predict.blocks import (Blocks, LayerProfile, MemoryLimit, Peak, SkipProfile,
                                       check_numbers, memory_limits, peaks)
from torchgpipe.predict.costs import Costs
from torchgpipe.predict.simulate import simulate
from torchgpipe.schedule.generators import plain_call

__all__ = ['Balance', 'Profile', 'edges_for', 'fastest']

T = TypeVar('T')


class Balance(list[int]):
    """The number of layers of each partition, for ``GPipe(balance=…)``, and what it predicts.

    Made by :meth:`Profile.balance`. It is a list of integers that also knows the layers that it is
    for; ``list(balance)`` forgets them.

    >>> layers = LayerProfile('a', 1, 2, 8, 0, 0, 4, 4), LayerProfile('b', 1, 1, 8, 0, 0, 4, 4)
    >>> profile = Profile(layers, (), batch_size=16, input_bytes=4, device='cpu')
    >>> balance = profile.balance(2, chunks=4, checkpoint='never')
    >>> balance, balance.seconds, round(balance.speed_up, 2)
    ([1, 1], [3.0, 2.0], 1.43)
    """

    #: Seconds of each partition for one training step on one mini-batch, waiting not counted.
    seconds: list[float]
    #: Bytes of each partition at the peak of a training step, apart from what a layer needs for
    #: itself while it runs, and from what an allocator adds.
    bytes: list[int]
    #: The part of the devices' time in a step in which they wait, from 0 to 1.
    bubble: float
    #: How much faster than the unwrapped model on one device, if that could hold it.
    speed_up: float
    #: Names and bytes of parameters of the layers that it is for.
    layers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Profile:
    """What the layers of a sequential module cost: made by :func:`torchgpipe.balance.profile`.

    Times are medians in seconds, sizes are in bytes, all for one training step on the whole
    sample, without checkpoints. ``print(profile)`` shows a table.

    >>> layer = LayerProfile('0', forward_seconds=0.002, backward_seconds=0.004,
    ...                      parameter_bytes=288, frozen_bytes=0, buffer_bytes=0,
    ...                      activation_bytes=0, output_bytes=512)
    >>> profile = Profile((layer,), (), batch_size=16, input_bytes=512, device='cpu')
    >>> print(profile)  # doctest: +NORMALIZE_WHITESPACE
    layer  forward, ms  backward, ms  parameters  activations  output
    ─────  ───────────  ────────────  ──────────  ───────────  ──────
    0            2.000         4.000       288 B          0 B   512 B
    total        2.000         4.000       288 B          0 B
    <BLANKLINE>
    16 samples on cpu
    """

    #: In the order of the model.
    layers: tuple[LayerProfile, ...]
    #: All skips between them.
    skips: tuple[SkipProfile, ...]
    #: The batch size of the sample.
    batch_size: int
    #: Of the sample.
    input_bytes: int
    #: Where it was measured.
    device: str

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.batch_size < 1:
            raise ValueError(f'the batch_size of a Profile must be 1 or more, but is '
                             f'{self.batch_size}')

    def __str__(self) -> str:
        def row(name: str, layers: Sequence[LayerProfile], output: str) -> list[str]:
            return [name, f'{sum(x.forward_seconds for x in layers) * 1e3:.3f}',
                    f'{sum(x.backward_seconds for x in layers) * 1e3:.3f}',
                    format_bytes(sum(x.parameter_bytes for x in layers)),
                    format_bytes(sum(x.activation_bytes for x in layers)), output]

        rows = [row(x.name, [x], format_bytes(x.output_bytes)) for x in self.layers]
        header = ['layer', 'forward, ms', 'backward, ms', 'parameters', 'activations', 'output']
        return (table(header, [*rows, row('total', self.layers, '')])
                + f'\n\n{self.batch_size} samples on {self.device}')

    def to_dict(self) -> dict[str, Any]:
        """Return it as what JSON can hold: dictionaries, lists, strings and numbers.

        >>> profile = Profile((LayerProfile('0', 1.0, 2.0, 8, 0, 0, 4, 4),), (), 16, 4, 'cpu')
        >>> Profile.from_dict(profile.to_dict()) == profile
        True
        """
        return {'version': 1, **asdict(self), 'layers': [asdict(x) for x in self.layers],
                'skips': [asdict(x) for x in self.skips]}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> 'Profile':
        """Read what :meth:`to_dict` gave.

        Args:
            data: That, also after a way through JSON.

        Returns:
            The profile.

        Raises:
            ValueError: It is something else.
        """
        if not isinstance(data, dict) or data.get('version') != 1 or data['version'] is True:
            raise ValueError("this is not a profile: it has no 'version': 1, as Profile.to_dict() "
                             'writes it')
        rest = {key: value for key, value in data.items() if key != 'version'}
        for key, cls in (('layers', LayerProfile), ('skips', SkipProfile)):
            if not isinstance(rest.get(key), (list, tuple)):
                raise ValueError("this is not a profile: its 'layers' and 'skips' are no lists")
            rest[key] = tuple(_make(cls, item) for item in rest[key])
        return _make(Profile, rest)

    def scaled(self, batch_size: int) -> 'Profile':
        """Return the profile of another batch, as if all but overheads grew with it.

        >>> layer = LayerProfile('0', 1.0, 2.0, 8, 0, 0, 4, 4, forward_overhead=0.5)
        >>> profile = Profile((layer,), (), batch_size=16, input_bytes=4, device='cpu')
        >>> profile.scaled(32).layers[0].forward_seconds
        1.5
        """
        ratio = batch_size / self.batch_size

        def seconds(all: float, overhead: float) -> float:
            overhead = min(overhead, all)  # Of a small batch, more may have been measured.
            return overhead + (all - overhead) * ratio

        layers = tuple(replace(
            x, forward_seconds=seconds(x.forward_seconds, x.forward_overhead),
            backward_seconds=seconds(x.backward_seconds, x.backward_overhead),
            activation_bytes=round(x.activation_bytes * ratio),
            output_bytes=round(x.output_bytes * ratio)) for x in self.layers)
        skips = tuple(replace(x, bytes=round(x.bytes * ratio)) for x in self.skips)
        return replace(self, layers=layers, skips=skips, batch_size=batch_size,
                       input_bytes=round(self.input_bytes * ratio))

    def balance(self, partitions: int, *, chunks: int, memory_limit: MemoryLimit = None,
                param_scale: float = 2.0, checkpoint: str = 'except_last') -> Balance:
        """Find the balance whose slowest partition is as fast as possible.

        That is exact for the measured times. Ties are broken as evenly as possible, where that
        keeps the limits of memory.

        >>> layers = [LayerProfile(str(k), k, 2 * k, 8, 0, 0, 4, 4) for k in range(1, 7)]
        >>> profile = Profile(tuple(layers), (), 16, 4, 'cpu')
        >>> balance = profile.balance(2, chunks=4, checkpoint='never')
        >>> balance, balance.seconds, round(balance.bubble, 2)
        ([4, 2], [30.0, 33.0], 0.22)

        Args:
            partitions: Number of partitions.
            chunks: Number of micro-batches.
            memory_limit: Bytes of each device: one number for all of them, or one per partition,
                where ``None`` is no limit.
            param_scale: Bytes for a trainable parameter, its gradient and the optimizer's state,
                relative to the parameter: SGD 2–3, Adam 4–5, Adadelta 4, Adagrad 3, RMSprop 3–5.
            checkpoint: As for :class:`~torchgpipe.GPipe`.

        Returns:
            The balance, with what it predicts.

        Raises:
            ValueError: An argument is wrong, or no balance keeps the limits.
        """
        partitions, chunks = positive(partitions, 'partitions'), positive(chunks, 'chunks')
        limits = memory_limits(memory_limit, partitions, 'partitions')
        blocks = self.blocks(chunks, param_scale)
        costs = blocks.seconds(checkpoint)
        check_partitions(costs, partitions)
        edges = edges_for(self, partitions, checkpoint)
        peak = _peak(blocks, partitions, checkpoint)
        cases = [(limit, j == partitions - 1) for j, limit in enumerate(limits)]
        found = {case: blocks.furthest(edges, peak, *case) for case in {*cases}}
        furthest = [found[case] for case in cases]
        lengths = bounded_cuts(costs, edges, furthest)
        if lengths is None:
            names = [layer.name for layer in self.layers]
            raise ValueError(_why_not(names, blocks, edges, peak, limits, furthest))
        return self._predicted(lengths, blocks, checkpoint)

    def _predicted(self, lengths: list[int], blocks: Blocks, checkpoint: str) -> Balance:
        """Return a balance that says what to expect of it, if devices work by themselves."""
        parts = [(end - length, end) for end, length in zip(accumulate(lengths), lengths)]
        seconds, peak = blocks.seconds(checkpoint), _peak(blocks, len(parts), checkpoint)
        costs = Costs.of(self, lengths, blocks.m, checkpoint)
        schedule, pairs = plain_call(len(parts), blocks.m, costs.stops)
        simulation = simulate(schedule, costs, pairs)
        sequential = sum(x.forward_seconds + x.backward_seconds for x in self.layers)
        balance = Balance(lengths)
        balance.layers = tuple((x.name, x.parameter_bytes) for x in self.layers)
        balance.seconds = [sum(seconds[a:b]) for a, b in parts]
        balance.bytes = [blocks.bytes(a, b, peak) for a, b in parts]
        balance.bubble = simulation.bubble
        balance.speed_up = sequential / simulation.seconds if simulation.seconds else 1.0
        return balance

    def blocks(self, chunks: int, param_scale: float) -> Blocks:
        """Return what blocks of the layers take as stages, in so many micro-batches at most."""
        return Blocks(self.layers, self.skips, self.input_bytes, min(chunks, self.batch_size),
                      param_scale)

    def edges(self) -> list[int]:
        """Return the places where partitions may start and end.

        A layer that changes in place what another one gave belongs into its partition. A
        checkpointed partition must not change its own input, and elsewhere the change may come too
        late for a skip.
        """
        forbidden: set[int] = set()
        for index, layer in enumerate(self.layers):
            if layer.changes is not None:
                forbidden.update(range(layer.changes + 1, index + 1))
        return [edge for edge in range(len(self.layers) + 1) if edge not in forbidden]


def fastest(profile: Profile, blocks: Blocks, partitions: int, checkpoint: str) -> list[int]:
    """Return the balance whose slowest partition is as fast as possible, in any memory."""
    costs = blocks.seconds(checkpoint)
    check_partitions(costs, partitions)
    return even_cuts(costs, edges_for(profile, partitions, checkpoint), partitions)


def edges_for(profile: Profile, partitions: int, checkpoint: str) -> list[int]:
    """Return the edges of a profile, or all where these are too few and it may work all the same.

    Raises:
        ValueError: They are too few, and partitions are checkpointed.
    """
    edges, number = profile.edges(), len(profile.layers)
    if len(edges) > partitions:
        return edges
    if checkpoint == 'never':
        return list(range(number + 1))
    layer = next(x for x in profile.layers if x.changes is not None)
    raise ValueError(
        f'{number} layers make only {len(edges) - 1} groups for {partitions} partitions, since a '
        "layer that changes another one's result in place has to be in its partition: "
        f"'{layer.name}' is one; let it not work in place, or use checkpoint='never'")


def _peak(blocks: Blocks, partitions: int, checkpoint: str) -> Peak:
    """Return what each partition holds at its peak in the plain call."""
    return peaks(plain_call(partitions, blocks.m)[0], checkpoint, is_plain_call=True)[0]


def _make(cls: type[T], data: Any) -> T:
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    if not isinstance(data, dict) or set(data) != names:
        problem = f'{data!r} is one' if not isinstance(data, dict) else \
            f'missing {sorted(names - set(data))}, unknown {sorted(set(data) - names)}'
        raise ValueError(f'this is not a profile: fields of a {cls.__name__}: {problem}')
    try:
        return cls(**data)
    except ValueError as error:
        raise ValueError(f'this is not a profile: {error}') from None


def _why_not(names: Sequence[str], blocks: Blocks, edges: Sequence[int], peak: Peak,
             limits: Sequence[int | None], furthest: Sequence[Sequence[int]]) -> str:
    """Return which layers do not fit, or that all of them together do not.

    Args:
        names: Of the layers.
        blocks: What they take.
        edges: Where partitions may start and end.
        peak: What a partition holds.
        limits: By partition, in bytes.
        furthest: The furthest ends of partitions, by their places in ``edges``.
    """
    largest = inf if None in limits else max(limit or 0 for limit in limits)
    room = inf if None in limits else sum(limit or 0 for limit in limits)
    for start, end in zip(edges, edges[1:]):
        need = min(blocks.bytes(a, end, peak) for a in edges[:edges.index(end)])
        if need > largest:
            return (f'{_block(names, start, end)} alone needs {format_bytes(need)}, but the '
                    f'largest memory limit is {format_bytes(largest)}; raise chunks, split the '
                    'layer, or take a larger device')
    activations = -(-blocks.activations[-1] * peak.activations // blocks.m)
    total = blocks.resident[-1] + activations + blocks.inputs[0] + 2 * blocks.inputs[-1]
    all_of_them = f'all {len(names)} layers together need {format_bytes(total)} or more'
    if total > room:
        return (f'{all_of_them}, but the memory limits add up to {format_bytes(room)}; take more '
                'or larger devices, or raise chunks')
    stuck = _stuck(names, blocks, edges, peak, limits, furthest)
    return f'{stuck}; {all_of_them}. Raise chunks, or take larger devices'


def _stuck(names: Sequence[str], blocks: Blocks, edges: Sequence[int], peak: Peak,
           limits: Sequence[int | None], furthest: Sequence[Sequence[int]]) -> str:
    """Return at which partition each balance that keeps the limits so far comes to an end."""
    number = len(edges) - 1
    rows = reachable([0] * len(edges), furthest, 0)  # with no bound on the time
    j = next(j for j, ends in enumerate(rows[1:]) if not ends)
    ends = [number if j == len(limits) - 1 else a + 1 for a in range(number)]
    needs = [(blocks.bytes(edges[a], edges[ends[a]], peak), a) for a in rows[j] if a < number]
    if not needs:
        return f'no layer is left for partition {j}'
    need, a = min(needs)
    return (f'no balance keeps the memory limit of partition {j}, {format_bytes(limits[j] or 0)}: '
            f'at least {_block(names, edges[a], edges[ends[a]])} would be there and need '
            f'{format_bytes(need)}')


def _block(names: Sequence[str], a: int, b: int) -> str:
    return f"layer '{names[a]}'" if b == a + 1 else \
        f"the block of layers '{names[a]}' to '{names[b - 1]}'"
