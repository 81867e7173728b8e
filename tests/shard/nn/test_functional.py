"""Functions of sharded layers: shards by a tag or by an argument, against one process."""

import pytest
import torch
import torch.nn.functional as F

import torchgpipe.shard as ts
from tests.shard.processes import run
from torchgpipe.shard.nn import functional
from torchgpipe.shard.parameter import own


def shard(x, dim):
    """Return this rank's part of a tensor."""
    return x.narrow(dim, *own(x.size(dim))).clone()


def without_tags():
    """Split the weights by an argument."""
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (
        torch.rand(*shape, generator=generator, dtype=torch.double)
        for shape in ((2, 3), (5, 3), (5,))
    )
    expected = F.linear(x, weight, bias)
    y = functional.parallel_linear(x, shard(weight, 0), shard(bias, 0), dim=-1)
    assert ts.get_parallel_dim(y) == -1 and y.equal(shard(expected, 1))
    y = functional.parallel_linear(x, shard(weight, 1), bias, dim=0)
    assert ts.get_parallel_dim(y) is None and torch.allclose(y, expected)
    ids = torch.tensor([[0, 4], [2, 2]])
    y = functional.parallel_embedding(ids, shard(weight, 0), num_embeddings=5, dim=0)
    assert y.equal(F.embedding(ids, weight))
    with pytest.raises(IndexError, match='5 is not the number of a row in a table of 5'):
        functional.parallel_embedding(ids + 1, shard(weight, 0), num_embeddings=5, dim=0)


def other_sizes():
    """Call with a weight that fits nothing."""
    weight = torch.ones(2, 3)
    with pytest.raises(ValueError, match='the input has 4 features'):
        functional.parallel_linear(torch.ones(2, 4), weight)
    ts.set_attribute(weight, 0)
    with pytest.raises(ValueError, match='dim=-1, which splits dimension 0'):
        functional.parallel_linear(torch.ones(2, 6), weight, dim=-1)


def test_an_argument_names_the_split_of_a_weight_without_a_tag():
    run(2, without_tags, group=2)


def test_sizes_and_tags_that_do_not_fit_raise():
    run(2, other_sizes, group=2)
