"""The schedules of the literature, each with its paper, and the plain call as a schedule.

:func:`make` makes a schedule by its name. Schedules differ in the number of micro-batches in
flight on a device (its *warm-up*, and so its memory) and in the number of its stages. Some split
backward into gradients of inputs and gradients of weights.

:func:`plain_call` returns the plain call, which is fill and drain. In forward, a partition that is
faster than the next one waits for it, because its outputs take memory. On the CPU, one thread runs
the backward of all partitions, regardless of their workers. On accelerators, recomputations do not
wait for gradients::

    accelerators    0F0 0F1             0R0     0B1 0B0
                        1F0 1F1 1B1 1R0 1B0
    CPU             0F0 0F1         0B1     0B0
                        1F0 1F1 1B1     1B0             each backward waits for the one before
"""

import sys
from collections import Counter, deque
from collections.abc import Callable
from functools import lru_cache
from itertools import count, pairwise

from torchgpipe.schedule.schedule import Action, Schedule, waits_for

Rows = list[list[Action]]


def make(name: str, devices: int, micro_batches: int, virtual: int | None = None) -> Schedule:
    """Make a schedule by its name.

    >>> print(make('zb-h1', devices=2, micro_batches=2))
    0F0 0F1     0I0 0W0 0I1 0W1
        1F0 1I0 1F1 1I1 1W0 1W1

    Args:
        name: One of :data:`NAMES`.
        devices: Number of devices.
        micro_batches: Number of micro-batches.
        virtual: Stages per device: 2 by default where a schedule has several, otherwise 1.

    Raises:
        ValueError: There is no such schedule, or it does not exist with these numbers.
    """
    if name not in NAMES:
        raise ValueError(f'there is no schedule {name!r}; there are {", ".join(NAMES)}')
    for what, number in (('devices', devices), ('micro_batches', micro_batches)):
        if number < 1:
            raise ValueError(f'{what} must be a positive integer, but is {number}')
    least, most = stages_per_device(name)
    v = min(2, most) if virtual is None else virtual
    if not least <= v <= most:
        takes = {1: 'one stage', 2: 'two stages'}.get(most, 'any number of stages')
        raise ValueError(f'{name!r} has {takes} per device, but virtual is {virtual}')
    rows = NAMES[name](devices, micro_batches, v)
    return Schedule(tuple(map(tuple, rows)))


def stages_per_device(name: str) -> tuple[int, int]:
    """Return the least and the most stages that a device can have in a schedule.

    >>> stages_per_device('1f1b'), stages_per_device('zb-v')
    ((1, 1), (2, 2))
    """
    if name in V_SHAPED:
        return 2, 2
    return 1, sys.maxsize if name in ('interleaved', 'looped-bfs') else 1


def places(name: str, devices: int, virtual: int) -> tuple[int, ...]:
    """Return the device of each stage in a schedule.

    >>> places('interleaved', 3, 2), places('zb-v', 3, 2)
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    there = (*range(devices),)
    return there + there[::-1] if name in V_SHAPED else there * virtual


def _gpipe(n: int, m: int, v: int) -> Rows:
    """Fill and drain: Huang et al., "GPipe" (2019). Backward takes the last micro-batch first."""
    return [
        [*(Action(s, 'F', i) for i in range(m)), *(Action(s, 'B', i) for i in reversed(range(m)))]
        for s in range(n)
    ]


def _1f1b(n: int, m: int, v: int) -> Rows:
    """One forward, one backward. At most ``n - s`` micro-batches are in flight.

    Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2021), there
    PipeDream-Flush.
    """
    return [_alternate(s, m, warm_up=n - s) for s in range(n)]


def _zb_h1(n: int, m: int, v: int) -> Rows:
    """Zero bubble in the memory of 1F1B. Stage ``s`` defers its W by ``s`` micro-batches.

    Qi et al., "Zero Bubble Pipeline Parallelism" (2023), there the handcrafted schedule ZB-H1.
    """
    return [_alternate(s, m, warm_up=n - s, delay=s) for s in range(n)]


def _zb_h2(n: int, m: int, v: int) -> Rows:
    """Zero bubble with a longer warm-up, in about twice the memory: ZB-H2 of the same paper."""
    return [_alternate(s, m, warm_up=2 * (n - s) - 1, delay=2 * s) for s in range(n)]


def _alternate(stage: int, m: int, warm_up: int, delay: int | None = None) -> list[Action]:
    """Return the actions of one stage: a warm-up, then backward and forward alternately.

    With a delay, backward is split, and W is deferred by so many micro-batches.
    """
    row = [Action(stage, 'F', i) for i in range(min(warm_up, m))]
    for i in range(m):
        row.append(Action(stage, 'B' if delay is None else 'I', i))
        if delay is not None and i >= delay:
            row.append(Action(stage, 'W', i - delay))
        if i + warm_up < m:
            row.append(Action(stage, 'F', i + warm_up))
    if delay is not None:
        row += [Action(stage, 'W', i) for i in range(max(0, m - delay), m)]
    return row


def _interleaved(n: int, m: int, v: int) -> Rows:
    """1F1B over several stages per device, which groups of ``n`` micro-batches pass in turn.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021).
    The paper needs ``n`` to divide ``m``. Otherwise, the result is the schedule for the next
    larger multiple, without the surplus micro-batches. No other action waits for these.
    """
    full = -(-m // n) * n
    units = [
        (k, i) for first in range(0, full, n) for k in range(v) for i in range(first, first + n)
    ]
    rows = []
    for device in range(n):
        warm_up = min(len(units), 2 * (n - device - 1) + (v - 1) * n + 1)
        forward = [Action(k * n + device, 'F', i) for k, i in units]
        backward = [Action((v - 1 - k) * n + device, 'B', i) for k, i in units]
        row = forward[:warm_up]
        for action, following in zip(backward, [*forward[warm_up:], *[None] * warm_up]):
            row += [action] if following is None else [action, following]
        rows.append([action for action in row if action.micro_batch < m])
    return rows


def _looped_bfs(n: int, m: int, v: int) -> Rows:
    """Breadth-first: all micro-batches go through a device's stage before the next one.

    Lamy-Poirier, "Breadth-First Pipeline Parallelism" (2022).
    """
    return [
        [
            *(Action(k * n + device, 'F', i) for k in range(v) for i in range(m)),
            *(Action(k * n + device, 'B', i) for k in reversed(range(v)) for i in range(m)),
        ]
        for device in range(n)
    ]


def _zb_v(n: int, m: int, v: int) -> Rows:
    """Zero bubble in the memory of 1F1B. Device ``d`` has stages ``d`` and ``2n - 1 - d``.

    Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), there ZB-V.
    It takes ``2n - 1`` micro-batches to fill the pipeline. With fewer, the result is the schedule
    for ``2n - 1``, without the surplus micro-batches.
    """
    full = max(m, 2 * n - 1)
    return [
        [action for action in _there_and_back(d, n, full) if action.micro_batch < m]
        for d in range(n)
    ]


def _there_and_back(d: int, n: int, m: int) -> list[Action]:
    """Return the actions of device ``d``: there stage ``a``, back stage ``b``."""
    a = d
    b = 2 * n - 1 - d
    row: list[Action] = []
    count: Counter[tuple[int, str]] = Counter()

    def do(*actions: tuple[int, str]) -> None:
        for stage, kind in actions:
            row.append(Action(stage, kind, count[stage, kind]))
            count[stage, kind] += 1

    do(*[(a, 'F')] * (2 * (n - d) - 1))
    do(*[(b, 'F'), (a, 'F')] * d)
    do(*[(b, 'F'), (b, 'I'), (b, 'W')] * (n - d))
    while count[b, 'F'] < m:
        if count[a, 'F'] < m:
            do((a, 'F'))
        do((a, 'I'), (a, 'W'), (b, 'F'), (b, 'I'), (b, 'W'))
    do(*[(a, 'I'), (b, 'I')] * d)
    for stage in (b, a):  # The remaining W run where I has to wait.
        while count[stage, 'W'] < m:
            do(*[(a, 'I')] * (count[a, 'I'] < m), (stage, 'W'))
    return row


def _v_half(n: int, m: int, v: int) -> Rows:
    """Half of the activations of 1F1B. The stages have the places of ``zb-v``.

    Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), there V-Half.
    """
    return _blocks(n, m, max(2, n))


def _v_min(n: int, m: int, v: int) -> Rows:
    """At most two fifths of the activations of 1F1B: V-Min of the same paper.

    With less than five devices, a whole number of activations is further from it.
    """
    return _blocks(n, m, max(2, 4 * n // 5))


def _blocks(n: int, m: int, most: int) -> Rows:
    """Return the building block of the same paper for each micro-batch, in limited memory.

    In a block, F and I of one micro-batch follow each other through the V, each in a unit of time.
    Blocks start at a constant interval, such that no device has two actions at a time. The
    interval is at least six, the actions of a device. For 4 devices and 2 micro-batches::

        0F0                         0F1 7F0 7I0                         7F1 7I1 0I0
            1F0                 6F0         1F1 6I0                 6F1         1I0 6I1
                2F0         5F0                 2F1 5I0         5F1         2I0
                    3F0 4F0                         3F1 4I0 4F1         3I0

    The devices run these actions in this order as soon as possible, and W while they wait.

    Args:
        most: The most activations of stages that a device holds. With fewer than blocks need at
            an interval, a device may have to wait for itself. Then the interval is longer.
    """
    intervals = count(6, 2)  # Actions there and back have different parities.
    return next(
        rows
        for interval in intervals
        if (rows := _in_order([_one_by_one(device, n, m, interval) for device in range(n)], most))
    )


def _one_by_one(device: int, n: int, m: int, interval: int) -> list[Action]:
    """Return F and I of a device in the order of blocks at an interval."""
    there = device
    back = 2 * n - 1 - device
    turn = 2 * n + 2 * (2 * n % interval == 0)  # I there is never at the same time as F there.
    block = (
        (there, there, 'F'),
        (back, back, 'F'),
        (turn + there, back, 'I'),
        (turn + back, there, 'I'),
    )
    return [
        Action(stage, kind, i)
        for _, stage, kind, i in sorted(
            (interval * i + time, stage, kind, i) for i in range(m) for time, stage, kind in block
        )
    ]


def _in_order(orders: list[list[Action]], most: int) -> Rows | None:
    """Return rows with F and I in these orders and W where they wait; ``None`` in a deadlock."""
    actions = {action for order in orders for action in order}
    done = set[Action]()
    rows: Rows = [[] for _ in orders]
    queues = [*map(deque, orders)]
    weights = [deque[Action]() for _ in orders]
    held = [0] * len(orders)
    while any(queues) or any(weights):
        now = []
        for device, (queue, later) in enumerate(zip(queues, weights)):
            if (
                queue
                and done.issuperset(waits_for(queue[0], actions))
                and (queue[0].kind == 'I' or held[device] < most)
            ):
                now.append((device, queue.popleft()))
            elif later:
                now.append((device, later.popleft()))
        if not now:
            return None
        for device, action in now:
            rows[device].append(action)
            held[device] += (action.kind == 'F') - (action.kind == 'W')
            if action.kind == 'I':
                weights[device].append(action._replace(kind='W'))
        done.update(action for _, action in now)
    return rows


#: The schedules, by name.
NAMES: dict[str, Callable[[int, int, int], Rows]] = {
    'gpipe': _gpipe,
    '1f1b': _1f1b,
    'interleaved': _interleaved,
    'looped-bfs': _looped_bfs,
    'zb-h1': _zb_h1,
    'zb-h2': _zb_h2,
    'zb-v': _zb_v,
    'v-half': _v_half,
    'v-min': _v_min,
}

#: Schedules whose stages go there and back, in a V.
V_SHAPED = ('zb-v', 'v-half', 'v-min')

#: Schedules that split backward.
SPLIT = ('zb-h1', 'zb-h2', *V_SHAPED)


#: The name of forward and ``loss.backward()`` among schedules.
PLAIN_CALL = 'plain call'

#: Pairs of actions, the second of which waits for the first, in addition to a schedule.
Pairs = list[tuple[Action, Action]]


@lru_cache(maxsize=64)
def plain_call(
    partitions: int, m: int, stops: tuple[int, ...] = (), one_thread: bool = False
) -> tuple[Schedule, Pairs]:
    """Return the plain call with one device per partition, and additional pairs of its actions.

    Args:
        stops: By partition, the number of micro-batches to recompute, from the first one on.
    """
    schedule = make('gpipe', partitions, m)
    if one_thread:
        return schedule, [*forward_order(partitions, 0, m), *one_by_one(schedule)]
    return (schedule.recomputing(stops) if any(stops) else schedule), []


def forward_order(partitions: int, start: int, stop: int) -> Pairs:
    """Return pairs of forwards, the second of which waits for the first.

    The output of a partition takes memory. Therefore a partition does not start micro-batch ``i``
    before the next partition is done with micro-batch ``i - 2``. Only threads wait in this way; a
    device may run later.

    >>> [f'{one} {other}' for one, other in forward_order(2, 0, 4)]
    ['1F0 0F2', '1F1 0F3']

    Args:
        stop: The micro-batch after the last one.
    """
    return [
        (Action(j + 1, 'F', i - 2), Action(j, 'F', i))
        for j in range(partitions - 1)
        for i in range(start + 2, stop)
    ]


def one_by_one(schedule: Schedule) -> Pairs:
    """Return pairs of all backwards, the second of which waits for the first.

    Autograd runs backward in the reverse of the order in which forward made the cells.

    >>> [f'{one} {other}' for one, other in one_by_one(make('gpipe', 2, 2))]
    ['1B1 1B0', '1B0 0B1', '0B1 0B0']
    """
    backward = [action for row in schedule.rows for action in row if action.kind == 'B']
    backward.sort(
        key=lambda action: (action.micro_batch + action.stage, action.stage), reverse=True
    )
    return [*pairwise(backward)]
