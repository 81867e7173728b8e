"""Fit a balance into memory, for a schedule.

How much a device holds depends on the schedule: by how many micro-batches are under way in each of
its stages. From that follows how far a stage can reach, which is what a bounded cut needs. What
that leaves out, such as gradients on their way, the simulation finds: then the devices where it is
too much get less by what was left out, and the cut is made again.
"""
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from torchgpipe.balance import Profile
from torchgpipe.balance.bounded import solve_bounded
from torchgpipe.balance.step import StepCost, group, ungroup
from torchgpipe.schedule import Schedule

__all__ = ['Limits', 'excess', 'fit', 'under_way']

#: How often a balance is made again.
ROUNDS = 4

#: How finely times are told apart, of all layers together.
UNITS = 20000

#: By device, bytes or no limit.
Limits = Sequence[float | None]


def excess(bytes: Sequence[float], limits: Limits) -> list[float]:
    """Give by how much each device is above its limit."""
    return [0.0 if limit is None else max(0.0, size - limit)
            for size, limit in zip(bytes, limits)]


def neighbours(balance: Sequence[int], edges: Sequence[int]) -> Iterator[list[int]]:
    """Yield the balances that differ in one cut, which is at the next edge or the one before.

    >>> [*neighbours([2, 1, 3], edges=[0, 1, 2, 3, 4, 5, 6])]
    [[1, 2, 3], [2, 2, 2]]
    """
    cuts = [0, *accumulate(balance)]
    for k in range(1, len(cuts) - 1):
        place = edges.index(cuts[k]) if cuts[k] in edges else -1
        for cut in (edges[place - 1], edges[place + 1]) if place > 0 else ():
            if cuts[k - 1] < cut < cuts[k + 1]:
                moved = [*cuts[:k], cut, *cuts[k + 1:]]
                yield [b - a for a, b in zip(moved, moved[1:])]


def under_way(schedule: Schedule) -> dict[int, int]:
    """Give for each stage the most micro-batches that are under way at a time.

    >>> from torchgpipe.schedule import make
    >>> under_way(make('1f1b', devices=3, micro_batches=8))
    {0: 3, 1: 2, 2: 1}
    """
    now: dict[int, int] = {}
    most: dict[int, int] = {}
    for row in schedule.rows:
        for stage, kind, _ in row:
            now[stage] = now.get(stage, 0) + (kind == 'F') - (kind in 'BW')
            most[stage] = max(most.get(stage, 0), now[stage])
    return most


class Need(NamedTuple):
    """What the layers of a stage take, but for what only a simulation knows."""

    step: StepCost
    edges: Sequence[int]
    checkpoint: str

    def bytes(self, number: int, a: int, b: int, last: bool) -> float:
        """Give what the layers from ``a`` to ``b - 1`` take as a stage."""
        step, kept = self.step, number if self.checkpoint == 'never' else 1
        return (step.resident[b] - step.resident[a] + last * step.inputs[-1] + (
            kept * (step.activations[b] - step.activations[a]) + number * step.inputs[a]) / step.m)

    def furthest(self, number: int, limit: float | None, last: bool) -> list[int]:
        """Give the furthest edge at which a stage can end, by the one where it starts.

        Args:
            number: How many micro-batches are under way in it.
            limit: In bytes.
            last: Whether it is the last stage.
        """
        edges = self.edges
        groups = len(edges) - 1
        if limit is None:
            return [groups] * groups
        need = [self.bytes(number, 0, edge, last) for edge in edges]
        # What a stage takes that starts elsewhere differs by a number for each start.
        ends = [bisect_right(need, limit + need[a] - self.bytes(number, edge, edge, last), a) - 1
                for a, edge in enumerate(edges[:-1])]
        return [end if end > a and (end == groups or not last) else a
                for a, end in enumerate(ends)]


def fit(profile: Profile, step: StepCost, schedule: Schedule, checkpoint: str, limits: Limits,
        simulated: Callable[[list[int]], Sequence[float]]) -> list[int] | None:
    """Find a balance that keeps the limits, with stages that are as equal as can be.

    Args:
        profile: What layers cost.
        step: The same by micro-batches.
        schedule: The schedule.
        checkpoint: The mode.
        limits: By device.
        simulated: Gives bytes by device for a balance.

    Returns:
        The balance, or ``None`` if none was found.
    """
    number = under_way(schedule)
    device_of = {stage: device for device, own in enumerate(schedule.stages) for stage in own}
    need = Need(step, profile.edges(), checkpoint)
    # As whole numbers: quicker, and closer than any measurement.
    unit = (sum(step.costs) or 1.0) / UNITS
    costs = [round(cost / unit) for cost in group(step.costs, need.edges)]
    rest = list(limits)
    for _ in range(ROUNDS):
        shares = [None if limit is None else limit / len(own)
                  for limit, own in zip(rest, schedule.stages)]
        cases = [(number[stage], shares[device_of[stage]], stage == len(number) - 1)
                 for stage in range(len(number))]
        found = {case: need.furthest(*case) for case in {*cases}}
        lengths = solve_bounded(costs, [found[case] for case in cases])
        if lengths is None:
            return None
        balance = ungroup(lengths, need.edges)
        bytes = simulated(balance)
        if not any(excess(bytes, limits)):
            return balance
        cuts = [0, *accumulate(balance)]
        rest = [limit if limit is None else limit - (size - sum(
            need.bytes(number[stage], cuts[stage], cuts[stage + 1], stage == len(number) - 1)
            for stage in own)) for limit, size, own in zip(limits, bytes, schedule.stages)]
    return None
