"""The promise: the numbers of the unwrapped model, whatever the balance, chunks and mode."""

import copy

import pytest
import torch
from torch import nn

from tests.devices import ACCELERATOR, devices
from tests.helpers import Slow, as_if_on_several, assert_trains_alike, in_partitions, train_both
from tests.zoo.computing import Pair, Unpair
from torchgpipe import GPipe


def model_of_values():
    """Return layers with a tuple between two of them, in float64."""
    pair = nn.Sequential(Pair(3), Unpair())
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), pair, nn.Linear(3, 3)).double()


@devices
def test_every_combination(devices):
    """The grid of the same promise: every batch size from 1 to 9."""
    for n in [1, 2, 3, 4]:
        for chunks in [1, 2, 3, 8]:
            model = model_of_values()
            balance = {1: [4], 2: [1, 3], 3: [1, 2, 1], 4: [1, 1, 1, 1]}[n]
            for size in range(1, 10):
                train_both(
                    model,
                    GPipe(
                        copy.deepcopy(model),
                        balance,
                        devices=devices(n),
                        chunks=chunks,
                        checkpoint='except_last',
                    ),
                    torch.randn(size, 3, dtype=torch.double),
                )


@devices
def test_no_gradient_is_computed_for_data_that_needs_none(devices):
    asked = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            asked.append(ctx.needs_input_grad[0])
            return None, (grad * ctx.saved_tensors[0]).sum(0)

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(2))

        def forward(self, x):
            return Product.apply(x, self.weight)

    gpipe = in_partitions(devices, First(), nn.Linear(2, 2), chunks=3, checkpoint='except_last')
    gpipe(torch.rand(3, 2, device=devices.first)).sum().backward()
    assert asked == [False] * 3


@pytest.mark.accelerator
def test_streams_do_not_race(monkeypatch):
    """Two partitions on one device, made to copy as if they were on two, behind slow kernels."""
    as_if_on_several(monkeypatch, 2)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).double()
    reference = copy.deepcopy(model)
    slow = nn.Sequential(Slow(), model[0], Slow(), model[1], Slow(), model[2])
    gpipe = GPipe(slow, [3, 3], devices=[ACCELERATOR] * 2, chunks=8, checkpoint='except_last')
    assert [partition.moves for partition in gpipe._engine.partitions] == [False, True]
    for _ in range(10):
        x = torch.randn(64, 64, dtype=torch.double)
        reference.zero_grad(), gpipe.zero_grad()
        assert_trains_alike(reference, gpipe, x, 1e-9)
