"""Messages of schedules: nothing is stuck, whichever way ranks meet."""

import random

from tests.schedule.queues import cell_of, stuck
from torchgpipe.schedule import Action, make
from torchgpipe.schedule.messages import Message, Receive, Send, with_messages

SHAPES = [
    (name, ranks, m, v)
    for name, v in (
        ('gpipe', 1),
        ('1f1b', 1),
        ('interleaved', 2),
        ('looped-bfs', 2),
        ('zb-h1', 1),
        ('zb-v', 2),
        ('v-half', 2),
        ('v-min', 2),
    )
    for ranks in (2, 3, 4)
    for m in (1, 2, 3, 5, 8)
]


def naive(rows):
    """Put each receive right before its use."""
    found = []
    for row in rows:
        own = []
        for each in row:
            if isinstance(each, Action) and each.kind in 'FBI':
                own += [
                    other
                    for other in row
                    if isinstance(other, Receive) and cell_of(other) == cell_of(each)
                ]
            if not isinstance(each, Receive):
                own.append(each)
        found.append(own)
    return found


def programs():
    """Yield schedules of all kinds, each without skips and with some."""
    for seed, (name, ranks, m, v) in enumerate(SHAPES):
        schedule, chance = (
            make(name, ranks, m, v) if v > 1 else make(name, ranks, m),
            random.Random(seed),
        )
        stages = ranks * v
        number = chance.randint(1, 4)
        pairs = [tuple(sorted(chance.sample(range(stages), 2))) for _ in range(number)]
        yield schedule, ()
        yield schedule, pairs
        yield schedule.recomputing([m] * stages), pairs


def test_no_schedule_is_stuck():
    for blocking in [False, True]:
        assert not [
            schedule
            for schedule, skips in programs()
            if stuck(with_messages(schedule, skips), blocking)
        ]


def test_receives_right_before_their_use_get_stuck():
    count = [stuck(naive(with_messages(schedule, skips)), False) for schedule, skips in programs()]
    assert sum(count) > len(count) / 2


def test_each_received_message_was_sent_and_none_is_missing():
    for schedule, skips in programs():
        rows = with_messages(schedule, skips)
        sent = [each for row in rows for each in row if isinstance(each, Send)]
        received = [each for row in rows for each in row if isinstance(each, Receive)]
        assert sorted(map(str, sent)) == sorted(map(str, received))
        assert (
            tuple(tuple(each for each in row if isinstance(each, Action)) for row in rows)
            == schedule.rows
        )
        assert len({*map(str, sent)}) == len(sent)


def test_a_skip_to_the_next_stage_goes_along_with_the_batch_and_others_straight():
    rows = with_messages(make('gpipe', 3, 1), [(0, 1), (0, 2)])
    assert [str(each) for each in rows[0]] == ['0F0', '0F0>1', '0F0>2', '2B0>0', '1B0>0', '0B0']


def test_stages_of_one_rank_send_each_other_nothing():
    rows = with_messages(make('zb-v', 2, 1, 2))
    assert not [
        each
        for row in rows
        for each in row
        if isinstance(each, Message) and {each.action.stage, each.stage} in ({1, 2}, {0, 3})
    ]
