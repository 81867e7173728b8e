"""A layer that tags."""

from collections import namedtuple

import pytest
import torch
from torch import nn

import torchgpipe.shard as ts
from tests.shard.processes import run
from torchgpipe.sequential import to_sequential
from torchgpipe.shard.parameter import is_tagged

Pair = namedtuple('Pair', 'a b')


def test_each_tensor_of_a_tuple_gets_a_tag_and_the_input_none():
    for dim in (None, 0, 1, -1):
        for requires_grad in (True, False):
            layer = ts.nn.RegisterParallelDim(dim)
            x = torch.ones(2, requires_grad=requires_grad)
            with torch.no_grad():
                assert layer(x) is not x
            y, pair = layer(x), layer(Pair(x, (x * 2, 'text')))
            assert type(pair) is Pair and pair.b[1] == 'text'
            for output in (y, pair.a, pair.b[0]):
                assert is_tagged(output) and ts.get_parallel_dim(output) == dim
            assert not is_tagged(x) and y.data_ptr() == x.data_ptr()
            if requires_grad:
                (y * 3).sum().backward()
                assert x.grad.tolist() == [3, 3]


class Branches(nn.Module):
    """A model that is not sequential."""

    def __init__(self):
        super().__init__()
        self.first, self.tag = ts.nn.ParallelLinear(3, 4, dim=1), ts.nn.RegisterParallelDim(-1)
        self.second = ts.nn.ParallelLinear(4, 3, dim=0)

    def forward(self, x):
        return self.second(self.tag(self.first(x).relu())) + x


def converted():
    """Compare a model with its converted layers."""
    model, x = Branches(), torch.randn(2, 3)
    assert to_sequential(model, x)(x).equal(model(x))


def test_a_conversion_to_a_sequential_model_leaves_it_whole():
    run(2, converted, group=2)


def test_a_wrong_dimension_raises():
    with pytest.raises(ValueError, match='not 2'):
        ts.nn.RegisterParallelDim(2)
    assert str(ts.nn.RegisterParallelDim(-1)) == 'RegisterParallelDim(dim=-1)'
