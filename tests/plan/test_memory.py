"""Memory over time: by hand, and as schedules promise."""

from dataclasses import replace

from torchgpipe.balance import SkipProfile
from torchgpipe.plan import Costs, StageCosts, simulate
from torchgpipe.plan.costs import Halves
from torchgpipe.schedule import Schedule, make


def test_as_many_activations_as_micro_batches_in_flight():
    for n, m in [(1, 3), (2, 5), (4, 8), (8, 24), (4, 2)]:
        costs = Costs([StageCosts(1.0, 2.0, activation_bytes=8.0)] * n)
        assert simulate(make('gpipe', n, m), costs).peak_bytes == (8 * m,) * n
        assert simulate(make('1f1b', n, m), costs).peak_bytes == tuple(
            8 * min(m, n - s) for s in range(n)
        )


def test_activations_are_there_until_gradients_of_weights_are():
    costs = Costs([StageCosts(1.0, 2.0, activation_bytes=8.0)])
    simulation = simulate(Schedule.parse('0F0,0F1,0I0,0I1,0W1,0W0'), costs)
    assert simulation.bytes == (((0.0, 8.0), (1.0, 16.0), (5.0, 8.0), (6.0, 0.0)),)


def test_the_output_is_there_until_gradients_of_weights_are():
    """They need its gradient, which is as large."""
    costs = Costs([StageCosts(1.0, 2.0, output_bytes=8.0)])
    simulation = simulate(Schedule.parse('0F0,0I0,0F1,0I1,0W0,0W1'), costs)
    assert simulation.bytes == (((0.0, 0.0), (1.0, 8.0), (3.0, 16.0), (5.0, 8.0), (6.0, 0.0)),)


def test_virtual_stages_add_up():
    costs = Costs(
        [StageCosts(1.0, 1.0, activation_bytes=2.0**k, resident_bytes=100.0) for k in range(4)]
    )
    peaks = simulate(make('looped-bfs', 2, 3), costs).peak_bytes
    assert peaks == (200 + 3 * (1 + 4), 200 + 3 * (2 + 8))


def test_by_hand_without_recomputation():
    """Device 1 has a copy of its input. The output of device 0 is an activation of device 0."""
    costs = Costs(
        [
            StageCosts(1.0, 1.0, None, None, None, 0, 8.0, 2.0, 16.0, 1000.0),
            StageCosts(1.0, 1.0, None, None, None, 0, 32.0, 4.0, 64.0, 2000.0),
        ]
    )
    simulation = simulate(Schedule.parse('0F0,0B0\n1F0,1B0'), costs)
    one, other = simulation.bytes
    assert one == ((0, 1008), (3, 1010), (4, 1000))
    assert other == ((0, 2000), (1, 2048), (2, 2116), (3, 2000))
    # Memory that ends at the time of the peak is not part of it; memory that starts then is.
    one, other = simulation.peak_parts
    assert one == {'resident': 1000, 'activations': 8, 'backward': 2}
    there = {'resident': 2000, 'activations': 32}
    assert other == {**there, 'inputs': 16, 'backward': 4, 'output': 64}


def test_by_hand_with_recomputation():
    """Inputs are kept. Activations are restored in backward, or before it."""
    costs = Costs(
        [
            StageCosts(1.0, 1.0, None, None, 1.0, 1, 8.0, 2.0, 16.0, 1000.0),
            StageCosts(2.0, 1.0, None, None, 1.0, 1, 32.0, 4.0, 64.0, 2000.0),
        ]
    )
    schedule = Schedule.parse('0F0,0F1,0B0,0B1\n1F0,1F1,1R0,1B0,1B1')
    one, other = simulate(schedule, costs).bytes
    # 0F 0-1, 1-2; 1F 1-3, 3-5; 1R0 5-6; 1B 6-7, 7-8; 0B0 7-9, 0B1 9-10
    assert one == ((0, 1000), (1, 1008), (7, 1018), (8, 1034), (9, 1010), (10, 1000))
    # The second input waits for 1F1. 1F0 keeps its input, 1F1 all; outputs stay for 1B.
    assert other == (
        (0, 2000),
        (1, 2016),
        (2, 2032),
        (3, 2128),
        (5, 2224),
        (6, 2228),
        (7, 2116),
        (8, 2000),
    )


def test_outputs_wait_on_a_slower_device():
    """By the allocators of simulated devices, the faster one has none of it."""
    costs = Costs([StageCosts(time, time, recomputed=8, output_bytes=2.0) for time in (1.0, 3.0)])
    one, other = simulate(make('gpipe', 2, 8), costs).peak_bytes
    assert one <= 2 * 2 < 8 * 2 <= other


def test_a_stage_of_the_same_device_takes_no_copy():
    stage = StageCosts(1.0, 1.0, activation_bytes=8.0, output_bytes=16.0)
    assert simulate(Schedule.parse('0F0,1F0,1B0,0B0'), Costs([stage] * 2)).bytes == (
        ((0, 8), (1, 16), (2, 32), (3, 8), (4, 0)),
    )


def test_a_stage_of_the_same_device_keeps_tensors_of_the_previous_stage():
    stage = StageCosts(1.0, 1.0, recomputed=1, recomputation=0.0, output_bytes=16.0)
    assert simulate(Schedule.parse('0F0,1F0,1B0,0B0'), Costs([stage] * 2)).bytes == (
        ((0, 0), (1, 16), (2, 32), (3, 0)),
    )


def test_skips_are_held_where_they_wait_and_where_they_are_used():
    stage = StageCosts(1.0, 1.0, recomputed=1, recomputation=0.0)
    costs = Costs([stage] * 3, [SkipProfile(0, 2, 5)])
    assert simulate(make('1f1b', 3, 1), costs).bytes == (
        ((0, 0), (1, 5), (2, 0), (4, 5), (5, 0)),
        ((0, 0),),
        ((0, 0), (2, 5), (4, 0)),
    )


def test_a_skip_that_waits_is_one_of_the_activations_that_its_stage_keeps():
    stages = [StageCosts(1.0, 1.0, activation_bytes=5.0 * (stage == 0)) for stage in range(3)]
    assert simulate(make('1f1b', 3, 1), Costs(stages, [SkipProfile(0, 2, 5)])).bytes == (
        ((0, 5), (4, 10), (5, 5), (6, 0)),
        ((0, 0),),
        ((0, 0), (2, 5), (4, 0)),
    )


def test_forward_alone():
    costs = Costs([StageCosts(1.0, 1.0, activation_bytes=8.0, output_bytes=1.0)])
    assert simulate(Schedule.parse('0F0,0F1'), costs).bytes == (((0, 8), (1, 9), (2, 0)),)


def test_memory_of_a_rank_by_hand():
    """Gradients from the first backward on, casts, messages, and copies at the end of a step."""
    stage = StageCosts(
        1.0,
        2.0,
        activation_bytes=100.0,
        backward_bytes=50.0,
        output_bytes=8.0,
        resident_bytes=1000.0,
        reduction=1.0,
        update=1.0,
        gradient_bytes=20.0,
        cast_bytes=5.0,
        bucket_bytes=3.0,
        halves=Halves(10.0, 6.0, 0.25),
    )
    costs = Costs([stage, replace(stage, tied_bytes=7.0)], messages=1)
    simulation = simulate(Schedule.parse('0F0,0B0\n1F0,1B0'), costs)
    # Reductions from 6 and 4 on, and updates behind them.
    assert [(x.device, x.start, x.end) for x in simulation.collected] == [
        (0, 6, 7),
        (0, 7, 8),
        (1, 4, 5),
        (1, 5, 6),
    ]
    one, other = simulation.bytes
    assert one == (
        (0, 1105),  # the casts and activations of the only micro-batch
        (4, 1115),  # the first half of its backward, which has received the gradient
        (5, 1026),  # the second half: no activations, but most of the gradients
        (6, 1031),  # all gradients, their bucket, and the output for the other device
        (7, 1020),
        (8, 1000),
    )
    assert other == (
        (0, 1000),
        (1, 1113),  # the input as well
        (2, 1131),  # and the output of the model
        (3, 1042),
        (4, 1031),  # the message with the gradient of the input
        (5, 1028),
        (6, 1027),  # the tied gradient, when messages have been received
        (8, 1000),
    )


def test_a_half_that_computes_all_frees_activations():
    stage = StageCosts(1.0, 2.0, activation_bytes=8.0, gradient_bytes=2.0)
    schedule = Schedule.parse('0F0,0I0,0F1,0I1,0W0,0W1')
    split = simulate(schedule, Costs([stage])).bytes[0]
    whole = simulate(schedule, Costs([replace(stage, is_split=False)])).bytes[0]
    assert max(bytes for _, bytes in split) == 16
    assert max(bytes for _, bytes in whole) == 10
