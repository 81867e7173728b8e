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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
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

_TEXT = re.compile(r'(\d+)([A-Z]+)(\d+)')


class Action(NamedTuple):
    """An action in the notation of PyTorch's pipelining: stage, kind, micro-batch.

    >>> Action.parse('2F10')
    Action(stage=2, kind='F', micro_batch=10)
    >>> str(Action(2, 'F', 10))
    '2F10'
    """

    stage: int
    kind: str
    micro_batch: int

    @classmethod
    def parse(cls, text: str) -> 'Action':
        """Return an action from its text, or raise a :exc:`ValueError`."""
        match = _TEXT.fullmatch(text.strip())
        if match is None or match[2] not in KINDS:
            kinds = ', '.join(f'{kind} ({what})' for kind, what in KINDS.items())
            raise ValueError(
                f'{text.strip()!r} is no action: stage, kind and micro-batch, as in '
                f'0F3, where kinds are {kinds}'
            )
        return cls(int(match[1]), match[2], int(match[3]))

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
    from torchgpipe.base.html import Box

    for timed in actions:
        stage, kind, i = timed.action
        name, colour = LEGEND[kind]
        title = f'{name}, stage {stage}, micro-batch {i}'
        if time is not None:
            title += f', {time(timed.end - timed.start)}'
        yield Box(timed.device, timed.start, timed.end, label(timed.action), title, colour)


#: By device and step, the action that starts, or nothing.
Grid = list[list[Action | None]]

#: By kind of an action, its predecessors, as far as they exist: offset of the stage, and kind.
WAITS = {
    'F': ((-1, 'F'),),
    'R': ((0, 'F'),),
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
        object.__setattr__(self, 'rows', rows)  # A step needs a hash.

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each device, in ascending order; several are called virtual stages."""
        return tuple(tuple(sorted({action.stage for action in row})) for row in self.rows)

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches."""
        return len({action.micro_batch for row in self.rows for action in row})

    @classmethod
    def parse(cls, text: str) -> 'Schedule':
        """Read the CSV of :meth:`to_csv` or of PyTorch's pipelining, and skip empty cells.

        Raises:
            ValueError: A cell is not an action; the message names its row and column.
        """
        rows = []
        for number, line in enumerate(csv.reader(io.StringIO(text)), 1):
            row = []
            for column, cell in enumerate(line, 1):
                try:
                    row += [Action.parse(cell)] if cell.strip() else []
                except ValueError as error:
                    raise ValueError(f'row {number}, column {column}: {error}') from None
            rows.append(tuple(row))
        return cls(tuple(rows))

    def to_csv(self) -> str:
        r"""Write a row for each device, as PyTorch's pipelining reads it.

        >>> Schedule.parse('0F0,,0B0').to_csv()
        '0F0,0B0\n'
        """
        return ''.join(','.join(map(str, row)) + '\n' for row in self.rows)

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
        negative = [number for number in stops if isinstance(number, int) and number < 0]
        if negative:
            raise ValueError(
                f'a number of micro-batches to recompute is zero or more, but is {negative[0]}'
            )
        there = self._all()
        m = self.micro_batches
        wanted = [range(min(m, each)) if isinstance(each, int) else each for each in stops]
        if len(wanted) != len({action.stage for action in there}):
            raise ValueError(
                f'the schedule has stages {sorted({x.stage for x in there})}, but '
                f'there are recomputations for {len(wanted)} stages'
            )
        unknown = sorted({i for each in wanted for i in each} - {*range(m)})
        if unknown:
            raise ValueError(
                f'the schedule has {m} micro-batches, but {unknown} are to be recomputed'
            )

        def before(action: Action) -> list[Action]:
            again = action._replace(kind='R')
            needed = action.kind in 'BI' and action.micro_batch in wanted[action.stage]
            return [again] if needed and again not in there else []

        return Schedule(
            tuple(
                tuple(x for action in row for x in (*before(action), action)) for row in self.rows
            )
        )

    def recomputed(self, stage: int) -> frozenset[int]:
        """Return the micro-batches whose activations forward of a stage does not keep.

        >>> Schedule.parse('0F0,0F1,0B0,0R1,0B1').recomputed(0)
        frozenset({1})
        """
        return frozenset(
            [
                action.micro_batch
                for row in self.rows
                for action in row
                if action.stage == stage and action.kind == 'R'
            ]
        )

    def validate(self) -> None:
        """Check that the schedule is complete and can run.

        Raises:
            ValueError: An action is missing, occurs twice, or comes before an action that it waits
                for, or a stage is on two devices. The message names it and draws the schedule.
        """
        if not any(self.rows):
            raise ValueError('the schedule is empty')
        self._check_numbers()
        self._check_each_once()
        self._check_complete()
        self._check_own_order()
        _, stuck = steps(self.rows)
        if stuck:
            waiting = '; '.join(
                f'{action} waits for {_names(waits_for(action, self._all()))}' for action in stuck
            )
            raise self._wrong('it cannot go on: ' + waiting, stuck)

    def _all(self) -> set[Action]:
        return {action for row in self.rows for action in row}

    def _check_numbers(self) -> None:
        for what in ('stage', 'micro_batch'):
            numbers = {getattr(action, what) for action in self._all()}
            missing = sorted(set(range(max(numbers) + 1)) - numbers)
            if missing:
                name = what.replace('_', '-')
                raise self._wrong(f'it has a {name} {max(numbers)}, but none {missing}')

    def _check_each_once(self) -> None:
        owners: dict[int, int] = {}
        seen: set[Action] = set()
        for device, row in enumerate(self.rows):
            for action in row:
                if owners.setdefault(action.stage, device) != device:
                    raise self._wrong(
                        f'stage {action.stage} is on device {owners[action.stage]} '
                        f'and on device {device}',
                        [action],
                    )
                if action in seen:
                    raise self._wrong(f'{action} is there twice', [action])
                seen.add(action)

    def _check_complete(self) -> None:
        actions = self._all()
        stages = 1 + max(action.stage for action in actions)
        found: dict[tuple[int, int], set[str]] = {}
        for stage, kind, i in actions:
            found.setdefault((stage, i), set()).add(kind)
        for stage in range(stages):
            for i in range(self.micro_batches):
                kinds = found.get((stage, i), set()) - {'R'}
                if kinds not in ({'F'}, {'F', 'B'}, {'F', 'I', 'W'}):
                    raise self._wrong(
                        f'stage {stage} does {_names(sorted(kinds)) or "nothing"} for micro-batch '
                        f'{i}, but it takes F and B, or F, I and W, or F alone',
                        [Action(stage, kind, i) for kind in kinds],
                    )
        backward = {
            (action.stage, action.micro_batch) for action in actions if action.kind in 'BI'
        }
        if backward and len(backward) < stages * self.micro_batches:
            forward = {(action.stage, action.micro_batch) for action in actions}
            stage, i = min(forward - backward)
            raise self._wrong(
                f'stage {stage} has no backward for micro-batch {i}, and others have',
                [Action(stage, 'F', i)],
            )

    def _check_own_order(self) -> None:
        for row in self.rows:
            own = {*row}
            done: set[Action] = set()
            for action in row:
                late = [each for each in waits_for(action, own) if each not in done]
                if late:
                    raise self._wrong(
                        f'{action} comes before {_names(late)}, for which it waits', [action]
                    )
                done.add(action)

    def _wrong(self, what: str, cells: Iterable[Action] = ()) -> ValueError:
        rows = [list(row) for row in self.rows]
        return ValueError(f'this schedule will not do: {what}\n' + _draw(rows, set(cells)))

    def __str__(self) -> str:
        grid, _ = steps(self.rows)
        return _draw(grid)

    def _repr_html_(self) -> str:
        from torchgpipe.base.html import rows_as_html

        grid, _ = steps(self.rows)
        actions = []
        for device, row in enumerate(grid):
            for step, action in enumerate(row):
                if action is not None:
                    actions.append(Timed(device, action, step, step + 1))
        names = [f'device {device}' for device in range(len(self.rows))]
        caption = f'{len(self.rows)} devices, {self.micro_batches} micro-batches'
        return rows_as_html(names, action_boxes(actions), caption)


#: A schedule, its name, or the path of a file with one as CSV.
ScheduleLike = str | os.PathLike[str] | Schedule


def waits_for(action: Action, actions: Collection[Action]) -> list[Action]:
    """Return the predecessors of an action among the given actions.

    >>> waits_for(Action(0, 'B', 3), {Action.parse(x) for x in ('0F3', '1I3', '0B3', '1F3')})
    [Action(stage=0, kind='F', micro_batch=3), Action(stage=1, kind='I', micro_batch=3)]
    """
    stage, kind, i = action
    return [each for on, k in WAITS[kind] if (each := Action(stage + on, k, i)) in actions]


def steps(
    rows: Sequence[Sequence[Action]], pairs: Iterable[tuple[Action, Action]] = ()
) -> tuple[Grid, list[Action]]:
    """Run a schedule in steps, with one step per action.

    Args:
        pairs: Additional pairs of actions, the second of which waits for the first.

    Returns:
        The action of each device in each step, and the actions at which devices block, if any.
    """
    actions = {action for row in rows for action in row}
    queues = [list(reversed(row)) for row in rows]
    also: dict[Action, list[Action]] = {}
    for one, next in pairs:
        also.setdefault(next, []).append(one)
    done: set[Action] = set()
    grid: Grid = [[] for _ in rows]
    while any(queues):
        now = [
            queue[-1]
            if queue
            and done.issuperset(waits_for(queue[-1], actions))
            and done.issuperset(also.get(queue[-1], ()))
            else None
            for queue in queues
        ]
        if not any(now):
            return grid, [queue[-1] for queue in queues if queue]
        for line, queue, action in zip(grid, queues, now):
            line.append(action)
            if action:
                done.add(queue.pop())
    return grid, []


def by_step(grid: Grid) -> Iterator[Action]:
    """Yield the actions of a schedule, in the order of its steps."""
    for column in zip_longest(*grid):
        yield from filter(None, column)


def in_flight(schedule: Schedule, start: str = 'F') -> dict[int, int]:
    r"""Return for each stage the most micro-batches that are in flight at a time.

    >>> in_flight(Schedule.parse('0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2'))
    {0: 2, 1: 1}

    Args:
        start: The kinds of actions at which a micro-batch starts to count, until ``B`` or ``W``.
    """
    now: dict[int, int] = {}
    most: dict[int, int] = {}
    for row in schedule.rows:
        for stage, kind, _ in row:
            now[stage] = now.get(stage, 0) + (kind in start)
            most[stage] = max(most.get(stage, 0), now[stage])
            now[stage] -= kind in 'BW'
    return most


def _draw(grid: Sequence[Sequence[Action | None]], marked: Collection[Action] = ()) -> str:
    """Draw a row for each device, with marked actions between arrows."""
    cells = [
        [f'>{action}<' if action in marked else str(action or '') for action in row]
        for row in grid
    ]
    width = max((len(cell) for row in cells for cell in row), default=0)
    return '\n'.join(' '.join(cell.ljust(width) for cell in row).rstrip() for row in cells)


def _names(actions: Iterable[object]) -> str:
    return ', '.join(map(str, actions))
