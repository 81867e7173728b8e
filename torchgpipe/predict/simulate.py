"""Simulate a step: when each action of a schedule starts and ends, given what stages cost.

Each device goes through its row. It starts an action as soon as what that waits for has ended, on
another device and arrived from there; copies go beside the computation, however many at a time::

    device 0    0F0 ─────▶ 0F1 ───────▶ 0B0
                  ╲ copy                 ╱ copy
    device 1       ▶ 1F0 ─────▶ 1B0 ────╱

So times depend on no choice, and devices may be followed in any order: each as far as it gets, and
once more when what it waits for is known. Each action is looked at once, and once more where its
device had to stop.
"""
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from torchgpipe.predict.costs import Costs
from torchgpipe.predict.held import Line, bytes_over_time
from torchgpipe.schedule.action import KINDS, Action, Timed
from torchgpipe.schedule.schedule import WAITS, Schedule

__all__ = ['Simulation', 'simulate']

#: The kinds of actions, by number.
_KINDS = {kind: k for k, kind in enumerate(KINDS)}


@dataclass(frozen=True)
class Simulation:
    """A step as it is predicted; :func:`simulate` makes it.

    >>> from torchgpipe.plan import StageCosts, simulate
    >>> from torchgpipe.schedule import make
    >>> stage = StageCosts(forward=1.0, backward=2.0, activation_bytes=8.0)
    >>> simulation = simulate(make('1f1b', devices=2, micro_batches=4), Costs([stage] * 2))
    >>> simulation.seconds, round(simulation.bubble, 2), simulation.peak_bytes
    (15.0, 0.2, (16.0, 8.0))
    """

    #: When each action starts and ends, row after row of the schedule.
    actions: tuple[Timed, ...]
    #: What the stages cost.
    costs: Costs
    #: The number of devices, rows of the schedule.
    devices: int

    @cached_property
    def seconds(self) -> float:
        """The time of the step."""
        return max(timed.end for timed in self.actions)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For how many seconds each device has something to do."""
        busy = [0.0] * self.devices
        for timed in self.actions:
            busy[timed.device] += timed.end - timed.start
        return tuple(busy)

    @property
    def bubble(self) -> float:
        """The part of the devices' time in which they have nothing to do, from 0 to 1."""
        return 1 - sum(self.busy) / (self.devices * self.seconds) if self.seconds else 0.0

    @property
    def bubble_rate(self) -> float:
        """The bubble as Qi et al., "Zero Bubble Pipeline Parallelism" (2023), count it.

        It is the part of a device's time from its first start to its last end that is no work, for
        the device where that time is longest; the work is that of the device that has most of it.
        """
        spans: dict[int, tuple[float, float]] = {}
        for timed in self.actions:
            start, _ = spans.get(timed.device, (timed.start, 0.0))
            spans[timed.device] = start, timed.end
        cost = max(end - start for start, end in spans.values())
        return 1 - max(self.busy) / cost if cost else 0.0

    @cached_property
    def bytes(self) -> tuple[Line, ...]:
        """What each device holds over time, as pairs of a second and bytes from then on."""
        return bytes_over_time(self.actions, self.costs, self.devices)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most bytes that each device holds at a time."""
        return tuple(max(bytes for _, bytes in line) for line in self.bytes)


def simulate(schedule: Schedule, costs: Costs, pairs: Iterable[tuple[Action, Action]] = ()
             ) -> Simulation:
    """Predict when each action of a schedule starts and ends.

    >>> from torchgpipe.plan import StageCosts
    >>> schedule = Schedule.parse('0F0,0B0\\n1F0,1B0')
    >>> simulation = simulate(schedule, Costs([StageCosts(1.0, 2.0), StageCosts(2.0, 3.0)]))
    >>> [f'{x.action} {x.start:.0f}-{x.end:.0f}' for x in simulation.actions]
    ['0F0 0-1', '0B0 6-8', '1F0 1-3', '1B0 3-6']

    Args:
        schedule: One that :meth:`~torchgpipe.schedule.Schedule.validate` accepts.
        costs: Of its stages.
        pairs: Actions of which the second one waits for the first one as well.

    Raises:
        ValueError: The costs are for another number of stages, or the schedule can not go on.
    """
    return _Run(schedule, costs, pairs).simulation()


class _Run:
    """A schedule in numbers: an action is ``(stage * len(KINDS) + kind) * m + micro_batch``."""

    def __init__(self, schedule: Schedule, costs: Costs, pairs: Iterable[tuple[Action, Action]]
                 ) -> None:
        if not any(schedule.rows):
            raise ValueError('the schedule is empty')
        self._schedule = schedule
        self._costs = costs
        self._m = 1 + max(action.micro_batch for row in schedule.rows for action in row)
        self._places = {action.stage: device for device, row in enumerate(schedule.rows)
                        for action in row}
        stages = 1 + max(self._places)
        if len(costs.stages) != stages:
            raise ValueError(f'costs are those of {len(costs.stages)} stages, but the schedule '
                             f'has {stages}')
        costs.check_links(len(schedule.rows))
        size, kinds, m = len(KINDS), _KINDS, self._m
        self._rows = [[(stage * size + kinds[kind]) * m + i for stage, kind, i in row]
                      for row in schedule.rows]
        self._starts = [0.0] * (stages * size * m)
        #: By number, when it ends; ``None`` until that is known, and before all if there is none.
        self._ends: list[float | None] = [-inf] * (stages * size * m)
        for row in self._rows:
            for x in row:
                self._ends[x] = None
        if self._ends.count(None) != sum(map(len, self._rows)):
            schedule.validate()
        self._seconds = self._durations()
        self._before = [self._waits(stage, kind) for stage in range(stages) for kind in KINDS]
        self._also: dict[int, list[tuple[int, float]]] = {}
        for one, next in pairs:
            x = self._number(next)
            self._also.setdefault(x, []).append((self._number(one) - x, 0.0))

    def _number(self, action: Action) -> int:
        stage, kind, i = action
        return (stage * len(KINDS) + _KINDS[kind]) * self._m + i

    def _durations(self) -> list[float]:
        """Return the seconds of each action; a backward recomputes where nothing else does."""
        seconds: list[float] = []
        for k, stage in enumerate(self._costs.stages):
            again = [0.0] * self._m
            stop, first = min(stage.recomputed, self._m), self._number(Action(k, 'R', 0))
            for i, end in enumerate(self._ends[first:first + stop]):
                again[i] = 0.0 if end is None else stage.seconds('R')  # ``None``: it is there
            for kind in KINDS:
                each = stage.seconds(kind)
                seconds += [each + more for more in again] if kind in 'BI' else [each] * self._m
        return seconds

    def _waits(self, stage: int, kind: str) -> list[tuple[int, float]]:
        """Return what a kind of action of a stage waits for.

        Returns:
            How far away the number of each is, and seconds from its end on.
        """
        stages, skips = self._costs.stages, self._costs.skips
        before = []
        for on, other in WAITS[kind]:
            if 0 <= stage + on < len(stages):
                bytes = stages[min(stage, stage + on)].output_bytes
                before.append((stage + on, other, bytes))
        if kind == 'F':
            before += [(x.source, 'F', x.bytes) for x in skips if x.target == stage]
        elif kind in 'BI':
            before += [(x.target, each, x.bytes) for x in skips if x.source == stage
                       for each in 'BI']
        me = stage * len(KINDS) + _KINDS[kind]
        return [((s * len(KINDS) + _KINDS[k] - me) * self._m, self._copy(s, stage, bytes))
                for s, k, bytes in before]

    def _copy(self, source: int, target: int, bytes: float) -> float:
        one, other = self._places.get(source), self._places.get(target)
        if one == other or one is None or other is None:
            return 0.0
        return self._costs.link(one, other).seconds(bytes)

    def simulation(self) -> Simulation:
        """Follow the devices."""
        positions = [0] * len(self._rows)
        waiting: dict[int, list[int]] = defaultdict(list)
        ready = [*range(len(self._rows))]
        while ready:
            device = ready.pop()
            row = self._rows[device]
            first = positions[device]
            position, blocker = self._follow(row, first)
            positions[device] = position
            if blocker is not None:
                waiting[blocker].append(device)
            for x in waiting.keys() & row[first:position]:
                ready += waiting.pop(x)
        if any(position < len(row) for position, row in zip(positions, self._rows)):
            self._schedule.validate()
            raise ValueError('the schedule can not go on with what actions wait for as well')
        return Simulation(tuple(self._timed()), self._costs, len(self._rows))

    def _follow(self, row: Sequence[int], position: int) -> tuple[int, int | None]:
        """Take a device from a place in its row as far as it gets; say where, and why no further.
        """
        starts, ends, seconds, m = self._starts, self._ends, self._seconds, self._m
        before, also = self._before, self._also
        now = ends[row[position - 1]] if position else 0.0
        assert now is not None
        for position in range(position, len(row)):
            x = row[position]
            for off, delay in before[x // m] if x not in also else before[x // m] + also[x]:
                end = ends[x + off]
                if end is None:
                    return position, x + off
                if end + delay > now:
                    now = end + delay
            starts[x] = now
            ends[x] = now = now + seconds[x]
        return len(row), None

    def _timed(self) -> Iterable[Timed]:
        for device, (row, numbers) in enumerate(zip(self._schedule.rows, self._rows)):
            ends: list[Any] = self._ends  # All are known now.
            for action, x in zip(row, numbers):
                yield Timed(device, action, self._starts[x], ends[x])
