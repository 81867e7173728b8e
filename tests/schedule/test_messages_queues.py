"""Queues of messages: none blocks another one if each direction of two ranks has a queue."""

import random

import pytest

from tests.schedule.queues import pair, times_in_queues
from torchgpipe.schedule import NAMES, make
from torchgpipe.schedule.generators import V_SHAPED
from torchgpipe.schedule.messages import Receive, edges, receiving_early, with_messages

STAGES = {'interleaved': (2, 3), 'looped-bfs': (2,), **dict.fromkeys(V_SHAPED, (2,))}

#: The seconds of a message. Actions take from 0.5 to 2 seconds.
TRANSFER = 0.2


def direction(one, other):
    return one, other


def programs(name):
    """Yield rows of a schedule, and the seconds of actions."""
    for ranks in (2, 3, 4):
        for v in STAGES.get(name, (1,)):
            for m in (1, 2, 3, 5, 8, 13):
                chance = random.Random(100 * ranks + m)
                skips = [
                    tuple(sorted(chance.sample(range(ranks * v), 2)))
                    for _ in range(chance.randint(1, 4))
                ]
                schedule = make(name, ranks, m, v)
                for each in (schedule, schedule.recomputing([m] * ranks * v)):
                    costs = {action: chance.uniform(0.5, 2) for row in each.rows for action in row}
                    yield with_messages(each), costs.__getitem__
                    yield with_messages(each, skips), costs.__getitem__


def test_a_queue_for_each_direction_is_as_fast_as_one_for_each_message():
    for name in NAMES:
        for late, seconds in programs(name):
            rows = [*map(receiving_early, late)]
            times = times_in_queues(rows, seconds, TRANSFER, direction)
            assert times == times_in_queues(rows, seconds, TRANSFER), name


def test_early_receives_in_one_queue_for_each_pair_block_the_sends_behind_them():
    for name in NAMES:
        for late, seconds in programs(name):
            if not any(getattr(each, 'kind', '') == 'R' for row in late for each in row):
                with pytest.raises(ValueError, match=r'ranks wait for each other: rank 0 at \d'):
                    times_in_queues([*map(receiving_early, late)], seconds, TRANSFER, pair)


def test_receives_that_are_late_enough_for_one_queue_wait_for_the_transfer():
    for name in NAMES:
        slower, slowest = 0, 1.0
        for late, seconds in programs(name):
            early = times_in_queues([*map(receiving_early, late)], seconds, TRANSFER, direction)
            times = times_in_queues(late, seconds, TRANSFER, pair)
            ratio = max(times.values()) / max(early.values())
            assert ratio > 1 - 1e-9, name
            slower, slowest = slower + (ratio > 1 + 1e-9), max(slowest, ratio)
        assert slower > 10 and slowest > 1.01, name


def test_a_message_waits_for_its_content_and_for_both_ranks():
    rows = with_messages(make('gpipe', 2, 1))
    times = times_in_queues(rows, lambda action: 3.0 if action.kind == 'F' else 5.0, transfer=1.0)
    ends = {str(action): end for action, end in times.items()}
    assert ends == {'0F0': 3, '1F0': 7, '1B0': 12, '0B0': 18}


def test_receives_move_before_one_action_and_keep_their_order():
    for late, _ in programs('interleaved'):
        for row in late:
            early = receiving_early(row)
            assert [each for each in early if not isinstance(each, Receive)] == [
                each for each in row if not isinstance(each, Receive)
            ]
            assert [each for each in early if isinstance(each, Receive)] == [
                each for each in row if isinstance(each, Receive)
            ]


def test_edges_are_the_pairs_of_ranks_with_messages():
    for places, skips, expected in [
        ([0, 1], (), [(0, 1), (1, 0)]),
        ([0, 1, 1, 0], (), [(0, 1), (1, 0)]),
        ([0, 1, 2, 0, 1, 2], (), [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]),
        (
            [0, 1, 2, 3],
            [(0, 3), (1, 2)],
            [(0, 1), (0, 3), (1, 0), (1, 2), (2, 1), (2, 3), (3, 0), (3, 2)],
        ),
        ([0, 0], (), []),
    ]:
        assert edges(places, skips) == expected
