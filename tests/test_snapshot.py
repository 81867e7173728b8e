"""Recomputation sees the parameters and buffers of the first pass, and changes neither."""
import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.helpers import DEVICES, assert_same, gradients
from torchgpipe import GPipe, is_recomputing
from torchgpipe.balance.live import LiveTensors

devices = pytest.mark.parametrize('devices', list(DEVICES.values()), ids=list(DEVICES))


class Decay(nn.Module):
    """A layer whose output depends on a buffer that it changes."""

    def __init__(self, replace):
        super().__init__()
        self.replace = replace
        self.register_buffer('scale', torch.ones(1, dtype=torch.double))

    def forward(self, x):
        """Scale by a little less each time."""
        if self.replace:
            self.scale = self.scale * 0.9
        else:
            self.scale.mul_(0.9)
        return (x * self.scale.clone()).tanh()


@devices
@pytest.mark.parametrize('layer', [
    lambda: Decay(False), lambda: Decay(True), lambda: nn.BatchNorm1d(4),
    lambda: spectral_norm(nn.Linear(4, 4))])
def test_buffers_move_once_and_gradients_are_those_without_checkpoints(layer, devices):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), layer(), nn.Linear(4, 4), layer()).double()
    results = []
    for mode in ('never', 'always'):
        gpipe = GPipe(copy.deepcopy(model), [2, 2], devices=devices(2), chunks=3, checkpoint=mode)
        torch.manual_seed(1)
        for _ in range(2):
            gpipe(torch.randn(9, 4, dtype=torch.double)).square().sum().backward()
        results.append([*gradients(gpipe), *gpipe.buffers()])
    assert_same(results[1], results[0])


def test_buffers_move_once_in_a_graph_that_is_retained():
    gpipe = GPipe(nn.Sequential(nn.Linear(2, 2).double(), Decay(False)), [2], devices=['cpu'],
                  chunks=2, checkpoint='always')
    output = gpipe(torch.rand(4, 2, dtype=torch.double)).sum()
    output.backward(retain_graph=True)
    first = gradients(gpipe)
    gpipe.zero_grad()
    output.backward()
    assert_same(gradients(gpipe), first)
    assert gpipe[1].scale.item() == pytest.approx(0.81)


@pytest.mark.parametrize('mode', ['always', 'never'])
def test_a_step_between_forward_and_backward_raises_as_without_checkpoints(mode):
    gpipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], devices=['cpu', 'cpu'],
                  chunks=2, checkpoint=mode)
    optimizer = torch.optim.SGD(gpipe.parameters(), 0.1)
    gpipe(torch.rand(4, 2)).sum().backward()
    output = gpipe(torch.rand(4, 2))
    optimizer.step()
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        output.sum().backward()


def test_a_step_in_a_hook_of_backward_is_fine():
    """The optimizer in backward: each parameter moves when its gradient is complete."""
    def train(make):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).double()
        net = make(model)
        for parameter in model.parameters():
            def step(p):
                with torch.no_grad():
                    p.sub_(p.grad * 0.1)
                p.grad = None
            parameter.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            net(torch.rand(5, 2, dtype=torch.double)).square().sum().backward()
        return list(model.parameters())

    expected = train(lambda model: model)
    for make in DEVICES.values():
        actual = train(lambda model: GPipe(model, [1, 2], devices=make(2), chunks=3,
                                           checkpoint='always'))
        assert_same(actual, expected)


def test_a_layer_may_write_to_its_own_parameters():
    model = nn.Sequential(nn.Embedding(10, 4, max_norm=1.0), nn.Linear(4, 2)).double()
    reference = copy.deepcopy(model)
    gpipe = GPipe(model, [2], devices=['cpu'], chunks=3, checkpoint='always')
    x = torch.randint(10, (7,))
    gpipe(x).square().sum().backward()
    reference(x).square().sum().backward()
    assert_same(gradients(gpipe), gradients(reference))


class Late(nn.Module):
    """A layer that changes a buffer in its last micro-batch, after its use in the others."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.register_buffer('scale', torch.ones(1, dtype=torch.double))
        self.register_buffer('late', None)

    def forward(self, x):
        """Scale, and double the scale for the next mini-batch."""
        y = (x * self.scale.clone()).tanh()
        if len(x) == 2 and not is_recomputing():
            self.change(self)
            self.late = torch.ones(1)
        return y


def replace(layer):
    """Put another tensor there."""
    layer.scale = layer.scale * 2


@pytest.mark.parametrize('change', [replace, lambda layer: layer.scale.mul_(2)])
def test_a_buffer_that_another_cell_changes_is_put_back_too(change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Late(change)).double()
    results = []
    for mode in ('never', 'always'):
        gpipe = GPipe(copy.deepcopy(model), [2], devices=['cpu'], chunks=3, checkpoint=mode)
        torch.manual_seed(1)
        for _ in range(2):
            gpipe(torch.randn(8, 4, dtype=torch.double)).square().sum().backward()
        results.append([*gradients(gpipe), gpipe[1].scale])
    assert_same(results[1], results[0])


def test_a_large_buffer_is_copied_once_per_forward_not_per_cell():
    class Mask(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer('mask', torch.ones(256, 1024))

    gpipe = GPipe(nn.Sequential(Mask()), [1], devices=['cpu'], chunks=8, checkpoint='always')
    with LiveTensors().watched() as live:
        output = gpipe(torch.rand(8, 4))
    assert live.peak < 2 * gpipe[0].mask.nbytes
    assert output is not None


@pytest.mark.parametrize('layer', [
    lambda: (lambda self, x: (self.ema.data.mul_(2), x * self.ema)[1]),
    lambda: (lambda self, x: x * next(self.random)),
    lambda: (lambda self, x: (x.data.mul_(2), x * 1)[1])],
    ids=['behind the version', 'a state of its own', 'input behind the version'])
def test_what_no_snapshot_sees_is_found_out_by_its_result(layer):
    forward = layer()

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer('ema', torch.ones(1))
            self.random = itertools.count(1)

        def forward(self, x):
            return forward(self, x)

    gpipe = GPipe(nn.Sequential(nn.Linear(4, 4), Layer()), [1, 1], devices=['cpu', 'cpu'],
                  chunks=2, checkpoint='always')
    output = gpipe(torch.rand(4, 4))
    with pytest.raises(RuntimeError, match='its output has other values'):
        output.sum().backward()


@pytest.mark.parametrize('dtype', [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_and_values_that_are_no_numbers_are_no_other_result(dtype):
    class Noise(nn.Module):
        def forward(self, x):
            y = x * (1e6 if not is_recomputing() else 1e6 * (1 + 4 * torch.finfo(dtype).eps))
            return torch.cat([y, x * float('nan'), x * float('inf')], 1)

    gpipe = GPipe(nn.Sequential(nn.Linear(4, 4), Noise()).to(dtype), [1, 1],
                  devices=['cpu', 'cpu'], chunks=2, checkpoint='always')
    gpipe(torch.rand(4, 4, dtype=dtype)).sum().backward()


def test_a_lazy_layer_works():
    gpipe = GPipe(nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d()), [2], devices=['cpu'],
                  chunks=2, checkpoint='always')
    gpipe(torch.rand(4, 4)).sum().backward()
    assert gpipe[1].num_batches_tracked == 2
