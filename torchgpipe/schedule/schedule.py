"""Schedules: the actions of each device, as data and text, and their validation.

:class:`Schedule` has a row of actions for each device. It reads and writes CSV. Its method
:meth:`~Schedule.validate` checks that it is complete and can run. An action waits for the previous
action on its device, and for these actions (:data:`WAITS`)::

    0F0 ──▶ 1F0 ──▶ 2F0           forward of the stage before
                     │
                    2R0           a recomputation: its own forward
                     ▼
    0B0 ◀── 1B0 ◀── 2B0           backward of the stage after, its own forward and recomputation
    0W0     1W0     2W0           its own I
"""

import csv
import io
import os
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any, NamedTuple

#: The kinds of actions. A backward is ``B``, or it is split into ``I`` and ``W``.
KINDS = {
    'F': 'forward',
    'R': 'recomputation of the activations that forward did not keep',
    'B': 'backward',
    'I': 'backward, gradients of inputs',
    'W': 'backward, gradients of weights',
}

#: The short name and the colour of each kind, in pictures. Colours differ also for red-blind
#: readers, on light and dark backgrounds.
LEGEND = {
    'F': ('forward', '#3b78c4'),
    'R': ('recomputation', '#7a6bb5'),
    'B': ('backward', '#c2612c'),
    'I': ('backward of inputs', '#c2612c'),
    'W': ('backward of weights', '#b3922e'),
}

#: The text of an action: stage, kind and micro-batch.
_TEXT = re.compile(r'(\d+)([A-Z]+)(\d+)')


class Action(NamedTuple):
    """An action in the notation of PyTorch's pipelining: stage, kind, micro-batch.

    >>> Action.parse('2F10')
    Action(stage=2, kind='F', micro_batch=10)
    >>> str(Action(2, 'F', 10))
    '2F10'
    """

    stage: int
    #: A key of :data:`KINDS`, because it is written to files.
    kind: str
    micro_batch: int

    @classmethod
    def parse(cls, text: str) -> 'Action':
        """Return an action from its text, or raise a :exc:`ValueError`."""
        match = _TEXT.fullmatch(text.strip())
        if match is None or match[2] not in KINDS:
            kinds = [f'{kind} ({meaning})' for kind, meaning in KINDS.items()]
            raise ValueError(
                f'{text.strip()!r} is no action: stage, kind and micro-batch, as in '
                f'0F3, where kinds are {", ".join(kinds)}'
            )
        stage, kind, micro_batch = match.groups()
        return cls(int(stage), kind, int(micro_batch))

    def __str__(self) -> str:
        return f'{self.stage}{self.kind}{self.micro_batch}'


class Timed(NamedTuple):
    """An action and its time, as predicted by a simulation or measured by a recorder.

    >>> timed = Timed(0, Action(0, 'F', 1), 0.25, 0.75)
    >>> str(timed.action), timed.end - timed.start
    ('0F1', 0.5)
    """

    #: The device: a row of the schedule, or a lane of a timeline.
    device: int
    action: Action
    #: Seconds from the start of the step.
    start: float
    #: Seconds from the start of the step.
    end: float


def action_boxes(
    actions: Iterable[Timed],
    label: Callable[[Action], str] = str,
    time: Callable[[float], str] | None = None,
) -> Iterator[Any]:
    """Yield the boxes of actions in a picture, as in :mod:`torchgpipe.base.html`.

    Args:
        actions: The actions; ``Timed.device`` is the row.
        time: Returns a text for a number of seconds; ``None`` if the times are not seconds.
    """
    # Imported only for a picture, because schedules need the standard library alone.
    from torchgpipe.base.html import Box

    for timed in actions:
        stage, kind, i = timed.action
        name, colour = LEGEND[kind]
        title = f'{name}, stage {stage}, micro-batch {i}'
        if time is not None:
            title += f', {time(timed.end - timed.start)}'
        yield Box(
            timed.device,
            timed.start,
            timed.end,
            label(timed.action),
            title,
            colour,
        )


#: By device and step, the action that starts, or nothing.
Grid = list[list[Action | None]]

#: By kind of an action, its predecessors, as far as they exist: offset of the stage, and kind.
WAITS = {
    'F': ((-1, 'F'),),
    'R': ((0, 'F'),),
    # The stage after may have a split backward, of which I computes the gradient.
    'B': ((0, 'F'), (0, 'R'), (1, 'B'), (1, 'I')),
    'I': ((0, 'F'), (0, 'R'), (1, 'B'), (1, 'I')),
    'W': ((0, 'I'),),
}


@dataclass(frozen=True)
class Schedule:
    r"""The actions of each device, in order.

    >>> schedule = Schedule.parse('0F0,0B0\n1F0,1B0')
    >>> schedule.stages, schedule.micro_batches
    (((0,), (1,)), 1)
    >>> schedule.validate()

    Args:
        rows: The actions of each device.

    Attributes:
        rows: The actions of each device, as tuples.

    Raises:
        TypeError: A row has an item that is not an :class:`Action`.
    """

    rows: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        rows = tuple(map(tuple, self.rows))
        for row in rows:
            for action in row:
                if not isinstance(action, Action):
                    raise TypeError(
                        f'a row of a schedule has actions, but also {action!r}; '
                        "parse text by Schedule.parse('0F0,0B0')"
                    )
        # A step caches by the schedule, so it needs a hash. A list does not have one.
        object.__setattr__(self, 'rows', rows)

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each device, in ascending order; several are called virtual stages."""
        result = []
        for row in self.rows:
            stages = {action.stage for action in row}
            result.append(tuple(sorted(stages)))
        return tuple(result)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches."""
        return len({action.micro_batch for action in chain.from_iterable(self.rows)})

    @classmethod
    def parse(cls, text: str) -> 'Schedule':
        """Read the CSV of :meth:`to_csv` or of PyTorch's pipelining, and skip empty cells.

        Raises:
            ValueError: A cell is not an action; the message names its row and column.
        """
        rows = []
        reader = csv.reader(io.StringIO(text))
        for number, line in enumerate(reader, 1):
            row = []
            for column, cell in enumerate(line, 1):
                # An empty cell is a step in which the device waits. The order is enough.
                if not cell.strip():
                    continue
                try:
                    row.append(Action.parse(cell))
                except ValueError as error:
                    raise ValueError(f'row {number}, column {column}: {error}') from None
            rows.append(tuple(row))
        return cls(tuple(rows))

    def to_csv(self) -> str:
        r"""Write a row for each device, as PyTorch's pipelining reads it.

        >>> Schedule.parse('0F0,,0B0').to_csv()
        '0F0,0B0\n'
        """
        text = ''
        for row in self.rows:
            text += ','.join(map(str, row)) + '\n'
        return text

    def recomputing(self, stops: Sequence[int | Collection[int]]) -> 'Schedule':
        r"""Return the schedule with recomputations, each directly before its backward.

        At that place, a recomputation starts while the gradient is still on its way. Its
        activations exist no earlier than on a device that had waited for the gradient.
        Recomputations that the schedule already has keep their places.

        >>> Schedule.parse('0F0,0F1,0B0,0B1').recomputing([1]).to_csv()
        '0F0,0F1,0R0,0B0,0B1\n'

        Args:
            stops: By stage, the micro-batches to recompute, or their number from the first one on.

        Raises:
            ValueError: There is another number of stages, or no such micro-batch.
        """
        actions = self._all()
        m = self.micro_batches
        # By stage, the micro-batches to recompute.
        by_stage = []
        for stop in stops:
            if isinstance(stop, int):
                if stop < 0:
                    raise ValueError(
                        f'a number of micro-batches to recompute is zero or more, but is {stop}'
                    )
                stop = range(min(m, stop))
            by_stage.append(stop)
        stages = {action.stage for action in actions}
        if len(by_stage) != len(stages):
            raise ValueError(
                f'the schedule has stages {sorted(stages)}, but '
                f'there are recomputations for {len(by_stage)} stages'
            )
        numbers = {*chain.from_iterable(by_stage)}
        unknown = sorted(numbers - {*range(m)})
        if unknown:
            raise ValueError(
                f'the schedule has {m} micro-batches, but {unknown} are to be recomputed'
            )

        rows = []
        for row in self.rows:
            result = []
            for action in row:
                # W does not need a recomputation, because its I has one.
                if action.kind in 'BI' and action.micro_batch in by_stage[action.stage]:
                    recomputation = action._replace(kind='R')
                    if recomputation not in actions:
                        result.append(recomputation)
                result.append(action)
            rows.append(tuple(result))
        return Schedule(tuple(rows))

    def recomputed(self, stage: int) -> frozenset[int]:
        """Return the micro-batches whose activations forward of a stage does not keep.

        >>> Schedule.parse('0F0,0F1,0B0,0R1,0B1').recomputed(0)
        frozenset({1})
        """
        micro_batches = set()
        for action in chain.from_iterable(self.rows):
            if action.stage == stage and action.kind == 'R':
                micro_batches.add(action.micro_batch)
        return frozenset(micro_batches)

    def validate(self) -> None:
        """Check that the schedule is complete and can run.

        Raises:
            ValueError: An action is missing, occurs twice, or comes before an action that it waits
                for, or a stage is on two devices. The message names it and draws the schedule.
        """
        if not any(self.rows):
            raise ValueError('the schedule is empty')
        # In this order, because a check relies on the checks before it.
        self._check_numbers()
        self._check_duplicates()
        self._check_complete()
        self._check_order()
        # Rows that are complete and in order can still wait for each other in a circle.
        _, blocked = steps(self.rows)
        if blocked:
            waits = []
            for action in blocked:
                predecessors = waits_for(action, self._all())
                waits.append(f'{action} waits for {_names(predecessors)}')
            reason = '; '.join(waits)
            raise self._error(f'it cannot go on: {reason}', blocked)

    def _all(self) -> set[Action]:
        return {*chain.from_iterable(self.rows)}

    def _check_numbers(self) -> None:
        for field in ('stage', 'micro_batch'):
            numbers = {getattr(action, field) for action in self._all()}
            # Other checks count stages and micro-batches from 0, without gaps.
            most = max(numbers)
            missing = sorted({*range(most + 1)} - numbers)
            if missing:
                name = field.replace('_', '-')
                raise self._error(f'it has a {name} {most}, but none {missing}')

    def _check_duplicates(self) -> None:
        # By stage, its device.
        owners: dict[int, int] = {}
        seen = set[Action]()
        for device, row in enumerate(self.rows):
            for action in row:
                stage = action.stage
                owner = owners.setdefault(stage, device)
                if owner != device:
                    raise self._error(
                        f'stage {stage} is on device {owner} and on device {device}',
                        [action],
                    )
                if action in seen:
                    raise self._error(f'{action} is there twice', [action])
                seen.add(action)

    def _check_complete(self) -> None:
        # By stage and micro-batch, the kinds of actions.
        kinds = defaultdict(set)
        backward = set()
        for stage, kind, i in self._all():
            kinds[stage, i].add(kind)
            if kind in 'BI':
                backward.add((stage, i))
        stages = 1 + max(kinds)[0]
        m = self.micro_batches
        complete = (
            {'F'},
            {'F', 'B'},
            {'F', 'I', 'W'},
        )
        for stage in range(stages):
            for i in range(m):
                # A recomputation is optional.
                needed = kinds[stage, i] - {'R'}
                if needed not in complete:
                    raise self._error(
                        f'stage {stage} does {_names(sorted(needed)) or "nothing"} for '
                        f'micro-batch {i}, but it takes F and B, or F, I and W, or F alone',
                        [Action(stage, kind, i) for kind in needed],
                    )
        # A schedule may have forwards alone, but not a backward of some micro-batches alone.
        if backward and len(backward) < stages * m:
            stage, i = min(kinds.keys() - backward)
            raise self._error(
                f'stage {stage} has no backward for micro-batch {i}, and others have',
                [Action(stage, 'F', i)],
            )

    def _check_order(self) -> None:
        for row in self.rows:
            actions = {*row}
            done = set[Action]()
            for action in row:
                predecessors = waits_for(action, actions)
                late = [candidate for candidate in predecessors if candidate not in done]
                if late:
                    raise self._error(
                        f'{action} comes before {_names(late)}, for which it waits',
                        [action],
                    )
                done.add(action)

    def _error(
        self,
        reason: str,
        marked: Collection[Action] = (),
    ) -> ValueError:
        picture = _draw(self.rows, marked)
        return ValueError(f'this schedule will not do: {reason}\n{picture}')

    def __str__(self) -> str:
        grid, _ = steps(self.rows)
        return _draw(grid)

    def _repr_html_(self) -> str:
        # Imported only for a picture, because schedules need the standard library alone.
        from torchgpipe.base.html import rows_as_html

        grid, _ = steps(self.rows)
        names = []
        actions = []
        for device, row in enumerate(grid):
            names.append(f'device {device}')
            for step, action in enumerate(row):
                if action is not None:
                    end = step + 1
                    actions.append(Timed(device, action, step, end))
        caption = f'{len(self.rows)} devices, {self.micro_batches} micro-batches'
        return rows_as_html(names, action_boxes(actions), caption)


#: A schedule, its name, or the path of a file with one as CSV.
ScheduleLike = str | os.PathLike[str] | Schedule


def waits_for(
    action: Action,
    actions: Collection[Action],
) -> list[Action]:
    """Return the predecessors of an action among the given actions.

    >>> waits_for(Action(0, 'B', 3), {Action.parse(x) for x in ('0F3', '1I3', '0B3', '1F3')})
    [Action(stage=0, kind='F', micro_batch=3), Action(stage=1, kind='I', micro_batch=3)]
    """
    stage, kind, i = action
    predecessors = []
    for offset, predecessor_kind in WAITS[kind]:
        candidate = Action(stage + offset, predecessor_kind, i)
        if candidate in actions:
            predecessors.append(candidate)
    return predecessors


def steps(
    rows: Sequence[Sequence[Action]],
    pairs: Iterable[tuple[Action, Action]] = (),
) -> tuple[Grid, list[Action]]:
    """Run a schedule in steps, with one step per action.

    Args:
        pairs: Additional pairs of actions, the second of which waits for the first.

    Returns:
        The action of each device in each step, and the actions at which devices block, if any.
    """
    actions = {*chain.from_iterable(rows)}
    queues = [*map(deque, rows)]
    # By action, the additional actions that it waits for.
    extra = defaultdict(list)
    for first, second in pairs:
        extra[second].append(first)
    done = set[Action]()
    grid: Grid = [[] for _ in rows]
    while any(queues):
        step = []
        for queue in queues:
            action = None
            if queue:
                first = queue[0]
                predecessors = waits_for(first, actions) + extra[first]
                if done.issuperset(predecessors):
                    action = first
            step.append(action)
        if not any(step):
            # No device can start its next action, now or later.
            blocked = [queue[0] for queue in queues if queue]
            return grid, blocked
        # After the choice for all devices, because a predecessor has to end in an earlier step.
        for row, queue, action in zip(grid, queues, step):
            row.append(action)
            if action:
                done.add(queue.popleft())
    return grid, []


def by_step(grid: Grid) -> Iterator[Action]:
    """Yield the actions of a schedule, in the order of its steps."""
    for column in zip_longest(*grid):
        yield from filter(None, column)


def in_flight(
    schedule: Schedule,
    start: str = 'F',
) -> dict[int, int]:
    r"""Return for each stage the most micro-batches that are in flight at a time.

    >>> in_flight(Schedule.parse('0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2'))
    {0: 2, 1: 1}

    Args:
        start: The kinds of actions at which a micro-batch starts to count, until ``B`` or ``W``.
    """
    # By stage, the micro-batches in flight at this action.
    now = defaultdict[int, int](int)
    most = defaultdict[int, int](int)
    for stage, kind, _ in chain.from_iterable(schedule.rows):
        if kind in start:
            now[stage] += 1
        most[stage] = max(most[stage], now[stage])
        # Activations are needed until the gradients of weights are computed.
        if kind in 'BW':
            now[stage] -= 1
    return dict(most)


def _draw(
    grid: Sequence[Sequence[Action | None]],
    marked: Collection[Action] = (),
) -> str:
    """Draw a row for each device, with marked actions between arrows."""
    table = []
    width = 0
    for row in grid:
        cells = []
        for action in row:
            cell = str(action or '')
            if action in marked:
                cell = f'>{cell}<'
            cells.append(cell)
            width = max(width, len(cell))
        table.append(cells)

    lines = []
    for cells in table:
        line = ' '.join(cell.ljust(width) for cell in cells)
        # A row may end in steps without actions.
        lines.append(line.rstrip())
    return '\n'.join(lines)


def _names(actions: Iterable[object]) -> str:
    return ', '.join(map(str, actions))
