"""Costs of stages, from a profile."""

from dataclasses import fields, replace

import pytest

from torchgpipe.balance import LayerProfile, Profile, SkipProfile
from torchgpipe.plan import Costs, Link, Plan, StageCosts, plan, simulate
from torchgpipe.schedule import make


def layer(k, parameters=8, frozen=0, overhead=0.0):
    """Return a layer that takes 8 s forward and 16 s backward."""
    return LayerProfile(str(k), 8.0, 16.0, parameters, frozen, 1, 40, 80, None, overhead, overhead)


def profiled(*layers, skips=()):
    """Return a profile of layers."""
    return Profile(layers, skips, 8, 400, 'cpu')


def test_times_and_bytes_of_stages():
    costs = Costs.of(
        profiled(*map(layer, range(4))), [1, 3], 4, ['always', 'never'], param_scale=3.0
    )
    one, other = costs.stages
    assert (one.forward, one.backward, one.recomputed) == (2, 4, 4)
    assert (other.forward, other.backward, other.recomputed) == (6, 12, 0)
    assert (one.activation_bytes, other.activation_bytes) == (10, 30)
    assert (one.output_bytes, other.output_bytes) == (20, 20)
    # Inputs and outputs of a layer; the first one takes the input of the model.
    assert (one.backward_bytes, other.backward_bytes) == ((400 + 80) / 4, (80 + 80) / 4)
    # The whole input is there from the start.
    assert (one.resident_bytes, other.resident_bytes) == (3 * 8 + 1 + 400, 3 * (3 * 8 + 1))


def test_overheads_count_for_each_micro_batch():
    (stage,) = Costs.of(profiled(layer(0, overhead=4.0)), [1], 4).stages
    assert (stage.forward, stage.backward) == (4 + (8 - 4) / 4, 4 + (16 - 4) / 4)


def test_overhead_of_an_action():
    overhead = {'F': 1.0, 'B': 2.0, 'I': 3.0, 'W': 4.0, 'R': 5.0}
    costs = [
        Costs.of(profiled(*map(layer, range(2))), [1, 1], 4, overhead=each).stages[1]
        for each in (None, overhead)
    ]
    for kind, seconds in overhead.items():
        assert costs[1].seconds(kind) == costs[0].seconds(kind) + seconds
    with pytest.raises(ValueError, match="of actions F, .* but names 'forward'"):
        Costs.of(profiled(layer(0)), [1], 4, overhead={'forward': 1.0})


def test_an_action_takes_at_least_as_long_as_the_host_needs():
    """Forward takes 2 s, backward 4 s, and each of its halves 2 s."""
    stage = Costs.of(profiled(*map(layer, range(2))), [1, 1], 4).stages[1]
    assert [stage.seconds(kind) for kind in 'FBIWR'] == [2.0, 4.0, 2.0, 2.0, 2.0]
    for kind in 'FBIWR':
        for least in (1.0, 9.0):
            slow = Costs.of(profiled(*map(layer, range(2))), [1, 1], 4, least={kind: least})
            expected = max(stage.seconds(kind), least)
            assert slow.stages[1].seconds(kind) == expected
            others = [other for other in 'FBIWR' if other != kind]
            assert all(slow.stages[1].seconds(other) == stage.seconds(other) for other in others)


def test_a_split_makes_the_backward_of_trained_layers_longer():
    layers = (
        layer(0),
        layer(1),
        layer(2, frozen=8),
        replace(layer(3), input_share=0.5, weight_share=0.6),
    )
    whole, split = (
        Costs.of(profiled(*layers), [1] * 4, 4, split=share).stages for share in (0.0, 0.25)
    )
    more = [one.seconds('W') - other.seconds('W') for one, other in zip(split, whole)]
    assert more == [1.0, 1.0, 0.0, 0.0]  # A frozen layer, and a layer whose shares are measured.
    assert all(
        one.seconds('I') == other.seconds('I') and one.seconds('B') == other.seconds('B')
        for one, other in zip(split, whole)
    )


def test_a_split_that_is_no_part_of_a_backward():
    for split in [-0.1, float('inf'), float('nan')]:
        with pytest.raises(ValueError, match=f'split must be a finite number.*it is {split}'):
            Costs.of(profiled(layer(0)), [1], 4, split=split)


def test_seconds_of_actions_that_are_none():
    for name in ['overhead', 'least']:
        for seconds, message in [
            ({'forward': 1.0}, "has seconds of actions F, R, B, I, W, but names 'forward'"),
            ({'F': -1.0}, "a finite number of seconds, not below zero, for 'F', but has -1.0"),
            ({'B': float('nan')}, "for 'B', but has nan"),
            ({'W': '1'}, "for 'W', but has '1'"),
        ]:
            with pytest.raises(ValueError, match=message):
                Costs.of(profiled(layer(0)), [1], 4, **{name: seconds})


def test_no_more_micro_batches_than_samples():
    assert Costs.of(profiled(layer(0)), [1], 99) == Costs.of(profiled(layer(0)), [1], 8)


def test_halves_of_backward():
    layers = layer(0, 0), layer(1, 8, 8), layer(2), layer(3), layer(4, 0), layer(5, 8, 4)
    costs = Costs.of(profiled(*layers), [1] * 6, 1)
    assert [stage.seconds('W') for stage in costs.stages] == [0, 0, 16, 8, 0, 8]
    assert [stage.seconds('I') for stage in costs.stages] == [16, 16, 0, 8, 16, 8]
    frozen = Costs.of(profiled(layer(0, 0), layer(1, 8, 8)), [2], 1)
    assert frozen.stages[0].seconds('W') == 0


def test_halves_that_were_measured():
    layers = [replace(layer(k), input_share=0.75, weight_share=0.5) for k in range(2)]
    (stage,) = Costs.of(profiled(*layers), [2], 4).stages
    assert [stage.seconds(kind) for kind in 'BIW'] == [8, 6, 4]


def test_skips_between_stages():
    skips = SkipProfile(0, 3, 80), SkipProfile(1, 2, 80), SkipProfile(0, 1, 80)
    costs = Costs.of(profiled(*map(layer, range(4)), skips=skips), [2, 1, 1], 4)
    assert costs.skips == (SkipProfile(0, 2, 20), SkipProfile(0, 1, 20))


def test_a_balance_of_other_layers():
    for balance in [[1, 2], [4, 0], []]:
        with pytest.raises(ValueError, match='is none of the 4 layers that the profile has'):
            Costs.of(profiled(*map(layer, range(4))), balance, 4)


BAD = [-1.0, float('nan'), float('inf'), 'one']


def test_refused_costs():
    """In v0.8.0, whatever there was went into a plan."""
    for make_one in [
        *(
            lambda number=number, name=field.name: StageCosts(
                **{'forward': 1.0, 'backward': 1.0, name: number}
            )
            for number in BAD
            for field in fields(StageCosts)
            if field.name not in ('is_split', 'halves')
        ),
        *(lambda number=number: Link(number) for number in BAD),
    ]:
        with pytest.raises(ValueError, match='must be a finite number, not below zero, but is '):
            make_one()


def test_refused_bandwidths():
    """In v0.8.0, 0 was a ZeroDivisionError, and others went into a plan."""
    for bandwidth in [0.0, -1.0, float('nan'), None]:
        with pytest.raises(
            ValueError, match="'bandwidth' of a Link must be a number above zero, but"
        ):
            Link(0.0, bandwidth)
        assert Link(1.0, float('inf')).seconds(100) == 1, bandwidth


def test_links_of_other_devices():
    """In v0.8.0, it was an IndexError, if any."""
    for links in [
        [],
        [Link()],
        [[Link()]],
        [[Link()] * 3] * 2,
        [[Link()] * 2] * 3,
        [[Link(), None]] * 2,
    ]:
        what = (
            'links must be one Link, or for each device a row .* for 2 devices, there are rows of '
        )
        with pytest.raises(ValueError, match=what):
            simulate(make('1f1b', 2, 2), Costs([StageCosts(1.0, 1.0)] * 2, links=links))
        with pytest.raises(ValueError, match=what):
            plan(profiled(layer(0), layer(1)), devices=['cuda:0', 'cuda:1'], links=links)


def test_skips_between_no_stages():
    """In v0.8.0, it was an IndexError, or no skip at all."""
    for source, target in [(0, 2), (1, 0), (1, 1), (0, 9)]:
        with pytest.raises(
            ValueError, match='a skip goes to a later one of the 2 stages, but there'
        ):
            Costs([StageCosts(1.0, 1.0)] * 2, [SkipProfile(source, target, 8)])


def test_a_plan_with_other_numbers_is_none():
    """In v0.8.0, the contents of a file were not checked."""
    data = plan(profiled(layer(0), layer(1)), devices=['cuda:0', 'cuda:1']).to_dict()
    data['costs']['stages'][0]['forward'] = -1.0
    with pytest.raises(ValueError, match="this is not a plan.* 'forward' of a StageCosts must"):
        Plan.from_dict(data)


def test_no_half_of_a_backward_takes_less_than_no_time():
    stage = StageCosts(1.0, 2.0, weight_backward=3.0)
    assert (stage.seconds('W'), stage.seconds('I')) == (3, 0)
