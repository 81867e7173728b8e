"""The loss of a step: means, sums, counts, and gradients of other tensors in it."""

import copy

import pytest
import torch
from torch import nn

from tests.devices import cpus
from tests.engine.steps import layers, loss_of, train
from tests.helpers import assert_same, gradients
from torchgpipe import GPipe


@cpus
def test_a_sum(devices):
    def loss_fn(output, target):
        return (output - target).square().sum() / 16

    model = layers()
    gpipe = GPipe(copy.deepcopy(model), [4, 4], devices=devices(2), chunks=3)
    train(model, gpipe, 7, steps=1, loss_fn=loss_fn, expected_loss=loss_fn, normalizer=1)
    train(model, gpipe, 7, steps=1, loss_fn=loss_fn, normalizer=21 / 16)


@cpus
def test_a_scalar_may_have_dimensions(devices):
    model = layers()
    gpipe = GPipe(copy.deepcopy(model), [4, 4], devices=devices(2), chunks=3)
    train(model, gpipe, 7, steps=1, loss_fn=lambda *args: loss_of(*args).reshape(1, 1))


@cpus
def test_a_mean_over_the_count_of_the_targets(devices):
    """Of one micro-batch nothing is counted at all."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    weight = torch.rand(5, dtype=torch.double)
    gpipe = GPipe(copy.deepcopy(model), [1, 2], devices=devices(2), chunks=3)
    x, target = torch.randn(7, 4, dtype=torch.double), torch.tensor([1, -100, 3, -100, -100, 2, 0])
    for given_weight in (None, weight):

        def count(target):
            kept = target[target != -100]
            return len(kept) if given_weight is None else given_weight[kept].sum()

        loss_fn = nn.CrossEntropyLoss(given_weight)
        loss = loss_fn(model(x), target)
        loss.backward()
        found = gpipe.step(x, target, loss_fn, normalizer=count)
        assert_same([found, *gradients(gpipe)], [loss.detach(), *gradients(model)])


@cpus
def test_a_loss_with_parameters(devices):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.double))

        def forward(self, output, target):
            return loss_of(output, target) * self.scale.square()

    model, loss_fn = layers(), Loss()
    own = copy.deepcopy(loss_fn)
    calls = []
    own.scale.register_post_accumulate_grad_hook(calls.append)
    gpipe = GPipe(copy.deepcopy(model), [4, 4], devices=devices(2), chunks=3)
    train(model, gpipe, 7, steps=1, loss_fn=own, expected_loss=loss_fn)
    assert_same([own.scale.grad], [loss_fn.scale.grad])
    assert len(calls) == 1


@cpus
def test_a_loss_scale(devices):
    model = layers()
    gpipe = GPipe(copy.deepcopy(model), [4, 4], devices=devices(2), chunks=3)
    scaler = torch.amp.GradScaler('cpu', init_scale=256.0)
    optimizer = torch.optim.SGD(gpipe.parameters(), 0.1)
    x, y = torch.randn(7, 4, dtype=torch.double), torch.randn(7, 3, dtype=torch.double)
    loss = loss_of(model(x), y)
    loss.backward()
    found = gpipe.step(x, y, loss_of, scale=scaler.scale)
    scaler.unscale_(optimizer)
    assert_same([found, *gradients(gpipe)], [loss.detach(), *gradients(model)])
    scaler.step(optimizer)
    scaler.update()


@cpus
@pytest.mark.parametrize('leaf', [False, True])
def test_a_target_with_a_gradient(devices, leaf):
    model, teacher = layers(), nn.Linear(4, 3).double()
    gpipe, own = GPipe(copy.deepcopy(model), [4, 4], devices=devices(2), chunks=3), None
    x = torch.randn(7, 4, dtype=torch.double)
    grads = []
    for net in (model, gpipe):
        teacher.zero_grad()
        own = torch.ones(7, 3, dtype=torch.double, requires_grad=True)
        target = own if leaf else own * teacher(x)
        if net is model:
            loss_of(net(x), target).backward()
        else:
            net.step(x, target, loss_of)
        grads.append([own.grad, *gradients(teacher), *gradients(net)])
    assert_same(*grads)


@cpus
def test_the_batch_of_a_target_is_where_it_is(devices):
    def loss_fn(output, target):
        return nn.functional.cross_entropy(output.mean(0), target)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    gpipe = GPipe(copy.deepcopy(model), [2, 1], devices=devices(2), chunks=3, batch_dim=1)
    x, target = torch.randn(5, 7, 4, dtype=torch.double), torch.randint(3, (7,))
    loss_fn(model(x), target).backward()
    with pytest.raises(ValueError, match='target has no dimension 1'):
        gpipe.step(x, target, loss_fn)
    gpipe.step(x, target, loss_fn, target_dim=0)
    assert_same(gradients(gpipe), gradients(model))


@cpus
def test_a_fault_in_the_loss(devices):
    def loss_fn(output, target):
        raise ValueError('so')

    gpipe = GPipe(layers(), [4, 4], devices=devices(2), chunks=3)
    x = torch.randn(7, 4, dtype=torch.double)
    with pytest.raises(ValueError, match='so') as caught:
        gpipe.step(x, x[:, :3], loss_fn)
    assert 'in the loss of micro-batch 0 of 3' in caught.value.__notes__
