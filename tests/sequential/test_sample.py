"""The sample of a submodule: the arguments that the model passes to it."""

import random

import pytest
import torch
from torch import nn

from torchgpipe import Arguments, GPipe
from torchgpipe.sequential import sample_of, to_sequential


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x, *, scale=None, cache=None):
        return self.layers(x) if scale is None else self.layers(x) * scale


class Net(nn.Module):
    """A norm with statistics, dropout, and a body that gets keywords."""

    def __init__(self):
        super().__init__()
        self.norm, self.body, self.unused = nn.BatchNorm1d(4), Body(), nn.Linear(2, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = nn.functional.dropout(self.norm(x), 0.5, self.training)
        try:
            return self.body(x, scale=x.sum(1, keepdim=True), cache=None)
        except Exception:
            return None


def test_the_arguments_of_the_call():
    for by_name in [False, True]:
        net, x = Net(), torch.rand(8, 4)
        sample = sample_of(net, 'body' if by_name else net.body, x)
        assert isinstance(sample, Arguments) and sorted(sample.kwargs) == ['cache', 'scale']
        (body,), scale = sample.args, sample.kwargs['scale']
        assert torch.equal(body.sum(1, keepdim=True), scale) and sample.kwargs['cache'] is None
        assert not body.requires_grad, by_name


def test_nothing_changes():
    net, x = Net(), torch.rand(8, 4)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    states = torch.get_rng_state(), random.getstate()
    sample_of(net, net.body, Arguments(x))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.calls == 0 and not net.body._forward_pre_hooks
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert all(parameter.grad is None for parameter in net.parameters())


def test_the_arguments_are_the_caller_s_not_changed_by_hooks():
    net, x = Net().eval(), torch.rand(8, 4)
    net.body.register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    assert sample_of(net, net.body, x).args[0].abs().sum() > 0


def test_a_parameter_that_a_forward_writes_to_does_not_change():
    """A copy of the model shares its parameters."""
    net = nn.Sequential(nn.Embedding(4, 3, max_norm=0.1), nn.Linear(3, 2))
    before = net[0].weight.detach().clone()
    sample = sample_of(net, net[1], torch.tensor([0, 1]))
    assert sample.args[0].norm(dim=1).max() < 0.11
    assert torch.equal(net[0].weight, before)


#: Whether each call of a model is in grad mode. Copies of the model share it.
GRAD_MODES = []


class InPlace(nn.Module):
    """Changes its input, and passes a parameter on."""

    def __init__(self):
        super().__init__()
        self.scale, self.body = nn.Parameter(torch.ones(4)), nn.Bilinear(4, 4, 2)

    def forward(self, x):
        GRAD_MODES.append(torch.is_grad_enabled())
        return self.body(x.add_(1), self.scale)


def test_the_input_and_the_parameters_are_copied():
    net, x = InPlace(), torch.zeros(2, 4)
    value, scale = sample_of(net, 'body', x).args
    assert value.sum() == 8 and x.sum() == 0
    assert not scale.requires_grad and scale.data_ptr() != net.scale.data_ptr()


def test_the_call_takes_no_memory_for_gradients():
    GRAD_MODES.clear()
    sample_of(InPlace(), 'body', torch.zeros(2, 4))
    assert GRAD_MODES == [False]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(4, 4)

    def forward(self, x):
        return self.cell(self.cell(x + 1))


def test_the_first_of_several_calls():
    x = torch.rand(2, 4)
    assert torch.equal(sample_of(Recurrent(), 'cell', x).args[0], x + 1)


def test_the_part_of_a_model_runs_as_a_pipeline():
    net, x = Net().double().eval(), torch.rand(8, 4, dtype=torch.float64)
    layers = to_sequential(net.body, sample_of(net, net.body, x))
    pipeline = GPipe(layers, [1, len(layers) - 1], devices=['cpu', 'cpu'], chunks=4)
    net(x).sum().backward()
    expected = [parameter.grad for parameter in net.body.parameters()]
    net.zero_grad()
    with pipeline.in_place_of(net.body):
        net(x).sum().backward()
    assert all(
        torch.allclose(parameter.grad, gradient)
        for parameter, gradient in zip(net.body.parameters(), expected)
    )


class Catches(nn.Module):
    """Catches everything, or raises its own error."""

    def __init__(self, error=None):
        super().__init__()
        self.body, self.error = nn.Linear(4, 4), error

    def forward(self, x):
        try:
            return self.body(x)
        except BaseException:
            if self.error is not None:
                raise self.error
            return x


def test_a_forward_that_catches_everything():
    for error in [None, ValueError('other')]:
        x = torch.rand(2, 4)
        assert torch.equal(sample_of(Catches(error), 'body', x).args[0], x)


@pytest.mark.parametrize('compiles', ['model', 'submodule'])
def test_a_compiled_model_runs_as_it_was_written(compiles, compiler):
    net, x = nn.Sequential(nn.Linear(4, 4), Body()), torch.rand(2, 4)
    name = '1.layers'
    if compiles == 'model':
        net, name = torch.compile(net, backend='eager'), f'_orig_mod.{name}'
        net(x)
    else:
        net[1] = torch.compile(net[1], backend='eager')
        name = '1._orig_mod.layers'
    assert sample_of(net, name, x).args[0].shape == (2, 4)


def test_a_forward_that_a_copy_would_share_is_refused():
    net, x = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)), torch.rand(2, 4)
    forward = net.forward
    net.forward = lambda x: forward(x)
    with pytest.raises(ValueError, match='the forward of Sequential is a function that was set'):
        sample_of(net, '1', x)
    assert net[0].num_batches_tracked == 0


def test_errors():
    net, x = Net(), torch.rand(8, 4)
    with pytest.raises(ValueError, match="Net does not call 'unused' for this sample"):
        sample_of(net, net.unused, x)
    with pytest.raises(ValueError, match='this Linear is not a submodule of the Net'):
        sample_of(net, nn.Linear(2, 2), x)
    with pytest.raises(AttributeError, match='nothing'):
        sample_of(net, 'nothing', x)
    with pytest.raises(RuntimeError, match='running_mean'):  # the model's own error
        sample_of(net, net.unused, torch.rand(8, 3))
