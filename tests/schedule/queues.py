"""A simulation of messages that wait in queues, as NCCL processes them."""

from collections import defaultdict, deque

from torchgpipe.schedule import Action
from torchgpipe.schedule.messages import Message, Receive, Send


def pair(one, other):
    """Return the queue of a pair of ranks, as NCCL has it."""
    return frozenset((one, other))


def stuck(rows, blocking):
    """Return whether ranks wait for each other, with one queue for each pair of them."""
    try:
        times_in_queues(rows, lambda action: 1.0, queue=pair, blocking=blocking)
    except ValueError:
        return True
    return False


def cell_of(item):
    """Return the stage, the direction and the micro-batch of an action, or of a message for it."""
    action = item if isinstance(item, Action) else item.action
    return item.stage, action.kind == 'F', action.micro_batch


def times_in_queues(rows, seconds, transfer=0.0, queue=None, blocking=False):
    """Return the time at which each action ends, if messages wait in queues.

    A message starts when sender and receiver have reached it in their rows, and when all earlier
    messages in its queue have arrived on both ranks.

    Args:
        rows: The rows, as ``with_messages`` returns them.
        seconds: Returns the seconds of an action.
        transfer: The seconds of a message.
        queue: Returns the queue of the messages from one rank to another one. By default, each
            message has a queue of its own.
        blocking: Whether a rank that sends continues only when the message has arrived.

    Raises:
        ValueError: The ranks wait for each other.
    """
    rank_of = {
        item.stage: rank
        for rank, row in enumerate(rows)
        for item in row
        if isinstance(item, Action)
    }
    #: By cell, the messages that it waits for.
    needs = defaultdict(list)
    for row in rows:
        for item in row:
            if isinstance(item, Receive):
                needs[cell_of(item)].append(item)

    ends = {}
    arrived = {}
    now = [0.0] * len(rows)
    known = set()
    remaining = [deque(row) for row in rows]
    #: By queue and rank, the messages that wait, each with the time at which it was posted.
    posted = defaultdict(deque)
    #: By queue and rank, the time at which the last message has arrived.
    free = defaultdict(float)

    def advance(rank):
        """Run a rank until an action waits."""
        while remaining[rank]:
            item = remaining[rank][0]
            if isinstance(item, Message):
                if (item, rank) not in known:
                    known.add((item, rank))
                    posted[queue_of(item), rank].append((item, now[rank]))
                if blocking and isinstance(item, Send):
                    if item not in arrived:
                        return
                    now[rank] = max(now[rank], arrived[item])
            elif isinstance(item, Action):
                messages = needs[cell_of(item)] if item.kind in 'FBI' else []
                if any(message not in arrived for message in messages):
                    return
                now[rank] = max([now[rank], *(arrived[message] for message in messages)])
                now[rank] += seconds(item)
                ends[item] = now[rank]
            remaining[rank].popleft()

    def queue_of(message):
        if queue is None:
            return message
        return queue(rank_of[message.action.stage], rank_of[message.stage])

    def deliver(name, rank):
        """Deliver the messages that a rank sends, as long as they are first on both ranks."""
        outgoing = posted[name, rank]
        while outgoing and rank_of[outgoing[0][0].action.stage] == rank:
            message, sent = outgoing[0]
            other = rank_of[message.stage]
            incoming = posted[name, other]
            if not incoming or incoming[0][0] != message:
                return
            outgoing.popleft()
            _, received = incoming.popleft()
            start = max(sent, received, free[name, rank], free[name, other])
            arrived[message] = free[name, rank] = free[name, other] = start + transfer

    progress = -1
    while progress < len(ends) + len(arrived):
        progress = len(ends) + len(arrived)
        for rank in range(len(rows)):
            advance(rank)
        for name, rank in [*posted]:
            deliver(name, rank)

    if any(remaining):
        waiting = [f'rank {rank} at {row[0]}' for rank, row in enumerate(remaining) if row]
        raise ValueError('ranks wait for each other: ' + '; '.join(waiting))
    return ends
