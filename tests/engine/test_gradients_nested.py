"""Layers that run backward themselves, or read what changes, in a step with split backwards."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from tests.devices import cpus, devices
from tests.engine.steps import placed
from tests.equivalence import loss_of
from tests.helpers import assert_same, gradients, in_partitions, micro_batches, on_first
from tests.zoo.nested import adjoint
from torchgpipe import GPipe
from torchgpipe.schedule.generators import SPLIT, V_SHAPED

split_schedules = pytest.mark.parametrize('schedule', SPLIT)


def pipeline(model, schedule, devices, **options):
    """Wrap a copy of the model."""
    places = placed(devices(4), schedule)
    return GPipe(copy.deepcopy(model), [1] * 4, devices=places, chunks=3, **options)


def check(model, gpipe, schedule, steps=2):
    """Train both, the model on one micro-batch after the other, and compare gradients."""
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (model, gpipe)]
    for _ in range(steps):
        x, target = torch.randn(2, 7, 4, dtype=torch.double)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part, label in zip(micro_batches(x, 3), micro_batches(target, 3)):
            (loss_of(model(part), label) * len(part) / len(x)).backward()
        gpipe.step(on_first(gpipe, x), target.to(gpipe.devices[-1]), loss_of, schedule=schedule)
        assert_same(gradients(gpipe), gradients(model), 1e-10)
        for optimizer in optimizers:
            optimizer.step()
    assert_same(gpipe.state_dict().values(), model.state_dict().values(), 1e-10)


@devices
def test_a_nested_backward_of_a_layer_in_two_partitions(devices):
    """Then modules have leaves only while an action of the partition runs."""
    for schedule in ['1f1b', *SPLIT]:
        inner = adjoint()
        model = nn.Sequential(
            *[
                nn.Sequential(nn.Linear(4, 4), inner if j in (0, 3) else nn.Tanh())
                for j in range(4)
            ]
        ).double()
        check(model, pipeline(model, schedule, devices, checkpoint='except_last'), schedule)


class LossWithLayer(nn.Module):
    """A loss whose backward calls a layer again."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, output, target):
        return loss_of(self.layer(output), target)


@devices
def test_a_nested_backward_of_the_loss(devices):
    for schedule in ['1f1b', *SPLIT]:
        model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double()
        gpipe = pipeline(model, schedule, devices, checkpoint='except_last')
        expected = LossWithLayer(adjoint().double())
        loss = copy.deepcopy(expected).to(gpipe.devices[-1])
        x, target = torch.randn(2, 7, 4, dtype=torch.double)
        for part, label in zip(micro_batches(x, 3), micro_batches(target, 3)):
            (expected(model(part), label) * len(part) / len(x)).backward()
        gpipe.step(on_first(gpipe, x), target.to(gpipe.devices[-1]), loss, schedule=schedule)
        assert_same(gradients(gpipe), gradients(model), 1e-10)
        assert_same(gradients(loss), gradients(expected), 1e-10)


@cpus
def test_a_nested_backward_of_a_layer_in_the_loss_and_in_the_first_partition(devices):
    for schedule in ['1f1b', *SPLIT]:
        model = nn.Sequential(
            *[nn.Sequential(nn.Linear(4, 4), adjoint()) for _ in range(4)]
        ).double()
        gpipe = pipeline(model, schedule, devices, checkpoint='except_last')
        expected, loss = LossWithLayer(model[0][1]), LossWithLayer(gpipe[0][1])
        for _ in range(3):
            x, target = torch.randn(2, 7, 4, dtype=torch.double)
            for part, label in zip(micro_batches(x, 3), micro_batches(target, 3)):
                (expected(model(part), label) * len(part) / len(x)).backward()
            gpipe.step(x, target, loss, schedule=schedule)
            assert_same(gradients(gpipe), gradients(model), 1e-10)


class Memory(nn.Module):
    """Read a buffer that changes in each forward, by a layer whose backward is split."""

    def __init__(self, layer, shape):
        super().__init__()
        self.layer = layer
        self.register_buffer('memory', torch.rand(shape))

    def forward(self, x):
        with torch.no_grad():
            self.memory.lerp_(x.mean(0).view_as(self.memory), 0.5)
        return x * self.layer(self.memory).flatten()


@cpus
@split_schedules
@pytest.mark.parametrize('mode', ['never', 'always'])
@pytest.mark.parametrize('layer, shape', [(nn.Linear(4, 4), [4]), (nn.Conv1d(4, 4, 1), [1, 4, 1])])
def test_an_input_that_changes_between_the_halves(devices, schedule, mode, layer, shape):
    """In v0.21, the second half silently read the changed buffer."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], Memory(layer, shape)).double()
    gpipe = pipeline(model, schedule, devices, checkpoint=mode)
    if mode == 'always' or schedule in V_SHAPED:  # W follows I on the last partition
        check(model, gpipe, schedule)
        return
    x = torch.randn(7, 4, dtype=torch.double)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        gpipe.step(on_first(gpipe, x), x.to(gpipe.devices[-1]), loss_of, schedule=schedule)
    assert all(parameter.grad is None for parameter in gpipe.parameters())


class Doubling(torch.autograd.Function):
    """Pass a tensor on; backward changes its gradient in place, as it should not."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(2)


class Branches(nn.Linear):
    """Two branches that get the same gradient; the second one changes it in place later."""

    def forward(self, x):
        return Doubling.apply(x) + super().forward(x)


@devices
def test_an_output_gradient_that_changes_between_the_halves(devices):
    gpipe = in_partitions(devices, Branches(4, 4), chunks=2, checkpoint='never')
    x = on_first(gpipe, torch.randn(4, 4)).requires_grad_()
    with pytest.raises(RuntimeError, match='output gradient and input'):
        gpipe.step(x, x.detach(), loss_of, schedule='zb-h1')


class Token:
    """An object that a node of a graph refers to."""


class Holding(torch.autograd.Function):
    """Pass a tensor on, by a node that refers to a token."""

    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Failing(nn.Module):
    """Two branches. The older one has a token, and backward of the newer one fails."""

    def __init__(self, alive):
        super().__init__()
        self.alive = alive

    def forward(self, x):
        token = Token()
        self.alive.add(token)
        older, newer = Holding.apply(x, token), x * 3
        newer.register_hook(lambda grad: grad.missing)
        return older + newer


@devices
def test_a_failed_backward_leaves_no_nodes_in_the_queue_of_its_thread(devices):
    """In v0.21, they were freed at the end of the thread: if Python had ended, it aborted."""
    alive = weakref.WeakSet()
    layers = [nn.Sequential(nn.Linear(4, 4), Failing(alive)) for _ in range(2)]
    gpipe = GPipe(
        nn.Sequential(*layers), [1, 1], devices=devices.distinct(2), chunks=2, checkpoint='never'
    )
    x = on_first(gpipe, torch.randn(4, 4))
    with pytest.raises(AttributeError):
        gpipe.step(x, x.to(gpipe.devices[-1]), loss_of, schedule='1f1b')
    gc.collect()
    assert not alive
