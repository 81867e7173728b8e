"""Simulations: by hand, against the literature, and against the definition of each time."""

from dataclasses import replace
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgpipe.balance import SkipProfile
from torchgpipe.plan import Costs, Link, StageCosts, simulate
from torchgpipe.schedule import NAMES, Action, Schedule, make
from torchgpipe.schedule.generators import V_SHAPED
from torchgpipe.schedule.schedule import waits_for

SEVERAL = {'interleaved': 2, 'looped-bfs': 2, **dict.fromkeys(V_SHAPED, 2)}


def times(simulation):
    """Return start and end of each action by its text."""
    return {str(x.action): (x.start, x.end) for x in simulation.actions}


def test_by_hand():
    costs = Costs([StageCosts(1.0, 2.0), StageCosts(2.0, 3.0)], links=Link(0.25, 8.0))
    costs = replace(costs, stages=[replace(x, output_bytes=2.0) for x in costs.stages])
    simulation = simulate(make('1f1b', 2, 2), costs)
    assert times(simulation) == {
        '0F0': (0, 1),
        '0F1': (1, 2),
        '1F0': (1.5, 3.5),
        '1B0': (3.5, 6.5),
        '0B0': (7, 9),
        '1F1': (6.5, 8.5),
        '1B1': (8.5, 11.5),
        '0B1': (12, 14),
    }
    assert simulation.seconds == 14 and simulation.busy == (6, 10)
    assert simulation.bubble == pytest.approx(12 / 28)
    # Device 0 works from 0 to 14, and device 1 is busy for 10 seconds.
    assert bubble_rate(simulation) == pytest.approx(4 / 14)


def test_halves_of_backward_by_hand():
    costs = Costs([StageCosts(1.0, 3.0, weight_backward=1.0)] * 2)
    assert times(simulate(make('zb-h1', 2, 1), costs)) == {
        '0F0': (0, 1),
        '1F0': (1, 2),
        '1I0': (2, 4),
        '1W0': (4, 5),
        '0I0': (4, 6),
        '0W0': (6, 7),
    }
    costs = Costs([StageCosts(1.0, 3.0, weight_backward=1.0, input_backward=2.5)] * 2)
    assert simulate(make('zb-h1', 2, 1), costs).seconds == 1 + 1 + 2.5 + 2.5 + 1


def test_recomputations_by_hand():
    """Of the first micro-batch only: an action of its own, or the first thing in backward."""
    for row, end in [
        ('0F0,0F1,0B0,0B1', 12),
        ('0F0,0F1,0R0,0B0,0B1', 12),
        ('0F0,0F1,0R0,0I0,0W0,0B1', 12.5),
    ]:
        costs = Costs([StageCosts(1.0, 3.0, input_backward=2.0, recomputation=4.0, recomputed=1)])
        assert simulate(Schedule.parse(row), costs).seconds == end


def test_activations_that_a_schedule_recomputes_are_not_kept():
    """Of the second micro-batch only, by ``R``; a stage has as many bytes as activations."""
    stage = StageCosts(1.0, 3.0, recomputation=2.0, activation_bytes=8.0)
    simulation = simulate(Schedule.parse('0F0,0F1,0B0,0R1,0B1'), Costs([stage]))
    assert simulation.seconds == 10 and simulation.peak_bytes == (8,)
    assert simulate(Schedule.parse('0F0,0F1,0B0,0B1'), Costs([stage])).peak_bytes == (16,)


def test_more_recomputations_than_micro_batches():
    costs = Costs([StageCosts(1.0, 3.0, recomputed=9)])
    assert simulate(make('1f1b', 1, 2), costs).seconds == 2 * (1 + 1 + 3)


def test_a_recomputation_of_its_own_goes_beside_the_backward_of_others():
    schedule = Schedule.parse('0F0,0R0,0B0\n1F0,1B0')
    costs = Costs([StageCosts(1.0, 1.0, recomputed=1), StageCosts(1.0, 1.0)])
    assert times(simulate(schedule, costs))['0B0'] == (3, 4)


def bubble_rate(simulation):
    """Return one minus the largest work of a device, relative to the longest span of a device.

    A device's span is the time from its first start to its last end.
    """
    starts, ends = {}, {}
    for timed in simulation.actions:
        starts.setdefault(timed.device, timed.start)
        ends[timed.device] = timed.end
    span = max(ends[device] - starts[device] for device in ends)
    return 1 - max(simulation.busy) / span


def test_bubbles_of_the_literature():
    """Qi et al., "Zero Bubble Pipeline Parallelism" (2023), tables 5 and 9; in ms."""
    for name, rate in [('1f1b', 0.2431), ('zb-h1', 0.1585), ('zb-h2', 0.1083)]:
        stage = StageCosts(18.522, 18.086 + 9.337, weight_backward=9.337)
        simulation = simulate(make(name, 8, 24), Costs([stage] * 8, links=Link(0.601)))
        assert round(bubble_rate(simulation), 4) == rate


def test_bubbles_of_equal_stages():
    for n, m in [(1, 1), (2, 3), (4, 8), (5, 7)]:
        for name in ('gpipe', '1f1b'):
            simulation = simulate(make(name, n, m), Costs([StageCosts(1.0, 2.0)] * n))
            assert simulation.seconds == 3 * (m + n - 1)
            assert simulation.bubble == pytest.approx((n - 1) / (m + n - 1))


def test_skips_take_time():
    """A skip takes longer than the way through the stage between."""
    schedule = make('1f1b', 3, 1)
    costs = Costs([StageCosts(1.0, 1.0)] * 3, [SkipProfile(0, 2, 10)], Link(bandwidth=2.0))
    found = times(simulate(schedule, costs))
    assert found['2F0'] == (6, 7) and found['0B0'] == (13, 14)


def test_links_between_pairs_of_devices():
    links = [[Link()] * 3 for _ in range(3)]
    links[0][1], links[1][2] = Link(10.0), Link(20.0)
    links[2][1], links[1][0] = Link(30.0), Link(40.0)
    costs = Costs([StageCosts(1.0, 1.0)] * 3, links=links)
    starts = [x.start for x in simulate(make('1f1b', 3, 1), costs).actions]
    assert starts == [0, 105, 11, 64, 32, 33]


def test_copies_over_a_link_follow_each_other():
    """Each takes 4 seconds of the link, and one more to arrive; the forward takes only one."""
    costs = Costs([StageCosts(1.0, 1.0, output_bytes=8.0)] * 2, links=Link(1.0, 2.0))
    found = times(simulate(make('gpipe', 2, 3), costs))
    assert [found[f'1F{i}'][0] for i in range(3)] == [6, 10, 14]
    # Gradients go the other way, where the first one finds the link free.
    last = found['1F2'][1]
    assert [found[f'0B{i}'][0] for i in (2, 1, 0)] == [last + 6, last + 10, last + 14]


def test_a_slow_link_to_one_device_does_not_delay_copies_to_another():
    links = [[Link()] * 3 for _ in range(3)]
    links[0][1] = Link(bandwidth=0.1)
    costs = Costs(
        [StageCosts(1.0, 1.0, output_bytes=1.0)] * 3, [SkipProfile(0, 2, 10)], links=links
    )
    found = times(simulate(make('gpipe', 3, 1), costs))
    assert found['1F0'][0] == 11 and found['2F0'][0] == 12
    links[0][2] = Link(bandwidth=0.5)
    found = times(simulate(make('gpipe', 3, 1), replace(costs, links=links)))
    assert found['2F0'][0] == 21


def test_a_skip_uses_the_link_while_it_is_idle():
    """It is sent after the batch of its stage, long before a batch that is needed with it."""
    schedule = Schedule.parse('0F0,2F0,2B0,0B0\n1F0,3F0,3B0,1B0')
    stages = [StageCosts(1.0, 2.0, output_bytes=1.0)] * 4
    found = times(simulate(schedule, Costs(stages, [SkipProfile(0, 3, 2)], Link(bandwidth=1.0))))
    assert found['1F0'] == (2, 3) and found['2F0'] == (4, 5) and found['3F0'] == (6, 7)
    late = times(simulate(schedule, Costs(stages, [SkipProfile(0, 3, 10)], Link(bandwidth=1.0))))
    assert late['3F0'] == (13, 14)  # The link is busy with the skip until 12.


def test_a_device_gets_results_in_the_order_in_which_another_one_has_them():
    schedule = Schedule.parse('0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1')
    costs = Costs([StageCosts(1.0, 2.0, output_bytes=10.0)] * 2, links=Link(bandwidth=1.0))
    assert times(simulate(schedule, costs))['1F1'] == (21, 22)


def test_stages_of_one_device_need_no_copies():
    costs = Costs([StageCosts(1.0, 1.0, output_bytes=1.0)] * 2, links=Link(10.0, 1.0))
    assert simulate(Schedule.parse('0F0,1F0,1B0,0B0'), costs).seconds == 4


def test_more_to_wait_for():
    """As where one thread goes through the backward of all devices."""
    schedule = make('gpipe', 2, 2)
    order = [Action.parse(x) for x in ('1B1', '0B1', '1B0', '0B0')]
    simulation = simulate(schedule, Costs([StageCosts(1.0, 2.0)] * 2), [*zip(order, order[1:])])
    assert times(simulation)['1B0'] == (7, 9) and simulation.seconds == 3 + 8


def test_schedules_that_will_not_do():
    for text, what in [
        ('', 'the schedule is empty'),
        ('0F0,0F0', '0F0 is there twice'),
        ('0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1', 'it cannot go on: 0B0 waits for 0F0, 1B0'),
    ]:
        schedule = Schedule.parse(text)
        with pytest.raises(ValueError, match=what):
            simulate(schedule, Costs([StageCosts(1.0, 1.0)] * len(schedule.rows)))


def test_costs_of_other_stages():
    with pytest.raises(ValueError, match='costs are those of 3 stages, but the schedule has 2'):
        simulate(make('1f1b', 2, 2), Costs([StageCosts(1.0, 1.0)] * 3))


def test_pairs_that_keep_each_other_from_going_on():
    one, other = Action(0, 'F', 0), Action(1, 'F', 0)
    with pytest.raises(ValueError, match='cannot go on with what actions wait for as well'):
        simulate(make('1f1b', 2, 1), Costs([StageCosts(1.0, 1.0)] * 2), [(other, one)])


@pytest.mark.slow
def test_many_stages_and_micro_batches():
    """In linear time: 64 by 1024 takes a good part of a second."""
    simulation = simulate(make('1f1b', 64, 1024), Costs([StageCosts(1.0, 2.0)] * 64))
    assert simulation.seconds == 3 * (1024 + 63)


def messages_of(schedule, costs):
    """Return by action the actions that it waits for, with the bytes of their results."""
    place = {x: device for device, row in enumerate(schedule.rows) for x in row}
    found = {}
    for x in place:
        found[x] = [
            (y, costs.stages[min(x.stage, y.stage)].output_bytes) for y in waits_for(x, place)
        ]
        for skip in costs.skips:
            if x.kind == 'F':
                pairs = [(skip.source, skip.target, 'F')]
            else:
                pairs = [(skip.target, skip.source, kind) for kind in 'BI']
            for source, target, kind in pairs:
                y = Action(source, kind, x.micro_batch)
                if x.stage == target and y in place and x.kind in 'FBI':
                    found[x].append((y, skip.bytes))
    return found


def slowly(schedule, costs):
    """Compute when each action starts, from the actions that it waits for, recursively."""
    place = {x: device for device, row in enumerate(schedule.rows) for x in row}
    before = {x: y for row in schedule.rows for x, y in zip(row[1:], row)}
    messages = messages_of(schedule, costs)
    #: By action, the actions and indices of messages with its result.
    readers = {y: [] for y in place}
    for x in place:
        for number, (y, _) in enumerate(messages[x]):
            readers[y].append((abs(x.stage - y.stage), number, x))
    #: By link, its messages in the order in which they are sent, the nearest stage first.
    links = {}
    #: By action and index among its messages, the place of the message on its link.
    places = {}
    for y in place:
        for _, number, x in sorted(readers[y]):
            link = links.setdefault((place[y], place[x]), [])
            places[x, number] = len(link)
            link.append(messages[x][number])

    def seconds(x):
        stage = costs.stages[x.stage]
        hidden = x._replace(kind='R') in place
        again = x.kind in 'BI' and x.micro_batch < stage.recomputed and not hidden
        return stage.seconds(x.kind) + again * stage.seconds('R')

    @lru_cache(maxsize=None)
    def leaves(devices, k):
        y, bytes = links[devices][k]
        free = leaves(devices, k - 1) if k else 0.0
        return max(free, start(y) + seconds(y)) + bytes / costs.link(*devices).bandwidth

    @lru_cache(maxsize=None)
    def start(x):
        times = [0.0]
        if x in before:
            times.append(start(before[x]) + seconds(before[x]))
        for number, (y, _) in enumerate(messages[x]):
            devices = place[y], place[x]
            if devices[0] == devices[1]:
                times.append(start(y) + seconds(y))
            else:
                times.append(leaves(devices, places[x, number]) + costs.link(*devices).latency)
        return max(times)

    return {x: start(x) for x in place}


@st.composite
def steps(draw):
    """Draw a schedule and its costs, in numbers that add up without rounding."""
    name = draw(st.sampled_from([*NAMES]))
    n, m = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    schedule = make(name, n, m)
    if draw(st.booleans()):
        schedule = Schedule(
            tuple(
                tuple(
                    y
                    for x in row
                    for y in (
                        [x._replace(kind='R'), x] if x.kind in 'BI' and x.micro_batch % 2 else [x]
                    )
                )
                for row in schedule.rows
            )
        )
    number = st.integers(0, 5).map(float)
    number_of_stages = n * SEVERAL.get(name, 1)
    stage = st.builds(StageCosts, *[number] * 5, st.integers(0, m), *[number] * 4)
    stages = [draw(stage) for _ in range(number_of_stages)]
    ends = st.tuples(*[st.integers(0, number_of_stages - 1)] * 2).filter(lambda x: x[0] < x[1])
    skips = (
        draw(st.lists(ends.map(lambda x: SkipProfile(*x, 3)), max_size=2))
        if number_of_stages > 1
        else []
    )
    link = st.builds(Link, number, st.sampled_from([1.0, 2.0, float('inf')]))
    return schedule, Costs(
        stages,
        skips,
        draw(st.lists(st.lists(link, min_size=n, max_size=n), min_size=n, max_size=n)),
    )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(steps())
def test_each_time_equals_its_definition(step):
    schedule, costs = step
    simulation = simulate(schedule, costs)
    assert {x.action: x.start for x in simulation.actions} == slowly(schedule, costs)
    assert [x.action for x in simulation.actions] == [x for row in schedule.rows for x in row]


@settings(max_examples=100, deadline=None)
@given(steps())
def test_properties_of_all_simulations(step):
    schedule, costs = step
    simulation = simulate(schedule, costs)
    for device in range(len(schedule.rows)):
        row = [x for x in simulation.actions if x.device == device]
        assert all(x.end <= y.start for x, y in zip(row, row[1:]))
    stages = costs.stages
    way = sum(x.forward for x in stages)
    assert simulation.seconds >= max(way, *simulation.busy)
    assert 0 <= simulation.bubble <= 1
    lines = zip(simulation.bytes, simulation.peak_bytes, schedule.stages)
    for line, peak, own in lines:
        seconds = [second for second, _ in line]
        assert seconds == sorted(set(seconds)) and seconds[0] == 0
        resident = sum(stages[k].resident_bytes for k in own)
        assert all(bytes >= resident for _, bytes in line)
        assert peak == max(bytes for _, bytes in line)
