"""What is alive in a step and after it."""
import gc
import weakref

import pytest
import torch
from torch import nn

from tests.devices import cpu_only, devices
from tests.engine.steps import layers, loss_of
from tests.helpers import on_first
from torchgpipe import GPipe


def saved(x, alive, most):
    """Return a number behind a node that keeps a tensor as long as its graph lives."""

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.token = Token()
            alive.add(ctx.token)
            most.append(len(alive))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            del ctx.token
            return grad * 2
    return Node.apply(x)


class Token:
    """What a node keeps."""


class Keep(nn.Module):
    """Count graphs of this layer that are alive."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = weakref.WeakSet(), []

    def forward(self, x):
        """Do so."""
        return saved(x, self.alive, self.most)


@devices
@pytest.mark.parametrize('schedule, expected', [('gpipe', [8] * 4), ('1f1b', [4, 3, 2, 1])])
def test_so_many_micro_batches_are_alive(devices, schedule, expected):
    counts = [Keep() for _ in range(4)]
    model = nn.Sequential(*[layer for keep in counts for layer in (nn.Linear(4, 4), keep)])
    gpipe = GPipe(model, [2] * 4, devices=devices(4), chunks=8, checkpoint='never')
    x = on_first(gpipe, torch.randn(8, 4))
    for _ in range(2):
        gpipe.step(x, x.to(gpipe.devices[-1]), loss_of, schedule=schedule)
        assert [max(keep.most) for keep in counts] == expected
        assert not any(keep.alive for keep in counts)


@cpu_only('it counts objects of the host')
def test_nothing_is_left_behind():
    gpipe = GPipe(layers(), [2, 2, 2, 2], devices=[f'cpu:{j}' for j in range(4)], chunks=4,
                  checkpoint='always')
    x = torch.randn(8, 4, dtype=torch.double)
    seen = weakref.WeakSet()
    gpipe[5].register_forward_hook(lambda layer, args, output: seen.add(output))
    gc.disable()
    try:
        gpipe.step(x, x[:, :3], loss_of)
        assert not seen
    finally:
        gc.enable()
