"""Fit a balance into memory, for a schedule.

How much a stage holds at its peak depends on the schedule: by how many micro-batches are in flight
in it. From that follows how far a stage can reach, which is what a bounded cut needs. By how much
a device is simulated to hold more than its stages by themselves, or less, as they have their peaks
at different times, that much less or more it may have, and the cut is made again.
"""
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from torchgpipe.balance.blockpartition import bounded_cuts
from torchgpipe.plan.choice import Plan, schedule_of
from torchgpipe.predict.blocks import Blocks, peaks
from torchgpipe.schedule.generators import PLAIN_CALL

__all__ = ['Limits', 'excess', 'fit', 'neighbours']

#: How often a balance is made again.
ROUNDS = 4

#: How finely times are distinguished, of all layers together.
UNITS = 20000

#: By device, bytes or no limit.
Limits = Sequence[float | None]


def excess(bytes: Sequence[float], limits: Limits) -> list[float]:
    """Return by how much each device is above its limit."""
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


def fit(plan: Plan, blocks: Blocks, edges: Sequence[int], limits: Limits,
        planned: Callable[[list[int]], Plan]) -> Plan | None:
    """Return a plan that keeps the limits, if one is found, with stages as equal as can be.

    Args:
        plan: One that does not keep them.
        blocks: What layers take.
        edges: Where stages may start and end.
        limits: By device.
        planned: Makes a plan of another balance.
    """
    n = len(limits)
    schedule = schedule_of(plan.schedule, n, blocks.m, len(plan.balance) // n)
    peak = peaks(schedule, plan.checkpoint, plan.schedule == PLAIN_CALL)
    last = len(peak) - 1
    # As whole numbers: quicker, and closer than any measurement.
    seconds = blocks.seconds(plan.checkpoint)
    unit = (sum(seconds) or 1.0) / UNITS
    costs = [round(cost / unit) for cost in seconds]
    for _ in range(ROUNDS):
        cuts = [0, *accumulate(plan.balance)]
        cases: list[Any] = [None] * len(peak)
        for limit, size, own in zip(limits, plan.bytes.values(), schedule.stages):
            known = sum(blocks.bytes(cuts[j], cuts[j + 1], peak[j]) for j in own)
            share = limit if limit is None else (limit - (size - known)) / len(own)
            for j in own:
                cases[j] = peak[j], share, j == last
        found = {case: blocks.furthest(edges, *case) for case in {*cases}}
        balance = bounded_cuts(costs, edges, [found[case] for case in cases])
        if balance is None:
            return None
        plan = planned(balance)
        if not any(excess([*plan.bytes.values()], limits)):
            return plan
    return None
