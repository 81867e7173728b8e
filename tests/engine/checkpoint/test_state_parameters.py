"""Who may write to parameters between forward and backward, and who gets an error."""

import copy

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.engine.checkpoint.layers import Layer, doubles
from tests.helpers import assert_same, call, gradients, in_partitions
from torchgpipe import GPipe


@devices
def test_a_step_between_forward_and_backward_raises_as_without_checkpoints(devices):
    for mode in ['always', 'never']:
        for passes in [0, 1]:
            gpipe = in_partitions(
                devices, nn.Linear(2, 2), nn.Linear(2, 2), chunks=1 + passes, checkpoint=mode
            )
            optimizer = torch.optim.SGD(gpipe.parameters(), 0.1)
            for parameter in gpipe.parameters():
                parameter.grad = torch.ones_like(parameter)
            for _ in range(passes):
                gpipe(torch.rand(4, 2, device=devices.first)).sum().backward()
            output = gpipe(torch.rand(4, 2, device=devices.first))
            optimizer.step()
            with pytest.raises(RuntimeError, match='modified by an inplace operation'):
                output.sum().backward()


@devices
def test_a_step_in_a_hook_of_backward_is_fine(devices):
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
            call(net, torch.rand(5, 2, dtype=torch.double)).square().sum().backward()
        return list(model.parameters())

    expected = train(lambda model: model)
    actual = train(
        lambda model: GPipe(model, [1, 2], devices=devices(2), chunks=3, checkpoint='always')
    )
    assert_same(actual, expected)


class Clipped(nn.Embedding):
    """A layer whose weight is clipped by a hook."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_forward_pre_hook(Clipped.clip)

    def clip(self, args):
        """Clip it."""
        self.weight.data.clamp_(-0.5, 0.5)


@devices
@pytest.mark.parametrize(
    'make', [lambda: nn.Embedding(10, 4, max_norm=1.0), lambda: Clipped(10, 4)]
)
def test_two_forwards_then_backward_with_a_layer_that_writes_to_its_weight(devices, make):
    """In v0.3.0: "modified between forward and backward, before the optimizer's step"."""
    model = nn.Sequential(make(), nn.Linear(4, 2)).double()
    reference = copy.deepcopy(model)
    gpipe = GPipe(model, [2], devices=devices(1), chunks=3, checkpoint='always')
    for _ in range(2):
        x, y = torch.randint(10, (7,)), torch.randint(10, (7,))
        for net in (reference, gpipe):
            net.zero_grad()
            (call(net, x).square().sum() + call(net, y).square().sum()).backward()
        assert_same(
            [*gradients(gpipe), *gpipe.parameters()],
            [*gradients(reference), *reference.parameters()],
        )


@devices
def test_a_parameter_that_a_layer_begins_to_write_to(devices):
    def maybe_write(layer, x):
        if layer.on:
            with torch.no_grad():
                layer.weight.mul_(0.9)
        return x * layer.weight.clone()

    layer = Layer(maybe_write, parameters={'weight': (doubles(4), True)}, on=False)
    gpipe = in_partitions(devices, layer, chunks=2, checkpoint='always')
    call(gpipe, doubles(4, 4)).sum().backward()
    layer.on = True
    with pytest.raises(RuntimeError, match="parameter '0.weight' was written to by its layer"):
        call(gpipe, doubles(4, 4)).sum().backward()
    for _ in range(2):
        before = layer.weight.detach().clone()
        layer.zero_grad()
        call(gpipe, doubles(4, 4)).sum().backward()
        assert_same([layer.weight, layer.weight.grad], [before * 0.81, doubles(4) * 4])
