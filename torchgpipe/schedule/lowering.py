"""Messages of a schedule whose stages are on several ranks: senders, receivers and order.

The result of an action goes to the stages that need it. A forward sends its batch to the next
stage, and its skips directly to the stages that pop them. A backward sends each gradient to the
stage that its tensor came from. The steps of the schedule give one order of all actions. In the
rows of sender and receiver, a message has the place at which this order computes its content::

    order       0F0         0F1          1F0          2F0    …
    rank 0      0F0 0F0>1   0F1 0F1>1
    rank 1          0F0>1       0F1>1    1F0 1F0>2
    rank 2                                   1F0>2    2F0    …

So two ranks have the messages between them in the same order, as NCCL requires. There is no
deadlock, even if a send waits for its receive, because one rank alone could run this order. There
could be one if each receive came directly before its use. The sender might wait for another
message at that time.
"""
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torchgpipe.schedule.schedule import Action, Schedule, by_step, steps

__all__ = ['Message', 'Receive', 'Row', 'Send', 'with_messages']


class Message(NamedTuple):
    """The result of an action, for another stage.

    >>> str(Message(Action(0, 'F', 3), 2))
    '0F3>2'
    """

    #: The action that computes it.
    action: Action
    #: The stage that receives it.
    stage: int

    def __str__(self) -> str:
        return f'{self.action}>{self.stage}'


class Send(Message):
    """A message that the rank sends."""

    __slots__ = ()


class Receive(Message):
    """A message that the rank receives."""

    __slots__ = ()


#: The actions, sends and receives of a rank, in order.
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
        skips: Pairs of stages. The first stashes a skip that the second pops. If the second is the
            next stage, the skip is part of the batch's message.
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
    """Return the stages that need the result of an action."""
    if action.kind == 'F':
        return readers[action.stage]
    return writers[action.stage] if action.kind in 'BI' else set()
