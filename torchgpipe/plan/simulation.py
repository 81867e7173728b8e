"""Simulate a step: actions and memory of devices over time, given the costs of stages.

:func:`simulate` runs each device through its row of the schedule. An action starts as soon as its
predecessors have ended and their results have arrived. Any number of copies run concurrently with
the computation::

    device 0    0F0 ─────▶ 0F1 ───────▶ 0B0
                  ╲ copy                 ╱ copy
    device 1       ▶ 1F0 ─────▶ 1B0 ────╱

So the times do not depend on the order in which devices are simulated. Each device continues until
an action's predecessor is missing. That order is kept: another simulation of the schedule, with
other costs, needs one pass.

For one micro-batch, :func:`bytes_over_time` counts on a device::

    F ─────────────────────────▶ B or W     activations; if recomputed, from R on
    F of the stage before ─────▶ B or W     the input, from another device or recomputed there;
                                            a skip waits there, and is here from its F on
          B of the next stage ─▶ B          the gradient of the output
                              B ──▶ B       temporary memory of a backward
    F ─────────────────────────▶ B or W     the output of the last stage, or its gradient
                       the first B ──▶ end  gradients of parameters
    B ───▶ F or B of a later micro-batch    a message that has been sent, if devices hold some

While a stage keeps its activations, its output is one of them. Copies start at once, so an input
waits on the device that receives it.

Replicas add collectives, one after the other, beside the actions of a device. They have the places
of :func:`torchgpipe.schedule.messages.with_unit_actions`: a stage waits for the gather of its
parameters, and its gradients are reduced after its last action. In buckets, they are so within it,
if it is a backward::

    actions                  0F0 0F1   2F0 2F1 … 2B0 2B1   0B0 0B1
    collectives    gather 0  gather 2                      reduce 2    reduce 0   update
    in buckets                                      reduce 2    reduce 0   update
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple

from torchgpipe.plan.costs import Costs
from torchgpipe.schedule.messages import ACTIVE, UnitAction, with_unit_actions
from torchgpipe.schedule.schedule import KINDS, WAITS, Action, Schedule, Timed

#: By device, bytes or no limit.
Limits = Sequence[float | None]

#: Pairs of a second and the bytes that a device holds from then on.
Line = tuple[tuple[float, float], ...]

#: When each action runs, by stage, kind and micro-batch.
Times = dict[tuple[int, str, int], Timed]

#: By stage and kind of an action, its predecessors: their stages, kinds and edges.
Waits = dict[tuple[int, str], list[tuple[int, str, int]]]


class Collected(NamedTuple):
    """A collective over replicas, or the update after it, with its time."""

    #: The row of the schedule.
    device: int
    #: The stage whose parameters are involved.
    stage: int
    #: ``'gather'``, ``'free'`` (of gathered parameters), ``'reduction'`` or ``'update'``.
    kind: str
    #: Seconds from the start of the step.
    start: float
    #: Seconds from the start of the step.
    end: float


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
        parts: list[dict[str, float]] = [defaultdict(float) for _ in peaks]
        times: Times = {x.action: x for x in self.actions}
        for device, size in enumerate(_resident(times, self.costs, self.devices)):
            parts[device]['resident'] = size
        for hold in _all_holds(times, self.costs, self.collected):
            if hold.start <= peaks[hold.device] < hold.end:
                parts[hold.device][hold.kind] += hold.bytes
        return tuple(map(dict, parts))


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
    found = _Order([], [], [], [], [], edges, [[] for _ in schedule.rows], places, [])
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
    return None if any(stopped) else found


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
    delays = [
        _delay(
            order.places[one],
            order.places[other],
            costs,
            costs.stages[min(one, other)].output_bytes
            if skip is None
            else costs.skips[skip].bytes,
        )
        for one, other, skip in order.edges
    ]
    starts: list[float] = []
    ends: list[float] = []
    before = zip(order.before, order.over)
    past = 0
    now = [*lanes.start]
    for action, device, stop, length in zip(order.actions, order.devices, order.stops, seconds):
        start = now[device]
        if lanes.exchanges:
            start = max(start, lanes.before(device, action, start))
        for other, edge in islice(before, stop - past):
            arrives = ends[other] + delays[edge]
            if arrives > start:
                start = arrives
        past = stop
        starts.append(start)
        now[device] = start + length
        ends.append(start + length)
        if lanes.exchanges:
            lanes.after(device, action, start, start + length)
    return starts, ends


def _delay(one: int, other: int, costs: Costs, bytes: float) -> float:
    if one == other:
        return 0.0
    return costs.link(one, other).seconds(bytes)


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


#: Kinds of memory: in use throughout, saved for backward, inputs of stages, gradients of outputs
#: and of parameters, messages that were sent, temporary, and the output of the model.
MEMORY = (
    'resident',
    'activations',
    'inputs',
    'gradients',
    'parameter gradients',
    'messages',
    'backward',
    'output',
)


class _Hold(NamedTuple):
    """Memory that a device holds from one time to another."""

    device: int
    start: float
    end: float
    bytes: float
    kind: str


def _resident(times: Times, costs: Costs, devices: int) -> list[float]:
    resident = [0.0] * devices
    for stage, device in {action[0]: x.device for action, x in times.items()}.items():
        resident[device] += costs.stages[stage].resident_bytes
    return resident


def _gathered(collected: Sequence[Collected], costs: Costs) -> Iterator[_Hold]:
    """Yield the memory of gathered parameters."""
    starts: dict[int, float] = {}
    end_of_step = max((exchange.end for exchange in collected), default=0.0)
    for device, stage, kind, start, end in collected:
        if kind == 'gather':
            starts[stage] = start
            # The parts of all ranks, before they are parameters.
            yield _Hold(device, start, end, costs.stages[stage].gathered_bytes, 'resident')
        elif stage in starts:  # by a free or a reduction
            if kind != 'free' and costs.stages[stage].tied_bytes:
                end = end_of_step  # Tied parameters are exchanged as whole ones.
            yield _Hold(
                device, starts.pop(stage), end, costs.stages[stage].gathered_bytes, 'resident'
            )


def bytes_over_time(
    actions: Iterable[Timed], costs: Costs, devices: int, collected: Sequence[Collected] = ()
) -> tuple[Line, ...]:
    """Return the memory that each device holds over time."""
    times: Times = {x.action: x for x in actions}
    resident = _resident(times, costs, devices)
    changes: list[list[tuple[float, float]]] = [[] for _ in range(devices)]
    for device, start, end, bytes, _ in _all_holds(times, costs, collected):
        if bytes:
            changes[device] += [(start, bytes), (end, -bytes)]
    lines = []
    for now, changed in zip(resident, changes):
        line = {0.0: now}
        for second, bytes in sorted(changed):
            now += bytes
            line[second] = now  # with all that ends and starts at that time
        lines.append((*line.items(),))
    return tuple(lines)


def _is_recomputed(times: Times, costs: Costs, stage: int, i: int) -> bool:
    return (stage, 'R', i) in times or i < costs.stages[stage].recomputed


def _all_holds(times: Times, costs: Costs, collected: Sequence[Collected]) -> Iterator[_Hold]:
    """Yield all memory that is not in use throughout the step."""
    yield from _holds(times, costs)
    yield from _gathered(collected, costs)
    end = 0.0
    #: By device, the end of its last action.
    last: dict[int, float] = {}
    for timed in times.values():
        last[timed.device] = max(timed.end, last.get(timed.device, 0.0))
        end = max(end, timed.end)
    for exchange in collected:
        end = max(end, exchange.end)
    # A device waits for its messages, and then exchanges gradients of tied parameters.
    ties = {device: (second + end) / 2 for device, second in last.items()}

    yield from _casts(times, costs)
    yield from _parameter_gradients(times, costs, end)
    yield from _reduced(times, costs, collected)
    for stage, device in {stage: timed.device for (stage, _, _), timed in times.items()}.items():
        size = costs.stages[stage].tied_bytes
        yield _Hold(device, ties[device], end, size, 'parameter gradients')
    if costs.messages:
        yield from _sent(times, costs, ties)


def _casts(times: Times, costs: Costs) -> Iterator[_Hold]:
    """Yield the memory of copies of parameters in another dtype."""
    spans: dict[int, list[Timed]] = defaultdict(list)
    for (stage, _, _), timed in times.items():
        spans[stage].append(timed)
    for stage, actions in spans.items():
        start = min(timed.start for timed in actions)
        stop = max(timed.end for timed in actions)
        yield _Hold(actions[0].device, start, stop, costs.stages[stage].cast_bytes, 'activations')


def _parameter_gradients(times: Times, costs: Costs, end: float) -> Iterator[_Hold]:
    """Yield the memory of gradients of parameters: see :class:`StageCosts`."""
    first: dict[int, Timed] = {}
    for (stage, kind, _), timed in times.items():
        is_last_part = kind == 'B' or kind == ('W' if costs.stages[stage].is_split else 'I')
        if is_last_part and (stage not in first or timed.end < first[stage].end):
            first[stage] = timed
    for stage, timed in first.items():
        size = costs.stages[stage].gradient_bytes
        middle = _middle(costs, timed)
        halves = costs.stages[stage].halves
        if halves is not None and middle < timed.end:
            early = size * (1 - halves.share)
            yield _Hold(timed.device, middle, timed.end, early, 'parameter gradients')
        yield _Hold(timed.device, timed.end, end, size, 'parameter gradients')


def _reduced(times: Times, costs: Costs, collected: Iterable[Collected]) -> Iterator[_Hold]:
    """Yield the memory of the last buckets: copies of gradients, until their sums replace these.

    Earlier buckets are reduced within the last backward, while it frees activations.
    """
    last: dict[int, float] = {}
    for (stage, _, _), timed in times.items():
        last[stage] = max(timed.end, last.get(stage, 0.0))
    for device, stage, kind, start, end in collected:
        if kind == 'reduction':
            size = costs.stages[stage].bucket_bytes
            yield _Hold(device, max(start, last[stage]), end, size, 'parameter gradients')


def _middle(costs: Costs, timed: Timed) -> float:
    """Return the time from which a backward holds gradients of parameters, not activations."""
    stage, kind, _ = timed.action
    costs_of_stage = costs.stages[stage]
    is_backward = kind == 'B' or (kind == 'I' and not costs_of_stage.is_split)
    if is_backward and costs_of_stage.halves is not None:
        return (timed.start + timed.end) / 2
    return timed.end


def _sent(times: Times, costs: Costs, ends: Mapping[int, float]) -> Iterator[_Hold]:
    """Yield the memory of messages that a device has sent, while nothing else holds them.

    Args:
        ends: By device, the second until which it waits for all of them.
    """
    #: By sender and receiver, the time of each message, the time until something else holds it,
    #: and its size.
    messages: dict[tuple[int, int], list[tuple[float, float, float]]] = defaultdict(list)
    for (stage, kind, i), timed in times.items():
        if kind == 'F':
            receiver = times.get((stage + 1, 'F', i))
            size = costs.stages[stage].output_bytes
            last = timed
            if not _is_recomputed(times, costs, stage, i):
                last = _last(times, costs, stage, i) or timed
        elif kind in 'BI':
            receiver = _backward(times, stage - 1, i)
            size = costs.stages[stage - 1].output_bytes
            last = timed
        else:
            continue
        if receiver is not None and receiver.device != timed.device:
            messages[timed.device, receiver.device].append((timed.end, last.end, size))
    for (device, _), sent in messages.items():
        sent.sort()
        for k, (_, free, size) in enumerate(sent):
            later = k + costs.messages
            let_go = ends[device]
            if later < len(sent):
                let_go = sent[later][0]
            if let_go > free:
                yield _Hold(device, free, let_go, size, 'messages')


def _holds(times: Times, costs: Costs) -> Iterator[_Hold]:
    """Yield the memory that is not in use throughout the step."""
    end = max(x.end for x in times.values())
    #: By stage, its inputs: source stage, bytes, and whether the input waits at the source.
    edges: list[list[tuple[int, float, bool]]] = [[] for _ in costs.stages]
    for stage, each in enumerate(costs.stages[:-1], 1):
        edges[stage].append((stage - 1, each.output_bytes, False))
    for skip in costs.skips:
        edges[skip.target].append((skip.source, skip.bytes, True))
    for (stage, kind, i), timed in times.items():
        each = costs.stages[stage]
        if kind == 'F':
            yield from _of_forward(times, costs, edges[stage], stage, i)
            if stage == len(costs.stages) - 1:
                last = _last(times, costs, stage, i)
                yield _Hold(
                    timed.device, timed.end, last.end if last else end, each.output_bytes, 'output'
                )
        elif kind in 'BI':
            middle = _middle(costs, timed)
            if each.halves is None or middle == timed.end:
                yield _Hold(timed.device, timed.start, timed.end, each.backward_bytes, 'backward')
            else:
                halves = each.halves
                yield _Hold(timed.device, timed.start, middle, halves.first, 'backward')
                yield _Hold(timed.device, middle, timed.end, halves.second, 'backward')


def _of_forward(
    times: Times, costs: Costs, edges: Iterable[tuple[int, float, bool]], stage: int, i: int
) -> Iterator[_Hold]:
    """Yield the memory that is held from a forward on, and the gradients of its inputs."""
    each = costs.stages[stage]
    forward = times[stage, 'F', i]
    backward = _backward(times, stage, i)
    last = _last(times, costs, stage, i) or forward
    first = forward
    if _is_recomputed(times, costs, stage, i):
        first = times.get((stage, 'R', i), backward) or forward
    freed = _middle(costs, last)
    yield _Hold(forward.device, first.start, freed, each.activation_bytes, 'activations')
    for source, bytes, waits in edges:
        before = times[source, 'F', i]
        gets = _backward(times, source, i)
        recomputed = _is_recomputed(times, costs, source, i)
        if waits and recomputed:
            yield _Hold(before.device, before.end, forward.start, bytes, 'inputs')
        if recomputed or before.device != forward.device:
            start = forward.start if waits else before.end
            yield _Hold(forward.device, start, last.end, bytes, 'inputs')
        if backward is not None and gets is not None:
            yield _Hold(before.device, backward.end, gets.start, bytes, 'gradients')


def _last(times: Times, costs: Costs, stage: int, i: int) -> Timed | None:
    """Return the action that frees the activations of a micro-batch, if there is a backward."""
    backward = _backward(times, stage, i)
    if costs.stages[stage].is_split:
        return times.get((stage, 'W', i), backward)
    return backward


def _backward(times: Times, stage: int, i: int) -> Timed | None:
    return times.get((stage, 'B', i)) or times.get((stage, 'I', i))
