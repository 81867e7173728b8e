"""Edges without data, and the phony that carries them."""

import threading
import weakref

import pytest
import torch
from torch import nn

from tests.devices import ACCELERATOR, devices
from tests.helpers import in_partitions, on_first
from torchgpipe.engine.backward_order import Fork, Join, Tie, fork, get_phony, join


class Log(torch.autograd.Function):
    """An identity that logs its backward."""

    @staticmethod
    def forward(ctx, log, name, x):
        ctx.log, ctx.name = log, name
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(ctx.name)
        return None, None, grad


@pytest.mark.parametrize('dependent, order', [(True, ['b', 'a']), (False, ['a', 'b'])])
def test_backward_of_the_fork_waits_for_the_join(dependent, order):
    log, made = [], []
    a = torch.rand(1, requires_grad=True) * 1 * 1 * 1 * 1
    a, phony = fork(Log.apply(log, 'a', a))

    def make_b():
        b = torch.rand(1, requires_grad=True)
        made.append(Log.apply(log, 'b', join(b, phony) if dependent else b))

    # Autograd takes the ready node that was made last, by a count that starts anew in each
    # thread. So without the edge it would begin with a.
    thread = threading.Thread(target=make_b)
    thread.start()
    thread.join()
    (a + made[0]).backward()
    assert log == order


def test_grad_mode_decides_whether_there_is_an_edge(monkeypatch):
    x = torch.rand(1, requires_grad=True)
    y, phony = fork(x)
    assert y is not x and y.requires_grad and phony.requires_grad
    assert isinstance(y.grad_fn, Fork._backward_cls)
    z = join(y, phony)
    assert z is not y and isinstance(z.grad_fn, Join._backward_cls)

    monkeypatch.delattr(Tie, 'forward')
    with torch.no_grad():
        y, phony = fork(x)
        assert y is x and not phony.requires_grad
        assert join(x, phony) is x


def test_join_gives_requires_grad_from_the_phony_only():
    a, b = torch.rand(2, 1).unbind()
    a, phony = fork(a)
    assert not phony.requires_grad and not join(b, phony).requires_grad
    a, phony = fork(a.requires_grad_())
    assert join(b, phony).requires_grad


def test_the_next_layer_may_work_in_place():
    x = torch.rand(3, requires_grad=True)
    y, phony = fork(x * 2)
    y = join(y, phony)
    y.mul_(3)
    y.sum().backward()
    assert x.grad.tolist() == [6, 6, 6]


def test_autograd_notices_an_in_place_change_across_the_edge():
    x = torch.rand(3, requires_grad=True)
    y, phony = fork(x.exp())  # exp saves its result
    y.mul_(3)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        y.sum().backward()


def test_nothing_leaks_through_the_edge():
    refs = []

    class Leak(Log):
        @staticmethod
        def backward(ctx, grad):
            refs.append(weakref.ref(ctx))
            return None, None, grad

    x = Leak.apply([], '', torch.rand(1, requires_grad=True))
    x, phony = fork(x)
    x = join(x, phony)
    x.backward()
    del x, phony
    assert refs[0]() is None


def test_a_phony_is_one_empty_tensor_per_device_and_kind():
    cpu = torch.device('cpu')
    assert get_phony(cpu, requires_grad=True) is get_phony(cpu, requires_grad=True)
    assert get_phony(cpu, requires_grad=False) is not get_phony(cpu, requires_grad=True)
    assert get_phony(cpu, requires_grad=True).requires_grad
    assert get_phony(cpu, requires_grad=False).shape == (0,)


def test_a_phony_made_in_inference_mode_is_of_use_outside():
    device = torch.device('meta')
    with torch.inference_mode():
        phony = get_phony(device, requires_grad=True)
    assert not phony.is_inference()


@pytest.mark.accelerator
def test_a_phony_lies_on_its_device():
    device = torch.device(ACCELERATOR, 0)
    assert get_phony(device, requires_grad=False).device == device


class Two(nn.Module):
    """Give the outputs of two layers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        return tuple(layer(x).tanh() for layer in self.layers)


@devices
@pytest.mark.parametrize('used', [0, 1])
def test_an_unused_output_has_no_gradient(devices, used):
    gpipe = in_partitions(devices, nn.Linear(4, 4), Two(), chunks=2, checkpoint='except_last')
    gpipe(on_first(gpipe, torch.rand(4, 4)))[used].sum().backward()
    found = [layer.weight.grad is not None for layer in gpipe[1].layers]
    assert found == [used == 0, used == 1]
