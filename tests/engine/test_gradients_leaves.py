"""Leaves in place of parameters: hooks see whole gradients, and layers their own parameters."""

import copy

import torch
from torch import nn

from tests.devices import devices
from tests.engine.steps import loss_of, train
from tests.helpers import assert_same, in_partitions, on_first
from tests.helpers import gradients as gradients_of
from torchgpipe import GPipe
from torchgpipe.engine import gradients


@devices
def test_hooks_of_parameters_see_the_whole_gradient_once(devices):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    gpipe = GPipe(copy.deepcopy(model), [2, 1], devices=devices(2), chunks=4)
    calls = []
    for net in (model, gpipe):
        for parameter in net.parameters():
            parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
            parameter.register_post_accumulate_grad_hook(calls.append)
    train(model, gpipe, 8, steps=1)
    assert len(calls) == 8


@devices
def test_a_gradient_is_not_copied_into_its_parameter(devices):
    gpipe = in_partitions(devices, nn.Linear(4, 3), chunks=2)
    seen = []
    gpipe[0].weight.register_hook(lambda grad: seen.append(grad.data_ptr()))
    gpipe.step(
        torch.rand(4, 4, device=devices.first), torch.rand(4, 3, device=devices.first), loss_of
    )
    assert seen == [gpipe[0].weight.grad.data_ptr()]


@devices
def test_layers_find_their_parameters_as_they_are(devices):
    """They keep their attributes; a parameter that a layer puts in their place stays."""

    class Layer(nn.Linear):
        def forward(self, x):
            if isinstance(self.bias, nn.Parameter) and self.weight.is_known:
                self.bias = None
            return super().forward(x)

    layer = Layer(4, 4)
    gpipe = GPipe(nn.Sequential(layer, nn.Linear(4, 3)), [2], devices=devices(1), chunks=2)
    layer.weight.is_known = True
    for _ in range(2):
        gpipe.step(
            torch.rand(4, 4, device=devices.first), torch.rand(4, 3, device=devices.first), loss_of
        )
    assert layer.bias is None and layer.weight.grad is not None
    assert gpipe[1].weight.grad.shape == (3, 4)


@devices
def test_a_parameter_that_a_layer_gives_up_does_not_come_back(devices):
    class GiveUp(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            del self.bias
            return y

    gpipe = in_partitions(devices, GiveUp(4, 4), chunks=1, checkpoint='never')
    x = torch.rand(4, 4, device=devices.first)
    gpipe.step(x, x, loss_of)
    assert [*dict(gpipe[0].named_parameters())] == ['weight']


def test_where_the_gradient_of_a_sparse_tensor_enters_its_graph():
    """Also if that is itself a leaf."""
    x = torch.eye(2, requires_grad=True)
    leaf = torch.eye(2).to_sparse().requires_grad_()
    for y in ((x * 2).to_sparse(), leaf):
        torch.autograd.backward([gradients.edge_of(y)], [torch.eye(2).to_sparse()])
    assert torch.equal(x.grad, 2 * torch.eye(2))
    assert torch.equal(leaf.grad.to_dense(), torch.eye(2))


class Assigning(nn.Module):
    """A layer that assigns a parameter to another slot, or freezes it."""

    def __init__(self, change):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.change = change
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.change(self)
        return self.b(self.a(x).tanh())


def tie(layer):
    """Tie two weights at the first call."""
    if layer.calls == 1:
        layer.b.weight = layer.a.weight


def swap(layer):
    """Swap two parameters."""
    layer.a.weight, layer.b.weight = layer.b.weight, layer.a.weight


def freeze(layer):
    """Freeze a layer in the first call of the second step."""
    if layer.calls == 4:
        layer.a.requires_grad_(False)


@devices
def test_in_v0210_a_leaf_that_a_layer_assigns_elsewhere_stayed_there(devices):
    """The optimizer did not know it. And a parameter that a layer froze was trained further."""
    for schedule in ['1f1b', 'zb-h1']:
        for change in [tie, swap, freeze]:
            model = nn.Sequential(nn.Linear(4, 4), Assigning(change)).double()
            gpipe = GPipe(
                copy.deepcopy(model), [1, 1], devices=devices(2), chunks=3, checkpoint='never'
            )
            own = {id(x) for x in gpipe.parameters()}
            optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (model, gpipe)]
            for _ in range(3):
                x = torch.randn(6, 4, dtype=torch.double)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                for part in x.chunk(3):
                    ((model(part) - part).square().mean() / 3).backward()
                gpipe.step(
                    x.to(gpipe.devices[0]),
                    x.to(gpipe.devices[-1]),
                    lambda output, target: (output - target).square().mean(),
                    schedule=schedule,
                )
                assert {id(x) for x in gpipe.parameters()} <= own
                assert [x.requires_grad for x in gpipe.parameters()] == [
                    x.requires_grad for x in model.parameters()
                ]
                assert_same(gradients_of(gpipe), gradients_of(model), 1e-10)
                for optimizer in optimizers:
                    optimizer.step()


class Decaying(nn.Module):
    """A layer that writes to its parameter in forward, and reads a copy of it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(0.9)
        return x * self.scale.clone()


@devices
def test_in_v027_a_written_parameter_beside_a_shared_layer_could_not_be_recomputed(devices):
    """Each action then sets the leaves of its partition, also within a recomputation."""
    act = nn.Tanh()
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), Decaying(), act), nn.Sequential(nn.Linear(4, 4), act)
    ).double()
    gpipe = GPipe(copy.deepcopy(model), [1, 1], devices=devices(2), chunks=3, checkpoint='always')
    for _ in range(2):
        x = torch.randn(6, 4, dtype=torch.double)
        for part in x.chunk(3):
            (loss_of(model(part), part) / 3).backward()
        gpipe.step(on_first(gpipe, x), x.to(gpipe.devices[-1]), loss_of)
        assert_same(gradients_of(gpipe), gradients_of(model))
