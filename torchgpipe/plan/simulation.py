"""Simulate a step: actions and memory of devices over time, given the costs of stages.

:func:`simulate` runs each device through its row of the schedule. An action starts as soon as its
predecessors have ended and their results have arrived. Copies run concurrently with computation.
A link carries the copies from one device to another one after the other, in the order of
:func:`torchgpipe.schedule.messages.with_messages`::

    device 0    0F0 0F1 0F2 …
    link            ══0F0══ ══0F1══ ══0F2══      (then the latency)
    device 1                1F0     1F1     1F2 …

So the times do not depend on the order in which devices are simulated. Each device continues until
an action's predecessor is missing. That order is kept: another simulation of the schedule, with
other costs, needs one pass.

Replicas add collectives, one after the other, beside the actions of a device. They have the places
of :func:`torchgpipe.schedule.messages.with_unit_actions`: a stage waits for the gather of its
parameters, and its gradients are reduced after its last action. In buckets, they are so within it,
if it is a backward::

    actions                  0F0 0F1   2F0 2F1 … 2B0 2B1   0B0 0B1
    collectives    gather 0  gather 2                      reduce 2    reduce 0   update
    in buckets                                      reduce 2    reduce 0   update
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from torchgpipe.plan.costs import Costs
from torchgpipe.plan.memory import Collected, Line, bytes_over_time, parts_at
from torchgpipe.schedule.messages import ACTIVE, UnitAction, with_unit_actions
from torchgpipe.schedule.schedule import KINDS, WAITS, Action, Schedule, Timed

#: By device, bytes or no limit.
Limits = Sequence[float | None]

#: By stage and kind of an action, its predecessors: their stages, kinds and edges.
Waits = dict[tuple[int, str], list[tuple[int, str, int]]]


@dataclass(frozen=True)
class Simulation:
    """A predicted step; :func:`simulate` makes it.

    >>> from torchgpipe.plan import StageCosts, simulate
    >>> from torchgpipe.schedule import make
    >>> stage = StageCosts(forward=1.0, backward=2.0, activation_bytes=8.0)
    >>> simulation = simulate(make('1f1b', devices=2, micro_batches=4), Costs([stage] * 2))
    >>> simulation.seconds, round(simulation.bubble, 2), simulation.peak_bytes
    (15.0, 0.2, (16.0, 8.0))
    """

    #: When each action starts and ends, row after row of the schedule.
    actions: tuple[Timed, ...]
    #: The costs of the stages.
    costs: Costs
    #: The number of devices, rows of the schedule.
    devices: int
    #: Collectives over replicas and updates, in order for each device.
    collected: tuple[Collected, ...] = ()

    @cached_property
    def seconds(self) -> float:
        """The time of the step."""
        return max(chain((x.end for x in self.actions), (x.end for x in self.collected)))

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The seconds for which each device runs actions."""
        busy = [0.0] * self.devices
        for timed in self.actions:
            busy[timed.device] += timed.end - timed.start
        return tuple(busy)

    @property
    def bubble(self) -> float:
        """The part of the devices' time in which they are idle, from 0 to 1."""
        if self.seconds:
            return 1 - sum(self.busy) / (self.devices * self.seconds)
        return 0.0

    @cached_property
    def bytes(self) -> tuple[Line, ...]:
        """The memory of each device over time, as pairs of a second and bytes from then on."""
        return bytes_over_time(self.actions, self.costs, self.devices, self.collected)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most bytes that each device holds at a time."""
        peaks = []
        for line in self.bytes:
            peaks.append(max(bytes for _, bytes in line))
        return tuple(peaks)

    @cached_property
    def peak_parts(self) -> tuple[dict[str, float], ...]:
        """The bytes of each device at its peak, by kind of ``MEMORY``."""
        peaks = [max(line, key=itemgetter(1))[0] for line in self.bytes]
        return parts_at(peaks, self.actions, self.costs, self.collected)


def simulate(
    schedule: Schedule, costs: Costs, pairs: Iterable[tuple[Action, Action]] = ()
) -> Simulation:
    r"""Predict when each action of a schedule starts and ends.

    >>> from torchgpipe.plan import StageCosts
    >>> schedule = Schedule.parse('0F0,0B0\n1F0,1B0')
    >>> simulation = simulate(schedule, Costs([StageCosts(1.0, 2.0), StageCosts(2.0, 3.0)]))
    >>> [f'{x.action} {x.start:.0f}-{x.end:.0f}' for x in simulation.actions]
    ['0F0 0-1', '0B0 6-8', '1F0 1-3', '1B0 3-6']

    Args:
        schedule: A schedule that :meth:`~torchgpipe.schedule.Schedule.validate` accepts.
        costs: Costs of its stages.
        pairs: Additional pairs of actions, the second of which waits for the first.

    Raises:
        ValueError: The costs are for another number of stages, or the schedule deadlocks.
    """
    if not any(schedule.rows):
        raise ValueError('the schedule is empty')
    places = {action.stage: device for device, row in enumerate(schedule.rows) for action in row}
    if len(costs.stages) != 1 + max(places):
        raise ValueError(
            f'costs are those of {len(costs.stages)} stages, but the schedule has '
            f'{1 + max(places)}'
        )
    costs.check_links(len(schedule.rows))
    order = _order(schedule, tuple((skip.source, skip.target) for skip in costs.skips), (*pairs,))
    if order is None:
        schedule.validate()
        raise ValueError('the schedule cannot go on with what actions wait for as well')
    lanes = _Collectives(schedule, costs)
    starts, ends = _times(order, costs, lanes)
    timed = []
    for device, row in enumerate(order.rows):
        timed.append(tuple(Timed(device, order.actions[k], starts[k], ends[k]) for k in row))
    return Simulation(
        tuple(chain.from_iterable(timed)), costs, len(schedule.rows), tuple(lanes.collected(timed))
    )


class _Collectives:
    """The collectives over replicas, in a lane for each device beside its actions."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._costs = costs
        #: The exchanges before and after an action, if there are any.
        self.exchanges = (
            _exchanges(schedule, any(each.gather for each in costs.stages))
            if costs.overlap is None and any(x.gather or x.reduction for x in costs.stages)
            else {}
        )
        #: By device, the seconds for which gathers keep it from its first action.
        self.start = [sum(_gathers(row, costs).values()) for row in schedule.rows]
        self._free = [0.0] * len(schedule.rows)
        self._ready = defaultdict[int, float](float)
        self._found: list[list[Collected]] = [[] for _ in schedule.rows]

    def before(self, device: int, action: Action, now: float) -> float:
        """Start the gathers before an action, and return the time at which it can start."""
        for kind, stage in self.exchanges[action][0]:
            self._add(device, stage, kind, now)
        return self._ready[action.stage]

    def after(self, device: int, action: Action, start: float, end: float) -> None:
        """Start the reductions of an action: in buckets within it, if it is a backward."""
        for kind, stage in self.exchanges[action][1]:
            buckets = 1
            if action.kind == 'B' and action.stage == stage:
                buckets = self._costs.stages[stage].buckets
            self._reduce(device, stage, kind, buckets, start, end)

    def _reduce(
        self, device: int, stage: int, kind: str, buckets: int, start: float, end: float
    ) -> None:
        """Reduce buckets, which an action completes in equal parts of its time."""
        seconds = self._costs.stages[stage].reduction / buckets
        free = self._free[device]
        first = 0.0
        for k in range(1, buckets + 1):
            complete = end - (end - start) * (buckets - k) / buckets
            begin = max(free, complete) if seconds else complete
            free = begin + seconds
            if k == 1:
                first = begin
        self._free[device] = max(self._free[device], free)
        self._ready[stage] = free
        self._found[device].append(Collected(device, stage, kind, first, free))

    def _add(self, device: int, stage: int, kind: str, now: float) -> None:
        seconds = 0.0 if kind == 'free' else getattr(self._costs.stages[stage], kind)
        start = max(self._free[device], now) if seconds else now
        self._free[device] = max(self._free[device], start + seconds)
        self._ready[stage] = start + seconds
        self._found[device].append(Collected(device, stage, kind, start, start + seconds))

    def collected(self, rows: Sequence[Sequence[Timed]]) -> Iterator[Collected]:
        """Yield the collectives, and the updates after them."""
        stages = self._costs.stages
        overlap = self._costs.overlap
        for device, row in enumerate(rows):
            yield from self._found[device]
            last = {x.action.stage: (x.start, x.end) for x in row}
            free = max(self._free[device], *(end for _, end in last.values()))
            if not self.exchanges:
                now = 0.0
                end = free
                free = 0.0
                for stage, seconds in _gathers((x.action for x in row), self._costs).items():
                    yield Collected(device, stage, 'gather', now, now + seconds)
                    now += seconds
                for stage, (start, stop) in sorted(last.items(), key=itemgetter(1)):
                    start = max(free, start if overlap else end)
                    free = max(stop, start + stages[stage].reduction)
                    yield Collected(device, stage, 'reduction', start, free)
            for stage in last:
                yield Collected(device, stage, 'update', free, free + stages[stage].update)
                free += stages[stage].update


def _gathers(row: Iterable[Action], costs: Costs) -> dict[int, float]:
    """Return the seconds for which gathers of stages keep a row from its first action.

    With overlap, the first stage is gathered while it runs, layer by layer; the others later.
    """
    stages = {action.stage: costs.stages[action.stage] for action in row}
    if costs.overlap is False:
        return {stage: each.gather for stage, each in stages.items()}
    return {
        stage: max(0.0, each.gather - each.forward)
        for stage, each in [*stages.items()][:1]
        if costs.overlap
    }


#: Kinds of collectives, by the kinds in rows.
_KINDS = {'UNSHARD': 'gather', 'RESHARD': 'free', 'REDUCE_GRAD': 'reduction'}


@lru_cache(maxsize=8)
def _exchanges(
    schedule: Schedule, gathers: bool
) -> dict[Action, tuple[list[tuple[str, int]], list[tuple[str, int]]]]:
    """Return kinds and stages of the exchanges before and after each action."""
    found: dict[Action, Any] = {}
    for row in schedule.rows:
        stages = {action.stage: action.stage for action in row}
        learned = stages if any(action.kind in 'BW' for action in row) else ()
        before: list[tuple[str, int]] = []
        last = before
        for each in with_unit_actions(row, stages, ACTIVE if gathers else 0, learned):
            if isinstance(each, Action):
                found[each] = before, last = before, []
                before = []
            elif isinstance(each, UnitAction):
                (last if each.kind == 'REDUCE_GRAD' else before).append(
                    (_KINDS[each.kind], each.stage)
                )
    return found


class _Order(NamedTuple):
    """A schedule in an order in which each action comes after its predecessors.

    It does not depend on costs, so that simulations of one schedule share it.
    """

    actions: list[Action]
    #: By action, its device.
    devices: list[int]
    #: The predecessors of all actions, as indices of actions and of edges, and by action the end
    #: of its own ones. One list of numbers is no work for the garbage collector.
    before: list[int]
    over: list[int]
    stops: list[int]
    #: By action, the places of its results in ``before``, in the order in which they are sent.
    results: list[tuple[int, ...]]
    #: Messages between stages: from, to, and the index of the skip that it carries, if any.
    edges: list[tuple[int, int, int | None]]
    #: By device, the indices of its actions.
    rows: list[list[int]]
    #: By stage, its device.
    places: dict[int, int]
    #: Backwards that include a recomputation, if the stage recomputes the micro-batch.
    without_r: list[int]


@lru_cache(maxsize=8)
def _order(
    schedule: Schedule,
    skips: tuple[tuple[int, int], ...],
    pairs: tuple[tuple[Action, Action], ...],
) -> _Order | None:
    """Return the order of a schedule, or ``None`` if devices deadlock or an action is repeated."""
    places = {action.stage: device for device, row in enumerate(schedule.rows) for action in row}
    #: By action, its index, or -1 as long as it has none.
    index: dict[tuple[int, str, int], int] = {x: -1 for row in schedule.rows for x in row}
    if len(index) < sum(map(len, schedule.rows)):
        return None
    edges: list[tuple[int, int, int | None]] = [(0, 0, None)]
    waits = _waits(places, skips, edges)
    also: dict[Action, list[Action]] = defaultdict(list)
    for one, later in pairs:
        also[later].append(one)
    found = _Order([], [], [], [], [], [], edges, [[] for _ in schedule.rows], places, [])
    waiting: dict[Any, list[int]] = defaultdict(list)
    rows = [iter(row) for row in schedule.rows]
    stopped: list[Action | None] = [next(row, None) for row in rows]
    ready = [*range(len(rows))]
    while ready:
        device = ready.pop()
        while (action := stopped[device]) is not None:
            stage, kind, i = action
            before = [
                (index[other], edge, other)
                for s, k, edge in waits[stage, kind]
                if (other := (s, k, i)) in index
            ]
            before += [
                (index[other], 0, other) for other in also.get(action, ()) if other in index
            ]
            first, _, other = min(before, default=(0, 0, action))
            if first < 0:
                waiting[other].append(device)
                break
            number = index[action] = len(found.actions)
            found.actions.append(action)
            found.devices.append(device)
            found.before.extend(one for one, _, _ in before)
            found.over.extend(edge for _, edge, _ in before)
            found.stops.append(len(found.before))
            found.rows[device].append(number)
            if kind in 'BI' and (stage, 'R', i) not in index:
                found.without_r.append(number)
            ready += waiting.pop(action, ())
            stopped[device] = next(rows[device], None)
    if any(stopped):
        return None
    found.results.extend(_results(found))
    return found


def _results(order: _Order) -> Iterator[tuple[int, ...]]:
    """Yield for each action the places of its results in ``before``.

    A device runs the nearest stage first, because others of its stages wait for that.
    """
    results: list[list[int]] = [[] for _ in order.actions]
    for place, source in enumerate(order.before):
        results[source].append(place)
    for places in results:
        yield tuple(places)


def _waits(
    places: dict[int, int],
    skips: Iterable[tuple[int, int]],
    edges: list[tuple[int, int, int | None]],
) -> Waits:
    """Return the predecessors of actions by stage and kind, and add the edges from them."""
    waits: Waits = {(stage, kind): [] for stage in places for kind in KINDS}

    def add(stage: int, kind: str, other: int, what: str, skip: int | None) -> None:
        if other in places and stage in places:
            waits[stage, kind].append((other, what, len(edges)))
            edges.append((other, stage, skip))

    for stage, kind in [*waits]:
        for on, what in WAITS[kind]:
            add(stage, kind, stage + on, what, None)
    for number, (source, target) in enumerate(skips):
        add(target, 'F', source, 'F', number)
        for kind in 'BI':
            for what in 'BI':
                add(source, kind, target, what, number)
    return waits


def _times(order: _Order, costs: Costs, lanes: _Collectives) -> tuple[list[float], list[float]]:
    """Return the start and end of each action."""
    kinds = {
        (j, kind): stage.seconds(kind) for j, stage in enumerate(costs.stages) for kind in KINDS
    }
    seconds = [kinds[stage, kind] for stage, kind, _ in order.actions]
    stops = costs.stops
    for k in order.without_r if any(stops) else ():
        stage, _, i = order.actions[k]
        if i < stops[stage]:
            seconds[k] += kinds[stage, 'R']
    transfers = [_transfer(order, edge, costs) for edge in order.edges]
    #: By the devices of a link, when it has carried the copies so far.
    free: dict[tuple[int, int], float] = defaultdict(float)
    starts: list[float] = []
    ends: list[float] = []
    #: By place in ``before``, when the result is where it is needed.
    arrivals = [0.0] * len(order.before)
    past = 0
    now = [*lanes.start]
    for action, device, stop, length, results in zip(
        order.actions, order.devices, order.stops, seconds, order.results
    ):
        start = now[device]
        if lanes.exchanges:
            start = max(start, lanes.before(device, action, start))
        for arrival in arrivals[past:stop]:
            if arrival > start:
                start = arrival
        past = stop
        end = start + length
        starts.append(start)
        now[device] = end
        ends.append(end)
        for place in results:
            transfer = transfers[order.over[place]]
            arrivals[place] = end
            if transfer is not None:
                leaves = max(end, free[transfer.devices]) + transfer.seconds
                free[transfer.devices] = leaves
                arrivals[place] = leaves + transfer.latency
        if lanes.exchanges:
            lanes.after(device, action, start, end)
    return starts, ends


class _Transfer(NamedTuple):
    """A copy of the result of an action to another device."""

    #: The devices.
    devices: tuple[int, int]
    #: How long the link carries nothing else.
    seconds: float
    #: How long the copy takes in addition.
    latency: float


def _transfer(order: _Order, edge: tuple[int, int, int | None], costs: Costs) -> _Transfer | None:
    """Return the copy over an edge; ``None`` within a device."""
    source, target, skip = edge
    devices = order.places[source], order.places[target]
    if devices[0] == devices[1]:
        return None
    if skip is None:
        bytes = costs.stages[min(source, target)].output_bytes
    else:
        bytes = costs.skips[skip].bytes
    link = costs.link(*devices)
    return _Transfer(devices, bytes / link.bandwidth, link.latency)


#: The least number of micro-batches that are simulated, if there are as many.
FEW = 48


def few(name: str, devices: int, m: int) -> tuple[int, int]:
    """Return two numbers of micro-batches between which a schedule is in its steady state."""
    groups = max(3, -(-FEW // devices))
    # Only interleaved stages take groups of as many micro-batches as there are devices.
    rest = m % devices if name == 'interleaved' else 0
    return (groups - 1) * devices + rest, groups * devices + rest


def excess(bytes: Sequence[float], limits: Limits) -> list[float]:
    """Return the bytes by which each device exceeds its limit."""
    return [0.0 if limit is None else max(0.0, size - limit) for size, limit in zip(bytes, limits)]
