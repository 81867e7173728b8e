"""Modes of the caller in a step: they see forward and backward of all workers."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.devices import cpus, devices
from tests.equivalence import loss_of
from tests.helpers import assert_same, gradients, on_first
from torchgpipe import GPipe
from torchgpipe.schedule.generators import SPLIT

schedules = pytest.mark.parametrize('schedule', ['1f1b', *SPLIT[:2]])


def network():
    """Return a model."""
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double()


@cpus
@schedules
def test_a_counter_counts_backward_on_workers(devices, schedule):
    """In v0.21, it counted forward only."""
    model = network()
    gpipe = GPipe(copy.deepcopy(model), [2, 2], devices=devices(2), chunks=3, checkpoint='never')
    x = torch.randn(7, 4, dtype=torch.double)
    with FlopCounterMode(display=False) as expected:
        loss_of(model(x), x).backward()
    with FlopCounterMode(display=False) as counted:
        gpipe.step(x, x, loss_of, schedule=schedule)
    assert counted.get_total_flops() == expected.get_total_flops()


class Rounded(TorchDispatchMode):
    """Round products. Operations of two threads must not run at once."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert self.lock.acquire(blocking=False)
        try:
            output = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ in ('mm', 'addmm'):
                output = (output * 64).round() / 64
            return output
        finally:
            self.lock.release()


@cpus
@schedules
def test_a_mode_that_rounds_products(devices, schedule):
    model = network()
    gpipe = GPipe(
        copy.deepcopy(model), [2, 2], devices=devices(2), chunks=3, checkpoint='except_last'
    )
    for _ in range(3):
        x = torch.randn(6, 4, dtype=torch.double)
        model.zero_grad()
        gpipe.zero_grad()
        with Rounded():
            for part in x.chunk(3):
                (loss_of(model(part), part) / 3).backward()
            gpipe.step(x, x, loss_of, schedule=schedule)
        assert_same(gradients(gpipe), gradients(model))


class AtDefaultDevice(torch.autograd.Function):
    """A function whose backward makes a tensor."""

    @staticmethod
    def forward(ctx, x, seen):
        ctx.seen = seen
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(torch.empty(1).device.type)
        return grad, None


class SeesFunctions(TorchFunctionMode):
    """Count functions."""

    number = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


class Records(nn.Module):
    """Record the device of a tensor that backward makes."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def forward(self, x):
        return AtDefaultDevice.apply(x, self.seen)


@devices
def test_the_default_device_and_functions_in_backward(devices):
    seen = []
    gpipe = GPipe(
        nn.Sequential(nn.Linear(4, 4), Records(seen), nn.Linear(4, 4), Records(seen)),
        [2, 2],
        devices=devices(2),
        chunks=2,
        checkpoint='never',
    )
    x = torch.randn(4, 4)
    y, target = on_first(gpipe, x), x.to(gpipe.devices[-1])
    with torch.device('meta'):
        gpipe.step(y, target, loss_of)
    assert seen == ['meta'] * 4
    with SeesFunctions() as mode:
        gpipe.step(y, target, loss_of)
    assert mode.number > 0 and seen == ['meta'] * 4 + ['cpu'] * 4
