"""Layers that are kept out of recomputation, in several partitions."""

import threading

import pytest
import torch
from torch import nn

from tests.helpers import assert_same, gradients
from torchgpipe import GPipe, no_recompute

#: How long a thread waits for another one that the lock keeps away.
SECONDS = 0.3


@pytest.mark.slow
def test_one_that_stands_twice_runs_in_one_cell_at_a_time():
    """It has a forward of that cell's own meanwhile."""
    layer, is_met, entered = no_recompute(nn.Linear(4, 4).double()), [], threading.Barrier(2)
    model = nn.Sequential(layer, layer)
    gpipe = GPipe(model, [1, 1], devices=['cpu:0', 'cpu:1'], chunks=4, checkpoint='always')
    x = torch.randn(8, 4, dtype=torch.double)
    model(x).square().sum().backward()
    expected = gradients(model)
    gpipe(x)  # shows that no layer draws, so that cells run concurrently

    def see(layer, args, output):
        try:
            entered.wait(SECONDS)
            is_met.append(True)
        except threading.BrokenBarrierError:
            entered.reset()

    layer.register_forward_hook(see)
    model.zero_grad()
    gpipe(x).square().sum().backward()
    assert not is_met
    assert_same(gradients(model), expected)
