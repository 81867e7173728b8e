"""Profiled time, by a clock that the layers move."""
from collections import Counter

import pytest
import torch
from torch import nn

from tests.clock import Timed
from tests.devices import cpu_only
from tests.plan.models import frozen
from torchgpipe.balance import balance_by_time, profile
from torchgpipe.base.structure import bare
from torchgpipe.engine.microbatches import Chunk
from torchgpipe.plan.profile import profile_bytes

pytestmark = cpu_only('the clock that a test moves is that of the host')

#: Seconds for a number of samples, of 32 samples and of none.
SECONDS = {'constant': (lambda number: 4, 4, 4), 'proportional': (lambda number: number / 8, 4, 0),
           'both': (lambda number: 1 + number / 8, 5, 1),
           'never less than nothing': (lambda number: number ** 2, 1024, 0),
           'never more than a quarter takes': (lambda number: 40 - number, 8, 32)}


@pytest.mark.parametrize('name', SECONDS)
def test_what_does_not_shrink_with_the_batch(name, clock):
    seconds, whole, overhead = SECONDS[name]
    model = nn.Sequential(Timed(clock, forward=seconds), Timed(clock, backward=seconds))
    first, second = profile(model, torch.rand(32, 1), device='cpu', timeout=0).layers
    assert (first.forward_seconds, first.forward_overhead) == (whole, overhead)
    assert (second.backward_seconds, second.backward_overhead) == (whole, overhead)
    assert first.backward_seconds == second.forward_seconds == 0


def test_of_a_small_batch_no_part_is_timed(clock):
    model = nn.Sequential(Timed(clock, lambda number: 1 + number))
    layer, = profile(model, torch.rand(4, 1), device='cpu', timeout=0).layers
    assert (layer.forward_seconds, layer.forward_overhead) == (5, 0)


def test_what_is_slow_at_first_or_once_does_not_count(clock):
    calls = Counter()

    def seconds(number):
        calls[number] += 1
        # The warm-up and the look at memory do not count, and of three more runs the median does.
        # One of the large batch tries to split backward, which this layer does not do.
        return 100 if calls[number] <= 3 else 1

    layer, = profile(nn.Sequential(Timed(clock, seconds)), torch.rand(32, 1), device='cpu',
                     timeout=0).layers
    assert (layer.forward_seconds, calls) == (1, {32: 6, 8: 5})


def test_the_timeout_is_spent(clock):
    calls = Counter()

    def seconds(number):
        calls[number] += 1
        return 1

    profile(nn.Sequential(Timed(clock, seconds), Timed(clock, seconds)), torch.rand(32, 1),
            device='cpu', timeout=20)
    # Half of it for each layer: eleven runs of a second, of which one tries to split backward,
    # after the two runs of each batch that are not timed.
    assert calls == {32: 2 * 8, 8: 2 * 7}


def test_frozen_layers_have_no_backward(clock):
    clock.tick = 1
    model, sample = frozen()
    layers = profile(model, sample, device='cpu', timeout=0).layers
    assert [layer.backward_seconds for layer in layers] == [0] * 3 + [1] * 3
    assert [layer.forward_seconds for layer in layers] == [1] * 6


@pytest.mark.filterwarnings('ignore:The .grad attribute')  # Dynamo looks at its input's.
def test_halves_of_backward(clock):
    clock.tick = 1
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
                          torch.compile(nn.Linear(4, 4), backend='eager'))
    costs = profile(model, torch.rand(8, 4, requires_grad=True), device='cpu', timeout=0)
    assert [(x.input_share, x.weight_share) for x in costs.layers] == [
        (1, 1), (1, 0), (1, 1), (1, 0)]
    assert {x.grad for x in model.parameters()} == {None}


def test_no_halves_without_times():
    layer, = profile_bytes(nn.Sequential(nn.Linear(4, 4)), Chunk((torch.rand(8, 4),), bare), 8,
                           'cpu').layers
    assert (layer.input_share, layer.weight_share) == (None, None)


def test_balance_by_time(clock):
    for times, expected in (([1, 2, 3, 4, 5, 6], [4, 2]), ([6, 5, 4, 3, 2, 1], [2, 4])):
        model = nn.Sequential(*[Timed(clock, lambda number, time=time: time, lambda number: 1)
                                for time in times])
        assert balance_by_time(2, model, torch.rand(1), device='cpu', timeout=0) == expected
