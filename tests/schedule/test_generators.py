"""The schedules of the literature: correct for any numbers, and as efficient as their papers
promise."""

from itertools import pairwise
from pathlib import Path

import pytest

from torchgpipe.plan import Costs, StageCosts, simulate
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


def test_activations_of_blocks():
    """In activations of stages, two of which are one of 1F1B."""
    for n in range(2, 17):
        for m in (1, 2, n, 2 * n, 4 * n):
            half = make('v-half', n, m)
            least = make('v-min', n, m)
            assert half.stages == least.stages == make('zb-v', n, m).stages
            most_of_half = max(most_in_flight(row, 'W') for row in half.rows)
            most_of_least = max(most_in_flight(row, 'W') for row in least.rows)
            assert most_of_least <= most_of_half
            if n == 2:
                assert most_of_half <= 4
            else:
                assert most_of_half <= n + (1 if n % 2 else 3)
            if n not in (2, 3, 5):
                # A block lasts 4 n units, two turns 6 at most, and two delays of W 5 each.
                assert most_of_least <= -(-(4 * n + 6 + 10) // 6)


def figures(name, n, times):
    """Return the time and the activations of a step with 4 n micro-batches, relative to 1F1B."""
    results = []
    for schedule, stages in ((name, 2 * n), ('1f1b', n)):
        part = n / stages
        f, i, w = (part * unit for unit in times)
        costs = Costs([StageCosts(f, i + w, w, activation_bytes=part)] * stages)
        simulation = simulate(make(schedule, n, 4 * n), costs)
        most = max(most_in_flight(row, 'BW') for row in make(schedule, n, 4 * n).rows)
        results.append((simulation.seconds, part * most))
    (seconds, activations), (seconds_of_1f1b, activations_of_1f1b) = results
    return activations / activations_of_1f1b, seconds / seconds_of_1f1b


V_SHAPED_BY_MEMORY = ('v-min', 'v-half', 'zb-v')


def test_no_v_shaped_schedule_is_slower_than_one_with_less_activations():
    for n in range(2, 17):
        for times in ((1, 1, 1), (2, 2, 1)):
            points = [figures(name, n, times) for name in V_SHAPED_BY_MEMORY]
            for (less, slower), (more, faster) in pairwise(points):
                assert (less, slower) == (more, faster) or (less < more and slower > faster)
                assert slower < 1.14


def test_the_table_of_v_shaped_schedules_on_the_page():
    page = Path(__file__).parents[2] / 'docs' / 'schedules.md'
    lines = page.read_text().splitlines()
    for n in range(2, 17):
        cells = [str(n)]
        for name in V_SHAPED_BY_MEMORY:
            activations, even = figures(name, n, (1, 1, 1))
            _, uneven = figures(name, n, (2, 2, 1))
            cells += [f'{number:.2f}' for number in (activations, even, uneven)]
        assert f'| {" | ".join(cells)} |' in lines


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
