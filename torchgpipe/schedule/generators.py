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
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain, pairwise, zip_longest

from torchgpipe.schedule.schedule import Action, Schedule

Rows = list[list[Action]]


def make(
    name: str,
    devices: int,
    micro_batches: int,
    virtual: int | None = None,
) -> Schedule:
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
    numbers = {'devices': devices, 'micro_batches': micro_batches}
    for argument, number in numbers.items():
        if number < 1:
            raise ValueError(f'{argument} must be a positive integer, but is {number}')
    least, most = stages_per_device(name)
    if virtual is None:
        virtual = min(2, most)
    if not least <= virtual <= most:
        stages = {1: 'one stage', 2: 'two stages'}.get(most, 'any number of stages')
        raise ValueError(f'{name!r} has {stages} per device, but virtual is {virtual}')
    rows = []
    for row in NAMES[name](devices, micro_batches, virtual):
        # Some schedules are made for more micro-batches. No action waits for the surplus ones.
        needed = [action for action in row if action.micro_batch < micro_batches]
        rows.append(tuple(needed))
    return Schedule(tuple(rows))


def stages_per_device(name: str) -> tuple[int, int]:
    """Return the least and the most stages that a device can have in a schedule.

    >>> stages_per_device('1f1b'), stages_per_device('zb-v')
    ((1, 1), (2, 2))
    """
    if name in V_SHAPED:
        return 2, 2
    if name in ('interleaved', 'looped-bfs'):
        return 1, sys.maxsize
    return 1, 1


def places(
    name: str,
    devices: int,
    virtual: int,
) -> tuple[int, ...]:
    """Return the device of each stage in a schedule.

    >>> places('interleaved', 3, 2), places('zb-v', 3, 2)
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    forth = tuple(range(devices))
    if name in V_SHAPED:
        # The last device has two consecutive stages, so no message is needed at the turn.
        return forth + forth[::-1]
    return forth * virtual


def _actions(
    stage: int,
    kind: str,
    micro_batches: Iterable[int],
) -> list[Action]:
    return [Action(stage, kind, i) for i in micro_batches]


def _gpipe(
    n: int,
    m: int,
    v: int,
) -> Rows:
    """Fill and drain: Huang et al., "GPipe" (2019). Backward takes the last micro-batch first."""
    rows = []
    for s in range(n):
        forward = _actions(s, 'F', range(m))
        backward = _actions(s, 'B', reversed(range(m)))
        rows.append(forward + backward)
    return rows


def _1f1b(
    n: int,
    m: int,
    v: int,
) -> Rows:
    """One forward, one backward. At most ``n - s`` micro-batches are in flight.

    Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (2021), there
    PipeDream-Flush.
    """
    return [_alternate(s, m, warm_up=n - s) for s in range(n)]


def _zb_h1(
    n: int,
    m: int,
    v: int,
) -> Rows:
    """Zero bubble in the memory of 1F1B. Stage ``s`` defers its W by ``s`` micro-batches.

    Qi et al., "Zero Bubble Pipeline Parallelism" (2023), there the handcrafted schedule ZB-H1.
    """
    return [_alternate(s, m, warm_up=n - s, delay=s) for s in range(n)]


def _zb_h2(
    n: int,
    m: int,
    v: int,
) -> Rows:
    """Zero bubble with a longer warm-up, in about twice the memory: ZB-H2 of the same paper."""
    rows = []
    for s in range(n):
        warm_up = 2 * (n - s) - 1
        rows.append(_alternate(s, m, warm_up, delay=2 * s))
    return rows


def _alternate(
    stage: int,
    m: int,
    warm_up: int,
    delay: int | None = None,
) -> list[Action]:
    """Return the actions of one stage: a warm-up, then backward and forward alternately.

    With a delay, backward is split, and W is deferred by so many micro-batches.
    """
    kind = 'B' if delay is None else 'I'
    row = _actions(stage, 'F', range(min(warm_up, m)))
    for i in range(m):
        row.append(Action(stage, kind, i))
        if delay is not None and i >= delay:
            row.append(Action(stage, 'W', i - delay))
        if i + warm_up < m:
            row.append(Action(stage, 'F', i + warm_up))
    if delay is not None:
        # No backward is left to run in between.
        deferred = range(max(0, m - delay), m)
        row += _actions(stage, 'W', deferred)
    return row


def _interleaved(
    n: int,
    m: int,
    v: int,
) -> Rows:
    """1F1B over several stages per device, which groups of ``n`` micro-batches pass in turn.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021).
    The paper needs ``n`` to divide ``m``. Otherwise, the result is the schedule for the next
    larger multiple. Its last micro-batches are surplus.
    """
    full = -(-m // n) * n
    rows = []
    for device in range(n):
        forward = []
        backward = []
        for first in range(0, full, n):
            group = range(first, first + n)
            for k in range(v):
                forward += _actions(k * n + device, 'F', group)
                # Backward visits the stages of a device in reverse order.
                backward += _actions((v - 1 - k) * n + device, 'B', group)
        # The way to the last device and back takes two steps for each device after this one.
        warm_up = 2 * (n - device - 1) + (v - 1) * n + 1
        row = forward[:warm_up]
        for action, following in zip_longest(backward, forward[warm_up:]):
            row.append(action)
            # After the last forward, only backwards remain.
            if following is not None:
                row.append(following)
        rows.append(row)
    return rows


def _looped_bfs(
    n: int,
    m: int,
    v: int,
) -> Rows:
    """Breadth-first: all micro-batches go through a device's stage before the next one.

    Lamy-Poirier, "Breadth-First Pipeline Parallelism" (2022).
    """
    rows = []
    for device in range(n):
        stages = range(device, n * v, n)
        row = []
        for stage in stages:
            row += _actions(stage, 'F', range(m))
        for stage in reversed(stages):
            row += _actions(stage, 'B', range(m))
        rows.append(row)
    return rows


def _zb_v(
    n: int,
    m: int,
    v: int,
) -> Rows:
    """Zero bubble in the memory of 1F1B. Device ``d`` has stages ``d`` and ``2n - 1 - d``.

    Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), there ZB-V.
    It takes ``2n - 1`` micro-batches to fill the pipeline. With fewer, the result is the schedule
    for ``2n - 1``. Its last micro-batches are surplus.
    """
    full = max(m, 2 * n - 1)
    return [_forth_and_back(device, n, full) for device in range(n)]


def _forth_and_back(
    device: int,
    n: int,
    m: int,
) -> list[Action]:
    """Return the actions of a device with a stage on the way forth, and another one back."""
    forth = device
    back = 2 * n - 1 - device
    row: list[Action] = []
    count = Counter[tuple[int, str]]()

    def run(stage: int, kinds: str) -> None:
        for kind in kinds:
            row.append(Action(stage, kind, count[stage, kind]))
            count[stage, kind] += 1

    # Fill until the first micro-batch is back from the end of the V.
    run(forth, 'F' * (2 * (n - device) - 1))
    for _ in range(device):
        run(back, 'F')
        run(forth, 'F')
    for _ in range(n - device):
        run(back, 'FIW')
    # Each micro-batch that ends lets another one start.
    while count[back, 'F'] < m:
        if count[forth, 'F'] < m:
            run(forth, 'F')
        run(forth, 'IW')
        run(back, 'FIW')
    # Drain, and run the remaining W where I has to wait.
    for _ in range(device):
        run(forth, 'I')
        run(back, 'I')
    for stage in (back, forth):
        while count[stage, 'W'] < m:
            if count[forth, 'I'] < m:
                run(forth, 'I')
            run(stage, 'W')
    return row


def _v_half(
    n: int,
    m: int,
    v: int,
) -> Rows:
    """About half of the activations of 1F1B. The stages have the places of ``zb-v``.

    Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), there V-Half. A device holds
    the activations of ``(n + 1) / 2`` of its micro-batches if ``n`` is odd, and of
    ``(n + 3) / 2`` if it is even. With two devices, this is ``zb-v``.
    """
    if n == 2:
        return _zb_v(n, m, v)
    # With an even number, a longer turn keeps two actions from the same slot.
    turns = (2, 1, 1) if n % 2 else (4, 2, 2)
    return _blocks(n, m, (1, 2, 1, 2), turns)


def _v_min(
    n: int,
    m: int,
    v: int,
) -> Rows:
    """About a third of the activations of 1F1B: V-Min of the same paper.

    A whole number of activations and the turns are further from it with few devices: half of them
    with 4, 6 and 8. With 2, 3 and 5 devices, no block needs less than ``v-half``.
    """
    if n in (2, 3, 5):
        return _v_half(n, m, v)
    turns = (1, 1, 1) if n % 3 else (3, 1, 3)
    return _blocks(n, m, (1, 1, 1, 1), turns)


#: The units of time between micro-batches: a device has ``F``, ``I`` and ``W`` of two stages.
_INTERVAL = 6


def _blocks(
    n: int,
    m: int,
    steps: tuple[int, ...],
    turns: tuple[int, ...],
) -> Rows:
    """Return the building block of the same paper for each micro-batch, at an interval.

    In a block, ``F`` of a micro-batch passes the devices forth and back, and then ``I`` does. Each
    of these four ways has a number of units per device, and each end has a turn. ``W`` takes the
    slots of an interval that are left. For 4 devices, with steps and turns of 1::

        0F0                     0F1 7F0 7I0         7W0         7F1 7I1 0I0     7W1 0W0     …
            1F0             6F0     1F1     6I0 6W0         6F1     1I0     6I1 6W1 1W0     …
                2F0     5F0             2F1     5I0     5F1 5W0 2I0             5I1 2W0 5W1 …
                    3F0 4F0                 3F1 4F1 4I0 3I0             4W0 3W0     4I1 3I1 …

    A device runs these actions in this order as soon as possible.

    Args:
        steps: By way, the units from one device to the next.
        turns: The units between two ways.
    """
    rows = []
    for device in range(n):
        row = _row_of_blocks(device, n, m, steps, turns)
        rows.append(row)
    return rows


def _row_of_blocks(
    device: int,
    n: int,
    m: int,
    steps: tuple[int, ...],
    turns: tuple[int, ...],
) -> list[Action]:
    """Return the actions of a device in the order of blocks."""
    forth = device
    back = 2 * n - 1 - device
    after = n - 1 - device
    # The way of F and of I through the V: stage, kind, and the devices passed before.
    ways = [
        (forth, 'F', device),
        (back, 'F', after),
        (back, 'I', device),
        (forth, 'I', after),
    ]

    # The units at which the first micro-batch has its actions.
    units: dict[tuple[int, str], int] = {}
    start = 0
    turns = (*turns, 0)
    for way, step, turn in zip(ways, steps, turns):
        stage, kind, passed = way
        units[stage, kind] = start + step * passed
        start += step * (n - 1) + turn

    slots = {unit % _INTERVAL for unit in units.values()}
    free = {*range(_INTERVAL)} - slots
    # Activations are held until W.
    for stage in (back, forth):
        unit = units[stage, 'I'] + 1
        while unit % _INTERVAL not in free:
            unit += 1
        units[stage, 'W'] = unit
        free.remove(unit % _INTERVAL)

    timed = []
    for i in range(m):
        start = _INTERVAL * i
        for (stage, kind), unit in units.items():
            action = Action(stage, kind, i)
            timed.append((start + unit, action))
    timed.sort()
    return [action for _, action in timed]


#: The schedules, by name.
NAMES = {
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
    partitions: int,
    m: int,
    stops: tuple[int, ...] = (),
    one_thread: bool = False,
) -> tuple[Schedule, Pairs]:
    """Return the plain call with one device per partition, and additional pairs of its actions.

    Args:
        stops: By partition, the number of micro-batches to recompute, from the first one on.
    """
    schedule = make('gpipe', partitions, m)
    if one_thread:
        # The thread of all backwards recomputes within them, so there are no actions for it.
        return schedule, forward_order(partitions, 0, m) + one_by_one(schedule)
    if any(stops):
        schedule = schedule.recomputing(stops)
    return schedule, []


def forward_order(
    partitions: int,
    start: int,
    stop: int,
) -> Pairs:
    """Return pairs of forwards, the second of which waits for the first.

    The output of a partition takes memory. Therefore a partition does not start micro-batch ``i``
    before the next partition is done with micro-batch ``i - 2``. Only threads wait in this way; a
    device may run later.

    >>> [f'{one} {other}' for one, other in forward_order(2, 0, 4)]
    ['1F0 0F2', '1F1 0F3']

    Args:
        stop: The micro-batch after the last one.
    """
    pairs = []
    for j in range(partitions - 1):
        for i in range(start + 2, stop):
            first = Action(j + 1, 'F', i - 2)
            second = Action(j, 'F', i)
            pairs.append((first, second))
    return pairs


def one_by_one(schedule: Schedule) -> Pairs:
    """Return pairs of all backwards, the second of which waits for the first.

    Autograd runs backward in the reverse of the order in which forward made the cells.

    >>> [f'{one} {other}' for one, other in one_by_one(make('gpipe', 2, 2))]
    ['1B1 1B0', '1B0 0B1', '0B1 0B0']
    """
    backward = []
    for action in chain.from_iterable(schedule.rows):
        if action.kind == 'B':
            backward.append(action)
    # Forward makes the cells by clock, and the cells of one clock by partition.
    backward.sort(
        key=lambda action: (action.micro_batch + action.stage, action.stage),
        reverse=True,
    )
    return [*pairwise(backward)]
