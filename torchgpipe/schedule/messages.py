"""Messages and actions of units: the rows of a schedule whose stages are on several ranks.

:func:`with_messages` adds messages between ranks. The result of an action goes to the stages that
need it. A forward sends its batch to the next stage, and its skips directly to the stages that pop
them. A backward sends each gradient to the stage that its tensor came from. The steps of the
schedule give one order of all actions. In the rows of sender and receiver, a message has the place
at which this order computes its content::

    order       0F0         0F1          1F0          2F0    …
    rank 0      0F0 0F0>1   0F1 0F1>1
    rank 1          0F0>1       0F1>1    1F0 1F0>2
    rank 2                                   1F0>2    2F0    …

So two ranks have the messages between them in the same order, as NCCL requires. There is no
deadlock, even if a send waits for its receive, because one rank alone could run this order. There
could be one if each receive came directly before its use. The sender might wait for another
message at that time.

A process group of NCCL has one queue for the messages of two ranks. A receive at its head blocks
all messages behind it until its content is there. With a queue for each direction, no message
blocks another one, because all messages of a queue are computed by one rank in the order of the
queue. ``tests/schedule/queues.py`` simulates both::

    one queue for each pair         0F1>1 ◀─ waits for 0F1     1B0>0 (ready, but blocked)
    one for each direction          0F1>1 ◀─ waits for 0F1
                                    1B0>0 ─▶

:func:`with_unit_actions` adds the exchanges between replicas to the row of a rank. The kinds have
the names of PyTorch's pipelining. Stages of a unit share parameters. If replicas have parts of
parameters, a limited number of units is whole at a time, and the next ones are gathered while the
current one runs::

    at most 2   0UNSHARD 2UNSHARD 0F0 0F1  0RESHARD 4UNSHARD 2F0 2F1  …
                0B1 0B0 0REDUCE_GRAD

The gradients of a unit are reduced after its last action and the messages behind it. Replicas that
have all parameters begin with it within the last action, if that is a backward
(:func:`last_backwards`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

from torchgpipe.schedule.schedule import Action, Schedule, by_step, steps

#: How many units are whole at a time by default, as in PyTorch's pipelining.
ACTIVE = 3

#: How many messages to one rank may be in flight at the same time, on the CPU.
AHEAD = 4


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


class Receive(Message):
    """A message that the rank receives."""


class UnitAction(NamedTuple):
    """An exchange between the replicas of a rank, for the parameters of a unit.

    >>> str(UnitAction('UNSHARD', 2))
    '2UNSHARD'
    """

    #: ``'UNSHARD'``: gather parameters; ``'RESHARD'``: free them; ``'REDUCE_GRAD'``: add up their
    #: gradients, and free both.
    kind: str
    #: The first stage of the unit.
    stage: int

    def __str__(self) -> str:
        return f'{self.stage}{self.kind}'


Item = Action | Message | UnitAction

#: The actions and messages of a rank and the actions of its units, in order.
Row = tuple[Item, ...]


def with_messages(
    schedule: Schedule,
    skips: Iterable[tuple[int, int]] = (),
    ranks: Sequence[int] | None = None,
) -> tuple[Row, ...]:
    """Return the rows of a schedule with the messages of each rank.

    >>> from torchgpipe.schedule import make
    >>> for row in with_messages(make('gpipe', 2, 1)):
    ...     print(*row)
    0F0 0F0>1 1B0>0 0B0
    0F0>1 1F0 1B0 1B0>0

    Args:
        skips: Pairs of stages. The first stashes a skip that the second pops. If the second is the
            next stage, the skip is part of the batch's message.
        ranks: The rank of each stage; by default, a rank has the stages of a row.
    """
    owners = {}
    for rank, row in enumerate(schedule.stages):
        owners.update(dict.fromkeys(row, rank))
    if ranks is not None:
        owners = dict(enumerate(ranks))

    # By stage, the stages that need its outputs.
    readers = {}
    # By stage, the stages that need its gradients.
    writers = {}
    for stage in chain.from_iterable(schedule.stages):
        readers[stage] = {stage + 1} & owners.keys()
        writers[stage] = {stage - 1} & owners.keys()
    for stash, pop in skips:
        readers[stash].add(pop)
        writers[pop].add(stash)
    # By kind of an action and its stage, the stages that need its result. R and W have none.
    receivers = {'F': readers, 'B': writers, 'I': writers}

    rows: list[list[Item]] = [[] for _ in range(1 + max(owners.values()))]
    # One order of all actions for all ranks, so that no two of them wait for each other.
    grid, _ = steps(schedule.rows)
    for action in by_step(grid):
        sender = rows[owners[action.stage]]
        sender.append(action)
        if action.kind not in receivers:
            continue
        stages = receivers[action.kind][action.stage]
        # The nearest stage needs its message first.
        for stage in sorted(stages, key=lambda stage: abs(stage - action.stage)):
            receiver = rows[owners[stage]]
            # Stages of one rank share its memory.
            if receiver is not sender:
                sender.append(Send(action, stage))
                receiver.append(Receive(action, stage))
    return tuple(map(tuple, rows))


def edges(
    places: Sequence[int],
    skips: Iterable[tuple[int, int]] = (),
) -> list[tuple[int, int]]:
    """Return the pairs of ranks with messages between them: the sender and the receiver.

    >>> edges([0, 1, 2], skips=[(0, 2)])
    [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    """
    result = set()
    # A batch goes to the next stage, and a skip to any later one.
    batches = pairwise(range(len(places)))
    for one, other in chain(batches, skips):
        sender = places[one]
        receiver = places[other]
        if sender != receiver:
            # Activations go one way, and their gradients the other way.
            result.add((sender, receiver))
            result.add((receiver, sender))
    return sorted(result)


def with_unit_actions(
    row: Row,
    units: Mapping[int, int],
    most: int,
    reduced: Collection[int] = (),
) -> Row:
    """Return the row of a rank with the exchanges between its replicas.

    >>> row = tuple(map(Action.parse, '0F0 2F0 2B0 0B0'.split()))
    >>> print(*with_unit_actions(row, {0: 0, 2: 2}, most=1, reduced=[0, 2]))
    0UNSHARD 0F0 0RESHARD 2UNSHARD 2F0 2B0 2REDUCE_GRAD 0UNSHARD 0B0 0REDUCE_GRAD

    Args:
        units: By stage, the first stage of its unit.
        most: The largest number of whole units at a time; 0 if all parameters stay whole.
        reduced: The units whose gradients are reduced within the row.
    """
    coming = _coming(row, units)
    # By unit, the place of its last action.
    last = {}
    for k, item in enumerate(row):
        if isinstance(item, Action):
            last[units[item.stage]] = k

    result: list[Item] = []
    whole: list[int] = []
    # The unit whose last action was the previous one, if any.
    done: list[int] = []

    def reduce() -> None:
        for unit in done:
            result.append(UnitAction('REDUCE_GRAD', unit))
            # The reduction frees parameters, too, so the unit needs no RESHARD.
            if unit in whole:
                whole.remove(unit)
        done.clear()

    for k, item in enumerate(row):
        if isinstance(item, Action):
            # The messages behind the last action of a unit are now sent.
            reduce()
            needed = coming[k][:most]
            # Parameters are freed first, so that at most so many units are whole.
            for unit in whole:
                if unit not in needed:
                    result.append(UnitAction('RESHARD', unit))
            for unit in needed:
                if unit not in whole:
                    result.append(UnitAction('UNSHARD', unit))
            whole = needed
            unit = units[item.stage]
            if unit in reduced and last[unit] == k:
                done.append(unit)
        result.append(item)
    reduce()
    return tuple(result)


def last_backwards(row: Row, units: Mapping[int, int]) -> dict[Action, int]:
    """Return the backwards that complete the gradients of a unit, each with its unit.

    Only messages are between them and the reduction of the unit. There is none for a unit that
    ends with the second half of a backward, or that is not reduced right after its last action.

    >>> units = {0: 0, 2: 2}
    >>> row = tuple(map(Action.parse, '0F0 2F0 2B0 0B0'.split()))
    >>> row = with_unit_actions(row, units, most=0, reduced=[0, 2])
    >>> print({str(action): unit for action, unit in last_backwards(row, units).items()})
    {'2B0': 2, '0B0': 0}

    Args:
        units: By stage, the first stage of its unit.
    """
    result = {}
    last: Action | None = None
    for item in row:
        if isinstance(item, Action):
            last = item
        elif isinstance(item, UnitAction):
            is_reduced = item.kind == 'REDUCE_GRAD'
            if is_reduced and last and last.kind == 'B' and units[last.stage] == item.stage:
                result[last] = item.stage
            last = None
    return result


def _coming(
    row: Row,
    units: Mapping[int, int],
) -> list[list[int]]:
    """Return for each item of a row the units in the order of their next actions."""
    # From the end, because an item needs the actions after it.
    coming = []
    order: list[int] = []
    for item in reversed(row):
        if isinstance(item, Action):
            unit = units[item.stage]
            later = [other for other in order if other != unit]
            order = [unit, *later]
        coming.append(order)
    return coming[::-1]


def receiving_early(row: Row) -> Row:
    r"""Return a row in which each receive is before the action that was before it.

    >>> rows = with_messages(Schedule.parse('0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1'))
    >>> print(*rows[0])
    0F0 0F0>1 0F1 0F1>1 1B0>0 0B0 1B1>0 0B1
    >>> print(*receiving_early(rows[0]))
    0F0 0F0>1 1B0>0 0F1 0F1>1 1B1>0 0B0 0B1
    """
    result: list[Item] = []
    early = 0  # the place of the last action and of receives before it
    for item in row:
        if isinstance(item, Receive):
            # Receives keep their order, which has to be the order of the sends.
            result.insert(early, item)
            early += 1
            continue
        if isinstance(item, Action):
            early = len(result)
        result.append(item)
    return tuple(result)
