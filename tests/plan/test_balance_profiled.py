"""Profiles as data, the balances computed from them, and their predictions."""

import copy
import dataclasses
import itertools
import json
import math
import pickle

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchgpipe import GPipe
from torchgpipe.balance import LayerProfile, Profile, SkipProfile, profile


def make(times, parameters=None, activations=None, outputs=None, skips=(), batch_size=8):
    """Make a profile from lists: seconds of forward, and twice as many of backward."""
    n = len(times)
    columns = [parameters or [0] * n, activations or [0] * n, outputs or [0] * n]
    return Profile(
        tuple(
            LayerProfile(f'layer{k}', t, 2 * t, p, 0, 0, a, o)
            for k, (t, p, a, o) in enumerate(zip(times, *columns))
        ),
        tuple(SkipProfile(*skip) for skip in skips),
        batch_size,
        10,
        'cpu',
    )


def test_json_and_back():
    costs = make([1.0, 2.0], [3, 4], [5, 6], [7, 8], [(0, 1, 9)])
    assert Profile.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


def test_something_else_is_not_a_profile():
    for data in [
        {},
        {'version': 2},
        [],
        {'version': 1},
        {'version': 1, 'layers': 3},
        {**make([1.0]).to_dict(), 'layers': [{'name': '0'}]},
        {**make([1.0]).to_dict(), 'more': 1},
        {**make([1.0]).to_dict(), 'batch_size': 0},
        {**make([1.0]).to_dict(), 'version': True},
        *(
            {**make([1.0]).to_dict(), 'layers': [{**make([1.0]).to_dict()['layers'][0], **change}]}
            for change in (
                {'forward_seconds': -1.0},
                {'forward_seconds': '1'},
                {'buffer_bytes': None},
                {'backward_overhead': float('nan')},
            )
        ),
    ]:
        with pytest.raises(ValueError, match='not a profile'):
            Profile.from_dict(data)


def test_refused_costs():
    """In v0.8.0, a balance was made of whatever numbers there were."""
    for make_one in [
        lambda: make([1.0, -1.0]),
        lambda: make([1.0, float('inf')]),
        lambda: make([float('nan')]),
        lambda: make([1.0], [-1]),
        lambda: make([1.0, 1.0], skips=[(0, 1, -1)]),
        lambda: LayerProfile('0', 1.0, 1.0, 0, 0, 0, 0, 0, input_share=-0.1),
    ]:
        with pytest.raises(ValueError, match='must be a finite number, not below zero, but is '):
            make_one()


def test_a_profile_of_no_samples():
    """In v0.8.0, :meth:`Profile.scaled` divided by zero."""
    with pytest.raises(ValueError, match='batch_size of a Profile must be 1 or more, but is'):
        make([1.0], batch_size=0)


def test_a_table():
    text = str(make([0.001, 0.002], [2048, 0]))
    assert 'layer1' in text and '2.00 KiB' in text and '1.000' in text and '6.000' in text
    assert 'total' in text and '8 samples on cpu' in text


def test_the_fastest_balance_and_its_prediction():
    balance = make([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).balance(2, chunks=4, checkpoint='never')
    assert balance == [4, 2] and isinstance(balance, list)
    assert balance.seconds == [30, 33]
    # Five clocks: 30/4, then three of the slower 33/4, then 33/4.
    assert balance.bubble == pytest.approx(1 - 63 / (2 * (30 / 4 + 4 * 33 / 4)))
    assert balance.speed_up == pytest.approx(63 / (30 / 4 + 4 * 33 / 4))
    assert [name for name, _ in balance.layers] == [f'layer{k}' for k in range(6)]


def test_equal_partitions_have_the_bubble_of_the_paper():
    for n, m in [(1, 1), (1, 8), (2, 1), (2, 8), (4, 8)]:
        balance = make([1.0] * n).balance(n, chunks=m, checkpoint='never')
        assert balance.bubble == pytest.approx((n - 1) / (m + n - 1))
        assert balance.speed_up == pytest.approx(n * m / (m + n - 1))


def test_recomputation_takes_time():
    costs = make([1.0, 1.0])
    seconds = {
        mode: costs.balance(2, chunks=4, checkpoint=mode).seconds[0]
        for mode in ('never', 'except_last', 'always')
    }
    assert seconds == {'never': 3, 'except_last': 3.75, 'always': 4}
    # No more micro-batches than samples.
    assert costs.balance(2, chunks=100).seconds[0] == 3 + 7 / 8


def test_constant_time_is_spent_once_per_micro_batch():
    layer = LayerProfile('0', 1.0, 2.0, 0, 0, 0, 0, 0, None, 0.5, 0.25)
    costs = Profile((layer, layer), (), 8, 10, 'cpu')
    assert costs.balance(2, chunks=1, checkpoint='never').seconds == [3, 3]
    assert costs.balance(2, chunks=5, checkpoint='never').seconds == [3 + 4 * 0.75] * 2
    assert costs.balance(2, chunks=5, checkpoint='always').seconds == [4 + 4 * 1.25] * 2


def needs(costs, a, b, m, mode, scale, partitions):
    """Return the bytes that a partition needs, by a second implementation."""
    layers = costs.layers[a:b]
    boundary = costs.input_bytes if a == 0 else costs.layers[a - 1].output_bytes
    coming = sum(s.bytes for s in costs.skips if s.source < a and a <= s.target < b)
    waiting = sum(s.bytes for s in costs.skips if a <= s.source < b)
    waiting *= min(m, max(1, partitions - 1)) / m
    activations = sum(x.activation_bytes for x in layers) / (1 if mode == 'never' else m)
    sizes = [costs.input_bytes, *(x.output_bytes for x in costs.layers)]
    passing = max(sizes[k] + sizes[k + 1] for k in range(a, b)) / m
    output = 2 * layers[-1].output_bytes if b == len(costs.layers) else 0
    return (
        sum(x.parameter_bytes for x in layers) * scale
        + boundary
        + coming
        + output
        + math.ceil(waiting + activations + passing)
    )


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_limits_against_brute_force(data):
    number = data.draw(st.integers(1, 7))
    numbers = st.lists(st.integers(0, 9), min_size=number, max_size=number)
    skips = data.draw(
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(0, 9)), max_size=3)
    )
    skips = [(a, b, size) for a, b, size in skips if a < b < number]
    costs = make(
        data.draw(numbers), data.draw(numbers), data.draw(numbers), data.draw(numbers), skips
    )
    partitions = data.draw(st.integers(1, number))
    limits = data.draw(
        st.lists(st.none() | st.integers(0, 120), min_size=partitions, max_size=partitions)
    )
    mode, m = data.draw(st.sampled_from(['always', 'never'])), data.draw(st.sampled_from([1, 2]))

    best = None
    for cut in itertools.combinations(range(1, number), partitions - 1):
        parts = list(zip((0, *cut), (*cut, number)))
        if all(
            limit is None or limit >= needs(costs, a, b, m, mode, 2, partitions)
            for limit, (a, b) in zip(limits, parts)
        ):
            scale = 4 if mode == 'always' else 3
            slowest = max(sum(x.forward_seconds for x in costs.layers[a:b]) for a, b in parts)
            best = slowest * scale if best is None else min(best, slowest * scale)
    if best is None:
        with pytest.raises(ValueError, match='alone needs|together need'):
            costs.balance(partitions, chunks=m, memory_limit=limits, checkpoint=mode)
        return
    balance = costs.balance(partitions, chunks=m, memory_limit=limits, checkpoint=mode)
    assert max(balance.seconds) == best
    edge = [0, *itertools.accumulate(balance)]
    assert balance.bytes == [
        needs(costs, a, b, m, mode, 2, partitions) for a, b in zip(edge, edge[1:])
    ]


def test_limits_that_do_not_bind_change_nothing():
    costs = make([1.0, 2.0, 1.0, 2.0, 1.0, 1.0], parameters=[10] * 6)
    free = costs.balance(6, chunks=4)
    for limit in (10**15, float('inf'), numpy.int64(10**9), [10**15, None] * 3):
        assert costs.balance(6, chunks=4, memory_limit=limit) == free
    assert costs.balance(3, chunks=4, memory_limit=10**9) == costs.balance(3, chunks=4)


def test_a_block_that_works_in_place_is_named_as_a_whole():
    layers = make([1.0] * 3, parameters=[100] * 3).layers
    joined = dataclasses.replace(layers[1], changes=0)
    costs = Profile((layers[0], joined, layers[2]), (), 8, 10, 'cpu')
    with pytest.raises(ValueError, match="the block of layers 'layer0' to 'layer1' alone needs"):
        costs.balance(2, chunks=1, memory_limit=300)


def test_huge_and_tiny_times():
    costs = make([1e-300, 1e3, 1e-300, 5.0], parameters=[1] * 4)
    assert costs.balance(2, chunks=1, memory_limit=[23, 10**6]) == [1, 3]


def test_devices_with_different_limits():
    costs = make([1.0] * 4, parameters=[100] * 4)
    assert costs.balance(2, chunks=1, memory_limit=None) == [2, 2]
    assert costs.balance(2, chunks=1, memory_limit=[250, 1000]) == [1, 3]
    assert costs.balance(2, chunks=1, memory_limit=[None, 250]) == [3, 1]
    assert costs.balance(2, chunks=1, memory_limit=500, param_scale=1) == [2, 2]


def test_an_impossible_balance():
    for limit, message in [
        (150, "layer 'layer0' alone needs 220 B.*largest memory limit is 150 B"),
        (300, r'all 4 layers together need 810 B.*add up to 600 B'),
        ([1000, 10], "memory limit of partition 1, 10 B: at least layer 'layer3' would be there"),
        ([10, 1000], "memory limit of partition 0, 10 B: at least layer 'layer0' would be there"),
        (
            [390, 450],
            "partition 1, 450 B: at least the block of layers 'layer1' to 'layer3' would",
        ),
    ]:
        costs = make([1.0] * 4, parameters=[100] * 4)
        with pytest.raises(ValueError, match=message):
            costs.balance(2, chunks=1, memory_limit=limit)


def test_bad_input():
    for arguments, error, message in [
        ({'partitions': 0}, ValueError, 'partitions must be a positive'),
        ({'partitions': 3}, ValueError, '2 layers cannot be cut into 3 partitions'),
        ({'partitions': 1.5}, TypeError, 'partitions must be an integer'),
        ({'chunks': 0}, ValueError, 'chunks must be a positive'),
        ({'memory_limit': -1}, ValueError, 'zero or more, but is -1'),
        ({'memory_limit': [1, -1]}, ValueError, 'zero or more, but is -1'),
        ({'memory_limit': [1]}, ValueError, '1 entries for 2 partitions'),
        ({'memory_limit': '16GiB'}, ValueError, 'memory_limit'),
        ({'param_scale': -1}, ValueError, 'param_scale'),
        ({'param_scale': float('nan')}, ValueError, 'param_scale'),
        ({'checkpoint': 'sometimes'}, ValueError, "'always', 'except_last', or 'never'"),
    ]:
        with pytest.raises(error, match=message):
            make([1.0, 1.0]).balance(**{'partitions': 2, 'chunks': 1, **arguments})


def test_gpipe_takes_a_balance_as_it_is():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    balance = profile(model, torch.rand(8, 4), device='cpu', timeout=0).balance(2, chunks=4)
    for same in (balance, copy.deepcopy(balance), pickle.loads(pickle.dumps(balance))):
        assert same == balance and same.seconds == balance.seconds
        gpipe = GPipe(copy.deepcopy(model), same, devices=['cpu', 'cpu'], chunks=4)
        assert gpipe.balance == list(balance) and type(gpipe.balance) is list


def test_a_balance_of_another_module():
    for other in [
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), nn.ReLU()),
        nn.Sequential().append(nn.Linear(4, 4)).append(nn.ReLU()).append(nn.Linear(5, 2)),
    ]:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        balance = profile(model, torch.rand(8, 4), device='cpu', timeout=0).balance(2, chunks=4)
        with pytest.raises(
            ValueError, match=r"profile of another module.*: there a layer was '\d'"
        ):
            GPipe(other, balance, devices=['cpu', 'cpu'])
        GPipe(other, list(balance), devices=['cpu', 'cpu'])
        with pytest.raises(ValueError, match='another module.*: it had 3 layers, this one has 2'):
            GPipe(other[:2], balance, devices=['cpu', 'cpu'])
