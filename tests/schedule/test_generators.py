"""The schedules of the literature: correct for any numbers, and as efficient as their papers
promise."""

import pytest

from torchgpipe.schedule import NAMES, make
from torchgpipe.schedule.generators import SPLIT, V_SHAPED
from torchgpipe.schedule.schedule import steps

SEVERAL = {'interleaved': (1, 2, 3), 'looped-bfs': (1, 2, 3), **dict.fromkeys(V_SHAPED, (2,))}


def spans(schedule):
    """Return the steps of each device from its first action to its last one."""
    grid, _ = steps(schedule.rows)
    busy = [[k for k, action in enumerate(row) if action] for row in grid]
    return [row[-1] - row[0] + 1 for row in busy]


def most_in_flight(row, ends):
    """Return the largest number of micro-batches whose activations a device holds."""
    held, most = 0, 0
    for action in row:
        held += (action.kind == 'F') - (action.kind in ends)
        most = max(most, held)
    return most


def test_any_numbers():
    for name in NAMES:
        for n in range(1, 7):
            for m in range(1, 16):
                for v in SEVERAL.get(name, (1,)):
                    schedule = make(name, n, m, v)
                    schedule.validate()
                    assert len(schedule.rows) == n and schedule.micro_batches == m
                    assert all(len(stages) == v for stages in schedule.stages), (name, n)
                    kinds = 3 if name in SPLIT else 2
                    assert sum(map(len, schedule.rows)) == n * v * m * kinds


def test_steps_and_memory():
    for n, m in [(1, 1), (2, 3), (4, 4), (4, 9), (8, 24)]:
        assert max(spans(make('gpipe', n, m))) == max(spans(make('1f1b', n, m))) == 2 * (m + n - 1)
        for s, row in enumerate(make('gpipe', n, m).rows):
            assert most_in_flight(row, 'B') == m
        for s, row in enumerate(make('1f1b', n, m).rows):
            assert most_in_flight(row, 'B') == min(m, n - s)
        for s, row in enumerate(make('zb-h1', n, m).rows):
            assert most_in_flight(row, 'I') == min(m, n - s)
            assert most_in_flight(row, 'W') <= min(m, n)
        for s, row in enumerate(make('zb-h2', n, m).rows):
            assert most_in_flight(row, 'W') <= min(m, 2 * n - 1)


def test_stages_that_are_interleaved_divide_the_bubble():
    for n, m, v in [(2, 4, 2), (4, 8, 2), (4, 8, 4), (3, 9, 3)]:
        assert max(spans(make('interleaved', n, m, v))) == 2 * (m * v + n - 1)
        assert max(spans(make('looped-bfs', n, m, v))) == 2 * (m * v + n - 1)
        # As the paper has it: the forward of the first backward's micro-batch has gone round.
        for device, row in enumerate(make('interleaved', n, m, v).rows):
            warm_up = [action.kind for action in row].index('B')
            assert warm_up == min(m * v, 2 * (n - device - 1) + (v - 1) * n + 1)


def test_there_is_no_bubble():
    for n in range(1, 9):
        for m in (2 * n - 1, 2 * n, 5 * n):
            schedule = make('zb-v', n, m)
            assert max(spans(schedule)) == 6 * m
            # A micro-batch of one of its two stages is half of one of 1F1B's.
            assert max(most_in_flight(row, 'W') for row in schedule.rows) <= 2 * n
            assert max(spans(make('zb-h2', n, m))) == 3 * m
        assert max(spans(make('zb-h1', n, 3 * n))) == 3 * 3 * n + n - 1


def test_a_half_and_a_third_of_the_activations():
    """From four devices on, half is enough for a block every six steps, but not for five."""
    for n in range(1, 12):
        for m in (1, 2, n, 2 * n, 4 * n):
            half, least = make('v-half', n, m), make('v-min', n, m)
            assert half.stages == least.stages == make('zb-v', n, m).stages
            assert max(most_in_flight(row, 'W') for row in half.rows) <= max(2, n)
            assert max(most_in_flight(row, 'W') for row in least.rows) <= max(2, 0.4 * 2 * n)
            if n > 3 and n != 5:
                assert max(spans(half)) <= 6 * m + 4 * n - (3 if n % 3 == 0 else 5)
            if n == 10:
                assert max(spans(least)) == max(spans(half))


def test_unknown_schedules_and_wrong_counts():
    for arguments, what in [
        (('1f2b', 2, 2), 'no schedule .1f2b.; there are gpipe, 1f1b,'),
        (('1f1b', 0, 2), 'devices must be a positive integer, but is 0'),
        (('1f1b', 2, -1), 'micro_batches must be a positive integer, but is -1'),
        (('1f1b', 2, 2, 2), '.1f1b. has one stage per device, but virtual is 2'),
        (('zb-v', 2, 2, 3), '.zb-v. has two stages per device, but virtual is 3'),
        (('interleaved', 2, 2, 0), '.interleaved. has any number of stages per device'),
    ]:
        with pytest.raises(ValueError, match=what):
            make(*arguments)
