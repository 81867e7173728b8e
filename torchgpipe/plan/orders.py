"""Search an order of actions for given costs and memory.

:func:`search_schedule` begins with the named schedules that fit. Others are made by *list
scheduling*: of all actions that could run next, the one that would end first determines a device,
and the device runs one of its actions that could start before that end::

    device 0   0F0 0F1 ┊ 0F2 ends at 3
    device 1       1F0 ┊ 1F1 ends at 4, 1I0 at 3.5 ◀── both could start before 3: one of them
                       now

By rules, a device prefers actions that do not raise the lower bound on the time of the step, then
backward, then forward, then weights. It keeps as many activations as fit, and recomputes others or
waits. Some limits on micro-batches in flight, and on the ones that are kept, are tried.

The best results give each action a place in time. Then a device prefers the action with the
earliest place. Places are moved at random, and so are recomputations. A result that is not slower
replaces the one it comes from. So devices follow an order, but do not wait for an action if
another one can run.

Each result is simulated, with all memory that a simulation counts. List scheduling counts less, so
its limit is lower than the device's, by the difference that the simulation has found.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from operator import index
from random import Random
from typing import NamedTuple

from torchgpipe.base.context import uncollected
from torchgpipe.base.errors import format_bytes
from torchgpipe.base.settings import checkpoint_stops
from torchgpipe.plan.balance import positive
from torchgpipe.plan.costs import Costs, MemoryLimit, memory_limits
from torchgpipe.plan.simulation import Limits, Simulation, excess, simulate
from torchgpipe.schedule import NAMES, Action, Schedule, make
from torchgpipe.schedule.generators import places as places_of
from torchgpipe.schedule.generators import stages_per_device
from torchgpipe.schedule.schedule import KINDS


class _Problem:
    """The step as list scheduling sees it: seconds and bytes by stage, and stages by device."""

    def __init__(self, costs: Costs, places: Sequence[int], m: int, limits: Limits) -> None:
        stages = costs.stages
        last = len(places) - 1
        self.places = places
        self.m = m
        self.own: list[list[int]] = [[] for _ in range(1 + max(places))]
        for j, place in enumerate(places):
            self.own[place].append(j)
        self.seconds: dict[str, list[float]] = {}
        for kind in KINDS:
            self.seconds[kind] = [stage.seconds(kind) for stage in stages]

        def delay(j: int, to: int) -> float:
            one = places[j]
            other = places[to]
            if one == other:
                return 0.0
            return costs.link(one, other).seconds(stages[min(j, to)].output_bytes)

        #: Seconds until a stage has its input, and the gradient of its output.
        self.into = [0.0, *(delay(j - 1, j) for j in range(1, last + 1))]
        self.back = [*(delay(j + 1, j) for j in range(last)), 0.0]
        #: Bytes of a micro-batch: those that a recomputation makes again, and all others.
        self.activations = [each.activation_bytes for each in stages]
        self.kept = [
            (stages[j - 1].output_bytes if j and places[j - 1] != places[j] else 0.0)
            + (stages[j].output_bytes if j == last else 0.0)
            for j in range(last + 1)
        ]
        self.room = []
        for limit, stages_of_device in zip(limits, self.own):
            resident = sum(stages[j].resident_bytes for j in stages_of_device)
            self.room.append(inf if limit is None else limit - resident)
        #: Seconds until a backward passes its gradient on, and for which weights come later.
        self.passes = [min(self.seconds['B'][j], self.seconds['I'][j]) for j in range(last + 1)]
        self.later = []
        for j in range(last + 1):
            halves = self.seconds['I'][j] + self.seconds['W'][j]
            whole = min(self.seconds['B'][j], halves)
            self.later.append(max(0.0, whole - self.passes[j]))
        #: By device, the least seconds after the last backward of its first stage.
        self.after = []
        #: A lower bound on the time of the step: no device waits after its first action.
        self.least = 0.0
        for stages_of_device in self.own:
            first = stages_of_device[0]
            forward = self.seconds['F']
            before = sum(forward[j] + self.into[j + 1] for j in range(first))
            work = m * sum(forward[j] + self.passes[j] for j in stages_of_device)
            weights = m * sum(self.later[j] for j in stages_of_device)
            after = sum(self.passes[j] + self.back[j] for j in range(first))
            if first:
                after += self.later[0]
            self.after.append(after)
            self.least = max(self.least, before + work + max(weights, after))


class _Rules(NamedTuple):
    """Rules by which devices choose actions."""

    #: By stage, the most micro-batches in flight.
    most: tuple[int, ...]
    #: The most of them in a stage whose activations are kept.
    keep: int
    #: Whether backward is split.
    split: bool
    #: Whether to wait for memory, rather than recompute.
    waits: bool
    #: Whether memory is reserved for later stages, without which nothing ends.
    reserves: bool = True

    def splits(self, j: int, i: int) -> bool:
        return self.split

    def keeps(self, j: int, i: int, kept: int) -> tuple[bool, bool]:
        """Return whether activations may be kept, and whether they may be discarded."""
        may = kept < self.keep
        return may, not (may and self.waits)

    def rank(self, kind: str, j: int, i: int) -> float:
        # Forward prefers later stages, and backward earlier ones.
        return 'BIFW'.index(kind) + (-j if kind == 'F' else j) * 1e-6


class _Places:
    """Places of actions in time, of which devices choose the earliest.

    A simulation gives them. Some are moved at random, and some micro-batches of a stage are
    recomputed, or split, if they were not, and the other way around.
    """

    def __init__(self, simulation: Simulation, m: int, random: Random, recomputes: bool) -> None:
        far = random.choice((0.5, 1.0, 2.0, 4.0)) * sum(simulation.busy) / len(simulation.actions)
        share = random.choice((0.1, 0.3, 1.0))
        self._time = {
            x.action: x.start + random.uniform(-far, far) * (random.random() < share)
            for x in simulation.actions
        }
        self._again = {(j, i) for j, kind, i in self._time if kind == 'R'}
        self._split = {(j, i) for j, kind, i in self._time if kind == 'I'}
        for changed, chance in ((self._again, 0.5 * recomputes), (self._split, 0.2)):
            if random.random() < chance:
                j = random.randrange(len(simulation.costs.stages))
                some = random.choice((0.1, 0.5))
                changed ^= {(j, i) for i in range(m) if random.random() < some}
        self.most = [m] * len(simulation.costs.stages)
        # Without, more orders are possible, and more of them end in a deadlock.
        self.reserves = random.random() < 0.5

    def splits(self, j: int, i: int) -> bool:
        return (j, i) in self._split

    def keeps(self, j: int, i: int, kept: int) -> tuple[bool, bool]:
        return (j, i) not in self._again, (j, i) in self._again

    def rank(self, kind: str, j: int, i: int) -> float:
        # Whole and split backwards have each other's places.
        others = {'B': 'I', 'I': 'B', 'W': 'B'}
        own = self._time.get(Action(j, kind, i))
        if own is None:
            return self._time[Action(j, others[kind], i)]
        return own


class _Choice(NamedTuple):
    """An action that a device could run: when, and its kind and stage."""

    start: float
    end: float
    kind: str
    stage: int
    #: Whether a forward keeps its activations.
    keeps: bool = True


class _Listing:
    """Actions of all devices, chosen one after the other.

    Args:
        less: By device, bytes by which its room is smaller.
    """

    def __init__(
        self, problem: _Problem, choose: '_Rules | _Places', less: Sequence[float]
    ) -> None:
        number = len(problem.places)
        devices = len(problem.own)
        self._problem = problem
        self._choose = choose
        self._room = [room - own for room, own in zip(problem.room, less)]
        self._now = [0.0] * devices
        self._used = [0.0] * devices
        #: By stage, ends of forwards and of backwards, micro-batches without activations, the ones
        #: whose gradients of weights come later, and the number of micro-batches that have ended.
        self._forward: list[list[float]] = [[] for _ in range(number)]
        self._backward: list[list[float]] = [[] for _ in range(number)]
        self._again: list[list[int]] = [[] for _ in range(number)]
        self._open: list[list[int]] = [[] for _ in range(number)]
        self._done = [0] * number
        seconds = problem.seconds['F']
        m = problem.m
        #: By device, seconds of forwards and backwards to come, and of gradients of weights.
        self._coming = []
        self._weights = []
        for stages in problem.own:
            self._coming.append(m * sum(seconds[j] + problem.passes[j] for j in stages))
            self._weights.append(m * sum(problem.later[j] for j in stages))
        self._bound = 0.0
        self.rows: list[list[Action]] = [[] for _ in range(devices)]
        self._choices = [self._find(device) for device in range(devices)]

    def run(self) -> float:
        """Run all actions; return the time of the last end, or infinity if devices deadlock."""
        while True:
            ends = []
            for choices in self._choices:
                ends.append(min([choice.end for choice in choices], default=inf))
            end = min(ends)
            if end == inf:
                complete = all(done == self._problem.m for done in self._done)
                return max(self._now) if complete else inf
            device = ends.index(end)
            first = min([each.start for each in self._choices[device]])
            self._bound, _, _, chosen = min(
                [
                    (
                        self._after(device, each),
                        each.start > first,
                        self._choose.rank(each.kind, each.stage, self._number(each)),
                        each,
                    )
                    for each in self._choices[device]
                    if each.start < end or each.start == first
                ]
            )
            self._act(device, chosen)
            j = chosen.stage
            places = self._problem.places
            # Others may have got their input.
            changed = (
                {device, *places[j + 1 : j + 2]}
                if chosen.kind == 'F'
                else {device, *places[max(0, j - 1) : j]}
            )
            for each in changed:
                self._choices[each] = self._find(each)

    def _number(self, choice: _Choice) -> int:
        """Return the micro-batch of a choice."""
        if choice.kind == 'W':
            return self._open[choice.stage][0]
        return len((self._forward if choice.kind == 'F' else self._backward)[choice.stage])

    def _after(self, device: int, choice: _Choice) -> float:
        """Return a lower bound on the end of the step after a choice."""
        problem = self._problem
        _, end, kind, j, _ = choice
        coming = self._coming[device]
        weights = self._weights[device]
        if kind == 'F':
            coming -= problem.seconds['F'][j]
        elif kind != 'W':
            coming -= problem.passes[j]
        if kind in 'BW':
            weights -= problem.later[j]
        bound = end + coming + max(weights, problem.after[device] if coming > 1e-9 else 0.0)
        return max(self._bound, round(bound, 9))

    def _find(self, device: int) -> list[_Choice]:
        """Return the actions that a device could run next."""
        found: list[_Choice] = []
        own = self._problem.own[device]
        for place, j in enumerate(own):
            found += self._forwards(device, j, own[place + 1 :])
            found += self._backwards(device, j)
            if self._open[j]:
                now = self._now[device]
                found.append(_Choice(now, now + self._problem.seconds['W'][j], 'W', j))
        return found

    def _forwards(self, device: int, j: int, later: Sequence[int]) -> Iterator[_Choice]:
        problem = self._problem
        i = len(self._forward[j])
        flying = i - self._done[j]
        if (
            i == problem.m
            or flying >= self._choose.most[j]
            or (j and len(self._forward[j - 1]) == i)
        ):
            return
        start = self._now[device]
        if j:
            start = max(start, self._forward[j - 1][i] + problem.into[j])
        free = self._room[device] - self._used[device] - problem.kept[j]
        reserve = again = 0.0
        if self._choose.reserves:
            reserve = sum(
                [
                    problem.activations[k] + problem.kept[k]
                    for k in later
                    if len(self._forward[k]) == self._done[k]
                ]
            )
            again = max(
                [problem.activations[k] for k in problem.own[device] if self._again[k]],
                default=0.0,
            )
        keep, discard = self._choose.keeps(j, i, flying - len(self._again[j]))
        end = start + problem.seconds['F'][j]
        if keep and problem.activations[j] + max(reserve, again) <= free:
            yield _Choice(start, end, 'F', j)
        elif discard and max(reserve, again) <= free:
            yield _Choice(start, end, 'F', j, False)

    def _backwards(self, device: int, j: int) -> Iterator[_Choice]:
        problem = self._problem
        i = len(self._backward[j])
        if i == len(self._forward[j]):
            return
        arrives = self._forward[j][i]
        if j < len(problem.places) - 1:
            if len(self._backward[j + 1]) == i:
                return
            arrives = self._backward[j + 1][i] + problem.back[j]
        start = max(self._now[device], arrives)
        end = start
        if i in self._again[j]:  # It is recomputed while the gradient is on its way.
            if problem.activations[j] > self._room[device] - self._used[device]:
                return
            start = max(self._now[device], arrives - problem.seconds['R'][j])
            end = start + problem.seconds['R'][j]
        kind = 'I' if self._choose.splits(j, i) else 'B'
        yield _Choice(start, end + problem.seconds[kind][j], kind, j)

    def _act(self, device: int, choice: _Choice) -> None:
        problem = self._problem
        _, end, kind, j, keeps = choice
        i = self._number(choice)
        row = self.rows[device]
        size = problem.activations[j]
        self._now[device] = end
        if kind == 'F':
            self._forward[j].append(end)
            self._coming[device] -= problem.seconds['F'][j]
            self._used[device] += problem.kept[j] + size * keeps
            if not keeps:
                self._again[j].append(i)
        elif kind != 'W':
            self._backward[j].append(end)
            self._coming[device] -= problem.passes[j]
            if i in self._again[j]:
                self._again[j].remove(i)
                self._used[device] += size
                row.append(Action(j, 'R', i))
            if kind == 'I':
                self._open[j].append(i)
        else:
            self._open[j].pop(0)
        if kind in 'BW':
            self._weights[device] -= problem.later[j]
            self._used[device] -= problem.kept[j] + size
            self._done[j] += 1
        row.append(Action(j, kind, i))


#: The number of actions that are placed in a search. One takes about 40 microseconds.
EFFORT = 120_000

#: How often the room of list scheduling is reduced until a result fits.
ROUNDS = 4

#: The most schedules that are changed in turn.
POOL = 8
#: The least changes of each of them.
CHANGES = 40


class _OrderSearch:
    """A search over orders, for stages on given devices."""

    def __init__(self, costs: Costs, places: Sequence[int], m: int, limits: Limits) -> None:
        self._problem = _Problem(costs, places, m, limits)
        self._costs = costs
        self._limits = limits
        self._m = m
        self._number = len(places)
        self.places = tuple(places)
        #: Whether memory is limited. Otherwise nothing is recomputed.
        self._limited = any(limit is not None for limit in limits)
        #: Results that fit, by their seconds.
        self._found: dict[float, tuple[Schedule, Simulation]] = {}
        #: The fastest named schedule: its seconds, its name and its checkpoint mode.
        self.named: tuple[float, str, str] | None = None
        #: The least bytes by which the devices exceed their limits.
        self.closest = inf
        self.effort = 0

    @property
    def seconds(self) -> float:
        """The time of the best result, or infinity."""
        return self.best[1].seconds if self._found else inf

    @property
    def best(self) -> tuple[Schedule, Simulation]:
        """The best result."""
        return self._found[min(self._found)]

    def run(self, effort: int) -> None:
        """Search until an effort has been made, or the result is as fast as possible."""
        self._start(effort)
        self._move(effort)

    def _start(self, effort: int) -> None:
        """Try the named schedules and some rules."""
        n = len(self._problem.own)
        number = self._number
        m = self._m
        for name in NAMES:
            v = number // n
            least, most = stages_per_device(name)
            if least <= v <= most and places_of(name, n, v) == self.places:
                for mode in ('never', 'except_last', 'always'):
                    schedule = make(name, n, m, v).recomputing(checkpoint_stops(mode, m, number))
                    seconds, _ = self._checked(schedule)
                    if seconds < (self.named[0] if self.named else inf):
                        self.named = seconds, name, mode
        keeps = (m, 1) if self._limited else (m,)
        for split, waits, keep, deep in product((True, False), (True, False), keeps, (1, 2, m)):
            depths = tuple(min(m, deep * (number - j)) for j in range(number))
            if self.effort < effort:
                self._tried(_Rules(depths, keep, split, waits), inf)

    def _move(self, effort: int) -> None:
        """Move places of actions in the best results, and replace these by better ones."""
        random = Random(0)  # Each search has the same result.
        size = 3 * self._number * self._m
        number = max(1, min(POOL, (effort - self.effort) // size // CHANGES))
        pool = [self._found[seconds] for seconds in sorted(self._found)[:number]]
        while pool and self._goes_on(effort):
            k = min(random.randrange(len(pool)), random.randrange(len(pool)))
            _, simulation = pool[k]
            places = _Places(simulation, self._m, random, self._limited)
            found = self._tried(places, simulation.seconds)
            if found <= simulation.seconds * (1 + 1e-9):
                pool[k] = self._found[_rounded(found)]

    def _goes_on(self, effort: int) -> bool:
        return self.effort < effort and self.seconds > self._problem.least * (1 + 1e-9)

    def _tried(self, choose: _Rules | _Places, most: float) -> float:
        """Return the seconds of a result, or infinity if it does not fit or takes longer."""
        less = [0.0] * len(self._limits)
        for _ in range(ROUNDS):
            run = _Listing(self._problem, choose, less)
            seconds = run.run()
            self.effort += 1 + sum(map(len, run.rows))
            if seconds > most * (1 + 1e-9) or seconds == inf:  # A simulation would say no less.
                return inf
            seconds, over = self._checked(Schedule(tuple(map(tuple, run.rows))))
            if not any(over):
                return seconds
            less = [one + other for one, other in zip(less, over)]
        return inf

    def _checked(self, schedule: Schedule) -> tuple[float, list[float]]:
        """Return the seconds of a schedule if it fits, and its excess over the limits."""
        simulation = simulate(schedule, self._costs)
        over = excess(simulation.peak_bytes, self._limits)
        self.closest = min(self.closest, sum(over))
        if any(over):
            return inf, over
        key = _rounded(simulation.seconds)
        if key not in self._found or _size(schedule, simulation) < _size(*self._found[key]):
            self._found[key] = schedule, simulation
        return simulation.seconds, over


def _rounded(seconds: float) -> float:
    """Return a time that other orders of additions do not change."""
    return float(f'{seconds:.12g}')


def _size(schedule: Schedule, simulation: Simulation) -> tuple[float, int]:
    """Return the bytes of the fullest device, and the number of actions."""
    return max(simulation.peak_bytes), sum(map(len, schedule.rows))


@dataclass(frozen=True)
class FoundSchedule:
    """A schedule for given costs; :func:`search_schedule` finds it."""

    #: The schedule.
    schedule: Schedule
    #: Its simulation, with the time and memory of each device.
    simulation: Simulation
    #: The device of each stage.
    places: tuple[int, ...]
    #: The fastest schedule of :data:`torchgpipe.schedule.NAMES` that fits, its checkpoint mode and
    #: its seconds, if there is one.
    named: tuple[str, str, float] | None

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return self.simulation.seconds

    @property
    def gain(self) -> float | None:
        """The part of the time of the fastest named schedule that is saved, from 0 to 1."""
        if self.named is None:
            return None
        if self.named[-1]:
            return 1 - self.seconds / self.named[-1]
        return 0.0

    def __str__(self) -> str:
        again = sum(action.kind == 'R' for row in self.schedule.rows for action in row)
        text = (
            f'{self.seconds:.4g} s, {format_bytes(max(self.simulation.peak_bytes))}, '
            f'{again} recomputations; '
        )
        if self.named is None:
            return text + 'no named schedule fits'
        name, mode, seconds = self.named
        return (
            f'{text}{self.gain:.1%} less time than {name!r}, checkpoint={mode!r}: {seconds:.4g} s'
        )


def search_schedule(
    costs: Costs,
    devices: int,
    micro_batches: int,
    memory_limit: MemoryLimit = None,
    *,
    places: Sequence[int] | None = None,
    effort: int = EFFORT,
) -> FoundSchedule:
    """Search the schedule whose step ends first, within the memory of devices.

    It begins with the named schedules and changes the order of actions, whether backward is split,
    and which micro-batches are recomputed. It is not slower by the simulation than the best of
    them that fits, with checkpoints for no micro-batch, for all but the last, or for all. Stages
    may be unequal, and so may links. The result is found by trial, and need not be the optimum.

    >>> from torchgpipe.plan import StageCosts
    >>> costs = Costs([StageCosts(1.0, 2.0, activation_bytes=3.0)] * 3)
    >>> found = search_schedule(costs, devices=3, micro_batches=6, memory_limit=6.0)
    >>> print(found)
    22 s, 6 B, 3 recomputations; 24.1% less time than 'gpipe', checkpoint='except_last': 29 s

    ``model.step(…, schedule=found.schedule)`` runs it, with ``checkpoint='never'``, because the
    schedule says which micro-batches are recomputed.

    Args:
        costs: The costs of the stages; ``recomputed`` of a stage is not used.
        devices: The number of devices.
        micro_batches: The number of micro-batches.
        memory_limit: Bytes of each device: one number for all of them, or one for each, where
            ``None`` is no limit.
        places: The device of each stage. By default as in the named schedules: for several
            stages on a device, one device after the other, and in a V if these are two.
        effort: The number of actions to place in trials, each of which takes about 40
            microseconds. The named schedules, and the trial in progress, come in addition.

    Returns:
        The schedule, its simulation, and the named schedule that it is compared with.

    Raises:
        TypeError: A number is not an integer.
        ValueError: An argument is wrong, or no schedule was found that keeps the limits.
    """
    n = positive(devices, 'devices')
    m = positive(micro_batches, 'micro_batches')
    limits = memory_limits(memory_limit, n, 'devices')
    costs.check_links(n)
    number = len(costs.stages)
    costs = replace(costs, stages=tuple(replace(each, recomputed=0) for each in costs.stages))
    options = (
        {tuple(map(index, places))}
        if places is not None
        else {
            places_of(name, n, number // n)
            for name in NAMES
            if number % n == 0 and (span := stages_per_device(name))[0] <= number // n <= span[1]
        }
    )
    for each in options:
        if len(each) != number or {*each} != {*range(n)}:
            raise ValueError(
                f'places are {each}: they must be one of {n} devices for each of {number} stages'
            )
    if not options:
        raise ValueError(
            f'{number} stages on {n} devices: give each device equally many, or say '
            'the device of each stage, places=…'
        )
    searches = [_OrderSearch(costs, each, m, limits) for each in sorted(options)]
    with uncollected():
        for search in searches:
            search.run(positive(effort, 'effort') // len(searches))
    if all(each.seconds == inf for each in searches):
        closest = min(each.closest for each in searches)
        much = (
            'Devices wait for memory'
            if closest == inf
            else (f'The closest one takes {format_bytes(closest)} too much, over all devices')
        )
        raise ValueError(
            f'no schedule keeps the memory limit. {much}: take more or larger '
            'devices, smaller micro-batches, or stages of other sizes'
        )
    best = min(
        [each for each in searches if each.seconds < inf],
        key=lambda each: (_rounded(each.seconds), _size(*each.best)),
    )
    named = min([each.named for each in searches if each.named], default=None)
    return FoundSchedule(*best.best, best.places, named and (*named[1:], named[0]))
