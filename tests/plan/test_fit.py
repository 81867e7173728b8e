"""Balances that fit into memory, for a schedule."""
import pytest

from torchgpipe.balance import LayerProfile, Profile
from torchgpipe.balance.step import StepCost
from torchgpipe.plan.fit import Need, fit, neighbours, under_way
from torchgpipe.schedule import Schedule, make


def profiled(times, parameters):
    """Give a profile of layers with these times and bytes of parameters."""
    return Profile(tuple(LayerProfile(str(k), time, time, size, 0, 0, 16 + k, 32 + k)
                         for k, (time, size) in enumerate(zip(times, parameters))), (), 4, 8,
                   'cpu')


def step_of(costs, m=4, checkpoint='never'):
    """Give its costs by micro-batches."""
    return StepCost(costs.layers, (), costs.input_bytes, 2, m, 1.0, checkpoint)


@pytest.mark.parametrize('checkpoint', ['never', 'always'])
@pytest.mark.parametrize('last', [False, True])
@pytest.mark.parametrize('number', [1, 3])
def test_how_far_a_stage_reaches(checkpoint, last, number):
    costs = profiled([1] * 6, [50, 10, 80, 30, 20, 70])
    step, edges = step_of(costs), [0, 1, 3, 4, 5, 6]

    def bytes(a, b):
        resident = sum(layer.parameter_bytes for layer in costs.layers[a:b])
        kept = sum(layer.activation_bytes for layer in costs.layers[a:b]) / 4
        inputs = [8, *(layer.output_bytes for layer in costs.layers)]
        return (resident + kept * (number if checkpoint == 'never' else 1)
                + number * inputs[a] / 4 + last * inputs[-1])

    for limit in (0, 60, 110, 160, 250, 1000):
        expected = []
        for k, a in enumerate(edges[:-1]):
            fitting = [j for j in range(k + 1, 6) if bytes(a, edges[j]) <= limit]
            end = max(fitting, default=k)
            expected.append(k if last and end < 5 else end)
        assert Need(step, edges, checkpoint).furthest(number, limit, last) == expected


def test_virtual_stages_share_what_a_device_has():
    costs = profiled([3, 3, 3, 3, 1, 1, 1, 1], [100] * 8)
    seen = []

    def simulated(balance):
        seen.append(balance)
        a, b, c, d = (100 * number for number in balance)
        return [a + d, b + c]

    assert fit(costs, step_of(costs), make('zb-v', 2, 4), 'always', [600, 600], simulated)
    assert len(seen) == 1 and max(seen[0]) == 2


def test_what_only_a_simulation_knows_is_taken_into_account():
    costs = profiled([1] * 8, [100] * 8)

    def simulated(balance):
        return [100 * balance[0] + 190, 100 * balance[1] + 90]

    found = fit(costs, step_of(costs), make('1f1b', 2, 4), 'always', [550, 650], simulated)
    assert found == [3, 5]
    assert fit(costs, step_of(costs), make('1f1b', 2, 4), 'always', [500, 500], simulated) is None


def test_neighbours_keep_a_layer_in_each_stage_and_to_edges():
    assert [*neighbours([1, 1, 2], [0, 1, 2, 3, 4])] == [[1, 2, 1]]
    assert [*neighbours([2, 2], [0, 2, 3, 4])] == [[3, 1]]
    assert [*neighbours([1, 3], [0, 2, 3, 4])] == []  # where a cut is at no edge


def test_a_micro_batch_is_under_way_until_gradients_of_weights_are_there():
    assert under_way(Schedule.parse('0F0,0I0,0F1,0I1,0F2,0B2,0W0,0W1')) == {0: 3}
    assert under_way(Schedule.parse('0F0,0I0,0W0,0F1,0I1,0W1,0F2,0B2')) == {0: 1}
