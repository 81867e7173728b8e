"""Recomputation sees the buffers of the first pass, and moves none of them again."""

import copy

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.engine.checkpoint.layers import (
    Decay,
    doubles,
)
from tests.helpers import assert_same, call, gradients
from torchgpipe import GPipe, is_recomputing


@devices
def test_buffers_move_once_in_a_graph_that_is_retained(devices):
    gpipe = GPipe(
        nn.Sequential(nn.Linear(2, 2).double(), Decay(False)),
        [2],
        devices=devices(1),
        chunks=2,
        checkpoint='always',
    )
    output = gpipe(torch.rand(4, 2, dtype=torch.double, device=devices.first)).sum()
    output.backward(retain_graph=True)
    first = gradients(gpipe)
    gpipe.zero_grad()
    output.backward()
    assert_same(gradients(gpipe), first)
    assert gpipe[1].scale.item() == pytest.approx(0.81)


class Late(nn.Module):
    """A layer that changes a buffer in its last micro-batch, after its use in the others."""

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.register_buffer('scale', torch.ones(1, dtype=torch.double))
        self.register_buffer('late', None)

    def forward(self, x):
        y = (x * self.scale.clone()).tanh()
        if len(x) == 2 and not is_recomputing():
            self.change(self)
            self.late = torch.ones(1)
        return y


def replace(layer):
    """Put another tensor there."""
    layer.scale = layer.scale * 2


@devices
@pytest.mark.parametrize('change', [replace, lambda layer: layer.scale.mul_(2)])
def test_a_buffer_that_another_cell_changes_is_put_back_too(devices, change):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Late(change)).double()
    results = []
    for mode in ('never', 'always'):
        gpipe = GPipe(copy.deepcopy(model), [2], devices=devices(1), chunks=3, checkpoint=mode)
        torch.manual_seed(1)
        for _ in range(2):
            call(gpipe, torch.randn(8, 4, dtype=torch.double)).square().sum().backward()
        results.append([*gradients(gpipe), gpipe[1].scale])
    assert_same(results[1], results[0])


@devices
@pytest.mark.parametrize('where', [lambda gpipe: gpipe, lambda gpipe: gpipe[1]])
def test_a_mode_that_changes_between_forward_and_backward(devices, where):
    """In v0.3.0, an error that did not say so; unwrapped, backward does not care."""

    def run(net, model):
        net.train()
        torch.manual_seed(2)
        output = net(doubles(6, 4).to(devices.first))
        where(net).eval()
        output.square().sum().backward()
        return [*gradients(model), *model.buffers()]

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
    reference = copy.deepcopy(model).to(devices.first)
    gpipe = GPipe(model, [3], devices=devices(1), checkpoint='always')
    for _ in range(2):
        assert_same(run(gpipe, model), run(reference, reference))
        assert not where(gpipe).training
