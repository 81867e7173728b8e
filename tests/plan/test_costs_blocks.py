"""Costs of blocks of layers as stages."""

import random

import pytest

from torchgpipe.balance import LayerProfile, Profile, SkipProfile
from torchgpipe.plan import Costs, plan, simulate
from torchgpipe.plan.costs import Blocks, Peak, peaks
from torchgpipe.schedule import Schedule, make
from torchgpipe.schedule.schedule import in_flight


def profiled(parameters, skips=(), batch=4):
    """Return a profile of layers with these bytes of parameters."""
    return Profile(
        tuple(
            LayerProfile(str(k), 1, 1, size, 0, 0, 160 + 4 * k, 32 + 4 * k)
            for k, size in enumerate(parameters)
        ),
        skips,
        batch,
        8,
        'cpu',
    )


def test_how_far_a_stage_reaches():
    for checkpoint in ['never', 'always']:
        for is_last in [False, True]:
            for stage in [0, 2]:
                costs = profiled(
                    [50, 10, 80, 30, 20, 70], (SkipProfile(0, 4, 8), SkipProfile(2, 5, 4))
                )
                blocks, edges = costs.blocks(4, 1.0), [0, 1, 3, 4, 5, 6]
                peak = peaks(make('1f1b', 3, 4), checkpoint)[stage]
                number = 3 - stage
                inputs = [8, *(layer.output_bytes for layer in costs.layers)]

                def bytes(a, b):
                    layers = costs.layers[a:b]
                    comes = inputs[a] + sum(
                        x.bytes for x in costs.skips if x.source < a <= x.target < b
                    )
                    leaves = sum(x.bytes for x in costs.skips if a <= x.source < b)
                    kept = sum(layer.activation_bytes for layer in layers)
                    passing = max(inputs[k] + inputs[k + 1] for k in range(a, b))
                    return (
                        sum(layer.parameter_bytes for layer in layers)
                        + (b == 6) * inputs[-1]
                        + (
                            comes * (number if a else 4)
                            + kept * (number if checkpoint == 'never' else 1)
                            + passing
                            + leaves * min(number, 2)
                        )
                        // 4
                    )

                for limit in (0, 120, 210, 300, 450, 1000):
                    expected = []
                    for k, a in enumerate(edges[:-1]):
                        fitting = [j for j in range(k + 1, 6) if bytes(a, edges[j]) <= limit]
                        end = max(fitting, default=k)
                        expected.append(k if is_last and end < 5 else end)
                    assert blocks.furthest(edges, peak, limit, is_last) == expected
                assert blocks.furthest(edges, peak, None, is_last) == [5] * 5


def test_a_micro_batch_is_in_flight_until_gradients_of_weights_are_there():
    assert in_flight(Schedule.parse('0F0,0I0,0F1,0I1,0F2,0B2,0W0,0W1')) == {0: 3}
    assert in_flight(Schedule.parse('0F0,0I0,0W0,0F1,0I1,0W1,0F2,0B2')) == {0: 1}
    assert in_flight(make('1f1b', devices=3, micro_batches=8)) == {0: 3, 1: 2, 2: 1}


def test_recomputed_activations_are_there_until_gradients_of_weights_are_there():
    assert [peak.activations for peak in peaks(make('1f1b', 3, 8), 'always')] == [1] * 3
    assert [peak.activations for peak in peaks(make('zb-h1', 3, 8), 'always')] == [1, 2, 3]
    assert [peak.activations for peak in peaks(make('zb-h1', 3, 8), 'never')] == [3] * 3


def test_the_peak_of_a_stage_equals_the_simulation():
    """Where stages are equal, as nothing waits then."""
    for mode in ['never', 'always', 'except_last']:
        for n in [1, 2, 4]:
            layer = LayerProfile('0', 1.0, 2.0, 8, 0, 0, 64, 32)
            costs = Profile((layer,) * 8, (), 32, 32, 'cpu')
            balance = costs.balance(n, chunks=8, checkpoint=mode)
            found = plan(
                costs,
                devices=[f'cuda:{k}' for k in range(n)],
                schedules=['plain call'],
                chunks=[8],
                checkpoints=[mode],
            )
            assert balance.bytes == [*found.bytes.values()], (mode, n)
            assert (balance.bubble, balance.speed_up) == (found.bubble, found.speed_up), (mode, n)


def test_the_peak_of_a_stage_in_a_step():
    for name in ['gpipe', '1f1b', 'zb-h1']:
        for mode in ['never', 'always']:
            draw = random.Random(0)
            sizes = [draw.randrange(100) for _ in range(8)]
            costs = profiled(sizes, batch=8)
            schedule = make(name, 4, 8)
            each = Costs.of(costs, [2] * 4, 8, mode)
            simulated = simulate(schedule.recomputing(each.stops), each).peak_bytes
            blocks = costs.blocks(8, 2.0)
            found = [
                blocks.bytes(2 * j, 2 * j + 2, peak)
                for j, peak in enumerate(peaks(schedule, mode))
            ]
            assert found == pytest.approx(simulated, rel=0.1), (name, mode)


def test_a_number_of_parameter_sizes():
    with pytest.raises(ValueError, match='param_scale must be a number of parameter sizes'):
        Blocks((), (), 0, 1, -1.0)


def test_the_whole_input_is_there_from_the_start():
    layers = [LayerProfile(str(k), 1.0, 1.0, 0, 0, 0, 0, 400) for k in range(3)]
    blocks = Blocks(layers, (), 400, 4, 1.0)
    peak = Peak(inputs=2, activations=0, skips=0, outputs=0)
    # And one layer's input and output, of one micro-batch.
    assert blocks.bytes(0, 1, peak) == 400 + 200
    assert blocks.bytes(1, 2, peak) == 200 + 200
