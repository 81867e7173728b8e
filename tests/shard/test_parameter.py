"""Parameters as DTensors, and layers of one's own."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import torchgpipe.shard as ts
from tests.shard.processes import run
from torchgpipe.shard.parameter import global_shape


def views():
    """Look at parameters as DTensors."""
    for shape, dim in itertools.product([(5, 7), (7, 5), (4, 4), (1, 3)], (None, 0, 1)):
        torch.manual_seed(0)
        plain = nn.Linear(*shape)
        torch.manual_seed(0)
        layer = ts.nn.ParallelLinear(*shape, dim=dim)
        for whole, part in zip(plain.parameters(), layer.parameters()):
            view = ts.dtensor(part)
            assert view.shape == whole.shape == global_shape(part)
            assert view.stride() == whole.stride()
            split = {None: None, 1: 0, 0: 1 if whole.dim() == 2 else None}[dim]
            assert view.placements == (Replicate(), Replicate() if split is None else Shard(split))
            assert view.device_mesh is ts.distributed.get_mesh()
            assert view.full_tensor().equal(whole) and not view.requires_grad
            assert view.to_local().data_ptr() == part.data_ptr()
            doubled = ts.dtensor(part, part * 2)
            assert doubled.full_tensor().equal(whole * 2)
    weight = nn.Linear(3, 3).weight
    assert ts.dtensor(weight).placements == (Replicate(), Replicate())
    ts.register_parallel_attribute(weight, 0)
    with pytest.raises(ValueError, match='register_part'):
        ts.dtensor(weight)


def test_a_parameter_as_a_dtensor():
    run(4, views, group=2)
    run(4, views, group=4)


class Scale(ts.nn.ParallelModule):
    """The example of the documentation."""

    def __init__(self, features):
        super().__init__()
        # The last dimension of activations is split, and so is this.
        self.register_part('weight', (features,), dim=1)
        ts.nn.init.shard_init_helper_(nn.init.normal_, self.weight)

    def forward(self, x):
        y = x * self.weight
        ts.register_parallel_dim(y, -1)
        return y


def own_layer():
    """Compare it with one process."""
    weight = nn.init.normal_(torch.empty(31), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    layer = Scale(31)
    x = torch.randn(2, 31)
    y = layer(ts.distributed.scatter(x))
    assert ts.distributed.gather(y, size=31).equal(x * weight)
    assert ts.dtensor(layer.weight).full_tensor().equal(weight)


def test_a_layer_of_ones_own():
    run(2, own_layer, group=2)
