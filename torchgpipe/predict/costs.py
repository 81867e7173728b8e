"""Time and memory of the stages of a schedule."""
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from typing import Protocol

from torchgpipe.base.settings import Checkpoint, checkpoint_stops
from torchgpipe.predict.blocks import Blocks, LayerProfile, SkipProfile, check_numbers
from torchgpipe.schedule.schedule import KINDS

__all__ = ['Costs', 'Link', 'Links', 'StageCosts']


@dataclass(frozen=True)
class Link:
    """What a copy from one device to another takes; it goes beside what the devices compute.

    >>> Link(latency=0.001, bandwidth=1e9).seconds(2_000_000)
    0.003
    """

    #: Seconds of each copy.
    latency: float = 0.0
    #: Bytes per second.
    bandwidth: float = inf

    def __post_init__(self) -> None:
        check_numbers(self, unlimited='bandwidth')

    def seconds(self, bytes: float) -> float:
        """Return the seconds for so many bytes."""
        return self.latency + bytes / self.bandwidth


#: The same between any two devices; or by the device that sends, and the one that gets.
Links = Link | Sequence[Sequence[Link]]


@dataclass(frozen=True)
class StageCosts:
    """Seconds and bytes of one stage for one micro-batch.

    >>> costs = StageCosts(forward=1.0, backward=2.0, weight_backward=0.5)
    >>> costs.seconds('I'), costs.seconds('W'), costs.seconds('R')
    (1.5, 0.5, 1.0)
    """

    #: Seconds of ``F``.
    forward: float
    #: Seconds of ``B``, without a recomputation.
    backward: float
    #: Seconds of ``W``: half of backward if not given.
    weight_backward: float | None = None
    #: Seconds of ``I``, without a recomputation: what ``W`` leaves of backward if not given.
    input_backward: float | None = None
    #: Seconds of ``R``, or of the same within ``B`` or ``I``: those of ``F`` if not given.
    recomputation: float | None = None
    #: Of how many micro-batches, from the first one on, forward gives up the activations.
    recomputed: int = 0
    #: What forward makes for backward.
    activation_bytes: float = 0.0
    #: What ``B`` or ``I`` needs while it runs.
    backward_bytes: float = 0.0
    #: What goes to the next stage, or out of the last one.
    output_bytes: float = 0.0
    #: What is there from start to end, as parameters and all that goes with them; for all
    #: micro-batches.
    resident_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self)

    def seconds(self, kind: str) -> float:
        """Return the seconds of a kind of action; of a backward, without a recomputation."""
        if kind == 'F':
            return self.forward
        if kind == 'R':
            return self.forward if self.recomputation is None else self.recomputation
        if kind == 'B':
            return self.backward
        weight = self.backward / 2 if self.weight_backward is None else self.weight_backward
        if kind == 'W':
            return weight
        rest = max(0.0, self.backward - weight)
        return rest if self.input_backward is None else self.input_backward


class Measured(Protocol):
    """A :class:`~torchgpipe.balance.Profile`."""

    @property
    def layers(self) -> Sequence[LayerProfile]:
        """What each layer costs."""

    def blocks(self, chunks: int, param_scale: float) -> Blocks:
        """Return what blocks of the layers take."""


@dataclass(frozen=True)
class Costs:
    """What a step costs: its stages, and what goes between them.

    >>> costs = Costs([StageCosts(forward=1.0, backward=2.0)] * 4, links=Link(latency=0.1))
    >>> len(costs.stages)
    4
    """

    #: By stage.
    stages: Sequence[StageCosts]
    #: From which stage to which one, and bytes of one micro-batch.
    skips: Sequence[SkipProfile] = ()
    #: Between devices, which are the rows of a schedule.
    links: Links = Link()

    def __post_init__(self) -> None:
        last = len(self.stages) - 1
        wrong = [x for x in self.skips if not x.source < x.target <= last]
        if wrong:
            raise ValueError(f'a skip goes to a later one of the {last + 1} stages, but there is '
                             f'{wrong[0]}')

    @staticmethod
    def of(profile: Measured, balance: Sequence[int], chunks: int,
           checkpoint: Checkpoint = 'except_last', *, param_scale: float = 2.0,
           links: Links = Link(), overhead: Mapping[str, float] | None = None) -> 'Costs':
        """Take them from what layers cost.

        Where a profile does not know how backward is split, it follows by a rule: gradients of
        weights take half of it in a layer with parameters to train, as they do in matrix products
        and convolutions; in the first such layer all of it, as what comes before it needs no
        gradient; in layers without such parameters nothing.

        >>> from torchgpipe.balance import Profile
        >>> layers = [LayerProfile(str(k), 2.0, 4.0, 8, 0, 0, 4, 4) for k in range(4)]
        >>> profile = Profile(tuple(layers), (), batch_size=16, input_bytes=4, device='cpu')
        >>> costs = Costs.of(profile, [2, 2], chunks=4)
        >>> [(x.forward, x.backward, x.weight_backward, x.recomputed) for x in costs.stages]
        [(1.0, 2.0, 1.5, 3), (1.0, 2.0, 1.0, 3)]

        Args:
            profile: Of the layers, by :func:`torchgpipe.balance.profile`.
            balance: The number of layers of each stage.
            chunks: The number of micro-batches, which count as equally large.
            checkpoint: As for :class:`~torchgpipe.GPipe`.
            param_scale: Bytes for a trainable parameter, its gradient and the optimizer's state,
                relative to the parameter.
            links: See above.
            overhead: Seconds that an action takes beside its layers, by its kind.

        Raises:
            ValueError: The balance is for other layers, or an argument is wrong.
        """
        if sum(balance) != len(profile.layers) or min(balance, default=0) < 1:
            raise ValueError(f'the balance {list(balance)} is none of the {len(profile.layers)} '
                             'layers that the profile has')
        blocks = profile.blocks(chunks, param_scale)
        m = blocks.m
        parts = [(one * x, other * x) for x, (one, other) in
                 zip(blocks.backward, _shares(profile.layers))]
        cuts = [0, *accumulate(balance)]
        more = dict.fromkeys(KINDS, 0.0) | dict(overhead or {})
        if len(more) > len(KINDS):
            raise ValueError(f'overhead is that of actions {", ".join(KINDS)}, but names '
                             f'{", ".join(map(repr, overhead or {}))}')
        stages = tuple(StageCosts(
            forward=sum(blocks.forward[a:b]) / m + more['F'],
            backward=sum(blocks.backward[a:b]) / m + more['B'],
            weight_backward=sum(second for _, second in parts[a:b]) / m + more['W'],
            input_backward=sum(first for first, _ in parts[a:b]) / m + more['I'],
            recomputation=sum(blocks.forward[a:b]) / m + more['R'],
            recomputed=stop,
            activation_bytes=(blocks.activations[b] - blocks.activations[a]) / m,
            backward_bytes=max(blocks.passing[a:b]) / m,
            output_bytes=blocks.inputs[b] / m,
            resident_bytes=blocks.resident[b] - blocks.resident[a] + (a == 0) * blocks.inputs[0],
        ) for a, b, stop in zip(cuts, cuts[1:], checkpoint_stops(checkpoint, m, len(balance))))
        return Costs(stages, _between(blocks.skips, balance, m), links)

    @property
    def stops(self) -> tuple[int, ...]:
        """Of how many micro-batches each stage gives up its activations, from the first one on."""
        return tuple(stage.recomputed for stage in self.stages)

    def check_links(self, devices: int) -> None:
        """Check that there is a link between each two of so many devices.

        Raises:
            ValueError: There is none, or there are others.
        """
        links = self.links
        if isinstance(links, Link):
            return
        shape = [len(row) if isinstance(row, Sequence) else row for row in links]
        if shape != [devices] * devices or any(
                not isinstance(link, Link) for row in links for link in row):
            raise ValueError('links must be one Link, or for each device a row of one for each '
                             f'device; for {devices} devices, there are rows of {shape}')

    def link(self, source: int, target: int) -> Link:
        """Return that between two devices."""
        return self.links if isinstance(self.links, Link) else self.links[source][target]


def _shares(layers: Sequence[LayerProfile]) -> Iterator[tuple[float, float]]:
    """Yield for each layer which shares of its backward ``I`` and ``W`` take."""
    is_first = True
    for x in layers:
        is_trained = x.parameter_bytes > x.frozen_bytes
        by_rule = (1.0 if is_first else 0.5) if is_trained else 0.0
        is_first = is_first and not is_trained
        if x.input_share is None or x.weight_share is None:
            yield 1 - by_rule, by_rule
        else:
            yield x.input_share, x.weight_share


def _between(skips: Sequence[SkipProfile], balance: Sequence[int], m: int
             ) -> tuple[SkipProfile, ...]:
    """Return the skips from stage to stage."""
    stage_of = [j for j, number in enumerate(balance) for _ in range(number)]
    each = [SkipProfile(stage_of[x.source], stage_of[x.target], x.bytes) for x in skips]
    return tuple(SkipProfile(x.source, x.target, -(-x.bytes // m)) for x in each
                 if x.source != x.target)
