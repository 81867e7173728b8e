"""Messages of a schedule whose stages are on several ranks: senders, receivers and order.

What an action computed goes to the stages that need it: a forward's batch to the next stage, its
skips straight to the stages that pop them; and backwards each gradient to where its tensor came
from. All actions stand in one order, that of the schedule's steps. A message stands in the rows of
both its ends at the place where its content is computed in that order::

    order       0F0         0F1          1F0          2F0    …
    rank 0      0F0 0F0>1   0F1 0F1>1
    rank 1          0F0>1       0F1>1    1F0 1F0>2
    rank 2                                   1F0>2    2F0    …

So two ranks have the messages between them in the same order, as NCCL asks for; and as that order
could be run by one rank alone, nothing is stuck, also where a send waits for its receive. It would
be where a receive stands right before its use: the rank that sends may wait for another message
meanwhile.
"""
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torchgpipe.schedule.schedule import Action, Schedule, by_step, steps

__all__ = ['Message', 'Receive', 'Row', 'Send', 'with_messages']


class Message(NamedTuple):
    """What an action computed for another stage.

    >>> str(Message(Action(0, 'F', 3), 2))
    '0F3>2'
    """

    #: What computes it.
    action: Action
    #: The stage that it is for.
    stage: int

    def __str__(self) -> str:
        return f'{self.action}>{self.stage}'


class Send(Message):
    """A message that leaves."""

    __slots__ = ()


class Receive(Message):
    """A message that comes in."""

    __slots__ = ()


#: What a rank does: it computes, sends and receives.
Row = tuple[Action | Send | Receive, ...]


def with_messages(schedule: Schedule, skips: Iterable[tuple[int, int]] = (),
                  ranks: Sequence[int] | None = None) -> tuple[Row, ...]:
    """Return the rows of a schedule with the messages of each rank.

    >>> from torchgpipe.schedule import make
    >>> for row in with_messages(make('gpipe', 2, 1)):
    ...     print(*row)
    0F0 0F0>1 1B0>0 0B0
    0F0>1 1F0 1B0 1B0>0

    Args:
        schedule: The schedule.
        skips: Pairs of stages of which the first one stashes a skip that the second one pops. It
            goes along with the batch where that is the next one.
        ranks: The rank of each stage; by default, a rank has the stages of a row.
    """
    stages = [stage for row in schedule.stages for stage in row]
    owners = {stage: rank for rank, row in enumerate(schedule.stages) for stage in row}
    if ranks is not None:
        owners = dict(enumerate(ranks))
    readers = {stage: {stage + 1} & owners.keys() for stage in stages}
    writers = {stage: {stage - 1} & owners.keys() for stage in stages}
    for one, other in skips:
        readers[one].add(other)
        writers[other].add(one)
    rows: list[list[Action | Send | Receive]] = [[] for _ in range(1 + max(owners.values()))]
    for action in by_step(steps(schedule.rows)[0]):
        here = owners[action.stage]
        rows[here].append(action)
        for stage in sorted(_receivers(action, readers, writers)):
            if owners[stage] != here:
                rows[here].append(Send(action, stage))
                rows[owners[stage]].append(Receive(action, stage))
    return tuple(map(tuple, rows))


def _receivers(action: Action, readers: dict[int, set[int]], writers: dict[int, set[int]]
               ) -> set[int]:
    """Return the stages that need what an action computes."""
    if action.kind == 'F':
        return readers[action.stage]
    return writers[action.stage] if action.kind in 'BI' else set()
