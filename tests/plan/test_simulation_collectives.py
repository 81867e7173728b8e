"""Collectives over replicas, by hand."""

from dataclasses import replace

from torchgpipe.plan import Costs, StageCosts, simulate
from torchgpipe.plan.simulation import few
from torchgpipe.schedule import Schedule, make


def collected(simulation):
    """Return start and end of each collective by its kind and stage."""
    return [(f'{x.kind} {x.stage}', x.start, x.end) for x in simulation.collected]


#: Two stages on one device.
TWICE = Schedule.parse('0F0,1F0,1B0,0B0')


def test_collectives_by_hand():
    """Each is beside actions of other stages; one waits for the other. Updates follow."""
    costs = Costs(
        [
            StageCosts(1.0, 2.0, gather=3.0, reduction=1.0, update=0.5),
            StageCosts(1.0, 2.0, gather=4.0, reduction=5.0, update=0.25),
        ]
    )
    simulation = simulate(TWICE, costs)
    assert [x.start for x in simulation.actions] == [3, 7, 8, 10]
    assert collected(simulation) == [
        ('gather 0', 0, 3),
        ('gather 1', 3, 7),
        ('reduction 1', 10, 15),
        ('reduction 0', 15, 16),
        ('update 0', 16, 16.5),
        ('update 1', 16.5, 16.75),
    ]
    assert simulation.seconds == 16.75


def test_the_last_backward_reduces_its_buckets_but_the_last_one():
    """A bucket waits for the one before it, also for one of another stage."""
    stages = [
        StageCosts(1.0, 2.0, reduction=1.0, update=0.5, buckets=4),
        StageCosts(1.0, 2.0, reduction=3.0, update=0.25, buckets=2),
    ]
    simulation = simulate(TWICE, Costs(stages))
    # Backward of stage 1 takes from 2 to 4, and that of stage 0 to 6.
    assert collected(simulation)[:2] == [('reduction 1', 3, 6), ('reduction 0', 6, 7)]
    fast = [replace(stages[0], buckets=4), replace(stages[1], reduction=0.0)]
    assert collected(simulate(TWICE, Costs(fast)))[1] == ('reduction 0', 4.5, 6.25)
    # The second half of a backward completes them at its end.
    halves = Schedule.parse('0F0,0I0,0W0')
    (reduction, _) = collected(simulate(halves, Costs([stages[0]])))
    end = simulate(halves, Costs([stages[0]])).actions[-1].end
    assert reduction == ('reduction 0', end, end + 1)


def test_a_device_frees_stages_and_gathers_them_again():
    """Of five stages of a device, three are whole at a time, while they run or are gathered."""
    schedule = make('looped-bfs', devices=1, micro_batches=2, virtual=5)
    costs = Costs(
        [StageCosts(1.0, 2.0, gather=0.5, reduction=1.0, gathered_bytes=8.0, resident_bytes=1.0)]
        * 5
    )
    simulation = simulate(schedule, costs)
    assert [x.stage for x in simulation.collected if x.kind == 'gather'] == [0, 1, 2, 3, 4, 1, 0]
    assert [x.stage for x in simulation.collected if x.kind == 'free'] == [0, 1]
    # The first stage waits for its gather, all others are gathered before.
    assert simulation.actions[-1].end == 0.5 + 2 * 5 * (1 + 2)
    assert simulation.seconds == 31.5
    # While a stage is gathered, there are the parts of all ranks as well.
    assert simulation.peak_bytes == (5 + 3 * 8 + 8,)
    assert simulate(
        schedule, replace(costs, stages=[replace(x, gather=0.0) for x in costs.stages])
    ).peak_bytes == (5,)


def test_overlapping_collectives_by_hand():
    """Of the first stage, a gather takes time beyond the first forward, of others none.

    A reduction starts with the last backward of its stage, ends after it, and one waits for the
    other.
    """
    for gather, begin in [(3.0, 2.0), (0.5, 0.0)]:
        costs = Costs(
            [
                StageCosts(1.0, 2.0, gather=gather, reduction=1.0, update=0.5),
                StageCosts(1.0, 2.0, gather=4.0, reduction=5.0, update=0.25),
            ],
            overlap=True,
        )
        simulation = simulate(TWICE, costs)
        assert [x.start - begin for x in simulation.actions] == [0, 1, 2, 4]
        assert [
            (name, start - begin, end - begin) for name, start, end in collected(simulation)
        ] == [
            ('gather 0', -begin, 0),
            ('reduction 1', 2, 7),
            ('reduction 0', 7, 8),
            ('update 0', 8, 8.5),
            ('update 1', 8.5, 8.75),
        ]
        short = replace(costs, stages=[replace(x, reduction=0.5) for x in costs.stages])
        assert [
            (name, start - begin, end - begin)
            for name, start, end in collected(simulate(TWICE, short))[1:3]
        ] == [('reduction 1', 2, 4), ('reduction 0', 4, 6)]


def test_numbers_of_the_steady_state():
    for name, devices, m, numbers in [
        ('1f1b', 4, 121, (44, 48)),
        ('1f1b', 5, 121, (45, 50)),
        ('1f1b', 64, 1000, (128, 192)),
        ('interleaved', 4, 121, (45, 49)),
        ('zb-v', 4, 121, (44, 48)),
    ]:
        assert few(name, devices, m) == numbers
