"""Profiled time, by a clock that the layers move."""

import threading
from collections import Counter

import pytest
import torch
from torch import nn

from tests.clock import Timed
from tests.plan.models import frozen
from torchgpipe.balance import balance_by_time, profile
from torchgpipe.base.structure import bare
from torchgpipe.engine.microbatches import Chunk
from torchgpipe.plan.profile import as_a_worker, profile_bytes

#: Seconds for a number of samples, of 32 samples and of none.
SECONDS = {
    'constant': (lambda number: 4, 4, 4),
    'proportional': (lambda number: number / 8, 4, 0),
    'both': (lambda number: 1 + number / 8, 5, 1),
    'never less than nothing': (lambda number: number**2, 1024, 0),
    'never more than a quarter takes': (lambda number: 40 - number, 8, 32),
}


@pytest.mark.parametrize('name', SECONDS)
def test_constant_time_is_separated_from_time_per_sample(name, clock):
    seconds, whole, overhead = SECONDS[name]
    model = nn.Sequential(Timed(clock, forward=seconds), Timed(clock, backward=seconds))
    first, second = profile(model, torch.rand(32, 1), device='cpu', timeout=0).layers
    assert (first.forward_seconds, first.forward_overhead) == (whole, overhead)
    assert (second.backward_seconds, second.backward_overhead) == (whole, overhead)
    assert first.backward_seconds == second.forward_seconds == 0


def test_of_a_small_batch_no_part_is_timed(clock):
    model = nn.Sequential(Timed(clock, lambda number: 1 + number))
    (layer,) = profile(model, torch.rand(4, 1), device='cpu', timeout=0).layers
    assert (layer.forward_seconds, layer.forward_overhead) == (5, 0)


def test_slow_first_calls_and_outliers_do_not_count(clock):
    calls = Counter()

    def seconds(number):
        calls[number] += 1
        # The warm-up and the look at memory do not count, and of three more runs the median does.
        # One of the large batch tries to split backward, which this layer does not do. Three more
        # time the operations.
        return 100 if calls[number] <= 3 else 1

    (layer,) = profile(
        nn.Sequential(Timed(clock, seconds)), torch.rand(32, 1), device='cpu', timeout=0
    ).layers
    assert (layer.forward_seconds, calls) == (1, {32: 9, 8: 5})


def test_the_timeout_is_spent(clock):
    calls = Counter()

    def seconds(number):
        calls[number] += 1
        return 1

    profile(
        nn.Sequential(Timed(clock, seconds), Timed(clock, seconds)),
        torch.rand(32, 1),
        device='cpu',
        timeout=20,
    )
    # Half of it for each layer: ten runs of a second, of which one tries to split backward and
    # three time operations, after the two runs of each batch that are not timed.
    assert calls == {32: 2 * 9, 8: 2 * 5}


def test_frozen_layers_have_no_backward(clock):
    clock.tick = 1
    model, sample = frozen()
    layers = profile(model, sample, device='cpu', timeout=0).layers
    assert [layer.backward_seconds for layer in layers] == [0] * 3 + [1] * 3
    assert [layer.forward_seconds for layer in layers] == [1] * 6


@pytest.mark.filterwarnings('ignore:The .grad attribute')  # Dynamo looks at its input's.
def test_halves_of_backward(clock):
    clock.tick = 1
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.ReLU(),
        nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
        torch.compile(nn.Linear(4, 4), backend='eager'),
    )
    costs = profile(model, torch.rand(8, 4, requires_grad=True), device='cpu', timeout=0)
    assert [(x.input_share, x.weight_share) for x in costs.layers] == [
        (1, 1),
        (1, 0),
        (1, 1),
        (1, 0),
    ]
    assert {x.grad for x in model.parameters()} == {None}


def test_no_halves_without_times():
    (layer,) = profile_bytes(
        nn.Sequential(nn.Linear(4, 4)), Chunk((torch.rand(8, 4),), bare), 8, 'cpu'
    ).layers
    assert (layer.input_share, layer.weight_share) == (None, None)


def test_balance_by_time(clock):
    for times, expected in (([1, 2, 3, 4, 5, 6], [4, 2]), ([6, 5, 4, 3, 2, 1], [2, 4])):
        model = nn.Sequential(
            *[Timed(clock, lambda number, time=time: time, lambda number: 1) for time in times]
        )
        assert balance_by_time(2, model, torch.rand(1), device='cpu', timeout=0) == expected


@pytest.fixture
def six_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    'devices, number, share',
    [(['cpu'], 1, 6), (['cpu:0', 'cpu:1', 'cpu:2'], 3, 2), (['cuda:0', 'cpu:0', 'cpu:1'], 1, 3)],
)
def test_workers_of_the_cpu_measure_at_the_same_time(six_threads, devices, number, share):
    """Only the calling thread has a result, or an error. Draws of the others leave no trace."""
    state, here = torch.get_rng_state(), threading.get_ident()
    together, ended = threading.Barrier(number), threading.Event()
    shares = []

    def measure():
        shares.append(torch.get_num_threads())
        together.wait(60)
        if threading.get_ident() == here:
            ended.set()
            return 'mine'
        ended.wait(60)
        torch.rand(1)
        raise ValueError('of another worker')

    assert as_a_worker(devices, measure) == 'mine'
    assert shares == [share] * number
    assert torch.get_num_threads() == 6 and torch.equal(torch.get_rng_state(), state)


def test_errors_of_a_measurement_are_raised(six_threads):
    def measure():
        raise ValueError('of this worker')

    with pytest.raises(ValueError, match='of this worker'):
        as_a_worker(['cpu:0', 'cpu:1'], measure)
    assert torch.get_num_threads() == 6
