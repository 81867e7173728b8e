"""Functions of sharded layers: shards by a tag or by an argument, against one process."""

import pytest
import torch
from torch import nn

import torchgpipe.shard as ts
from tests.shard.nn.oracle import cut, over_groups
from tests.shard.processes import run
from torchgpipe.shard.parameter import is_tagged


def functional(dim, bias):
    """Compare the function with the layer, and with a table without tags."""
    layer = ts.nn.ParallelLinear(7, 5, bias, dim)
    x = torch.randn(3, 7)
    y = ts.nn.functional.parallel_linear(x, layer.weight, layer.bias)
    assert y.equal(layer(x)) and ts.get_parallel_dim(y) == ts.get_parallel_dim(layer(x))
    weight = torch.randn(5, 7)
    assert ts.nn.functional.parallel_linear(x, weight).equal(nn.functional.linear(x, weight))


def called_with(dim):
    """Pass the dimension of a weight without a tag, or one that contradicts the tag."""
    plain, x = nn.Linear(7, 5), torch.randn(3, 7)
    weight, bias = cut(plain.weight, {None: None, 0: 1}.get(dim, 0)), plain.bias
    bias = cut(bias, 0) if dim in (1, -1) else bias
    y = ts.nn.functional.parallel_linear(x, weight, bias, dim)
    assert ts.get_parallel_dim(y) == (-1 if dim in (1, -1) else None)
    torch.testing.assert_close(y, cut(plain(x), -1) if dim in (1, -1) else plain(x))
    assert not is_tagged(weight)

    table = nn.Embedding(7, 5, padding_idx=6, max_norm=1.0)
    ids = torch.tensor([[0, 6], [3, 3]])
    options = {'padding_idx': 6, 'max_norm': 1.0, 'num_embeddings': 7, 'dim': dim}
    rows = cut(table.weight.detach(), None if dim is None else abs(dim)).clone()
    torch.testing.assert_close(
        ts.nn.functional.parallel_embedding(ids, rows, **options), table(ids)
    )
    torch.testing.assert_close(rows, cut(table.weight, None if dim is None else abs(dim)))

    # Tags without a layer.
    ts.nn.functional.set_attribute(rows, dim, 1)
    ts.nn.functional.set_attribute(weight, dim)
    assert ts.nn.functional.parallel_linear(x, weight, bias).equal(y)
    torch.testing.assert_close(
        ts.nn.functional.parallel_embedding(ids, rows, num_embeddings=7), table(ids)
    )
    with pytest.raises(ValueError, match='the input has 9 features'):
        ts.nn.functional.parallel_linear(torch.randn(3, 9), weight)
    if dim == 0 and ts.distributed.get_group_size() > 1:
        with pytest.raises(IndexError, match='7 is not the number of a row in a table of 7'):
            ts.nn.functional.parallel_embedding(ids + 1, rows, num_embeddings=7)
    for wrong in {0, 1} - {dim, dim and abs(dim)}:
        splits = f'dim={wrong}, which splits dimension {1 - wrong} .*tag'
        with pytest.raises(ValueError, match=f'parallel_linear is called with {splits}'):
            ts.nn.functional.parallel_linear(x, weight, bias, wrong)
        with pytest.raises(ValueError, match=f'parallel_embedding is called with dim={wrong}, '):
            ts.nn.functional.parallel_embedding(ids, rows, num_embeddings=7, dim=wrong)
    with pytest.raises(ValueError, match='None, 0, 1 or -1'):
        ts.nn.functional.parallel_linear(x, weight, bias, 2)
    layer = ts.nn.ParallelEmbedding(7, 5, dim=dim)
    for part in (layer.weight, rows) if dim != 0 else (layer.weight,):
        with pytest.raises(ValueError, match='=9, and the full table has 7 rows'):
            ts.nn.functional.parallel_embedding(ids, part, num_embeddings=9)
    if dim == 0:
        with pytest.raises(ValueError, match='takes num_embeddings, .* does not know'):
            ts.nn.functional.parallel_embedding(ids, rows)
        with pytest.raises(ValueError, match='=12 rows, the shard of rank .*this weight has'):
            ts.nn.functional.parallel_embedding(ids, rows, num_embeddings=12)


def test_functions_take_the_arguments_of_torchshard():
    """In v0.8.0, they took neither `dim` nor `num_embeddings`."""
    run(2, over_groups, [1, 2], called_with, [None, 0, 1, -1])


def test_the_function_follows_the_tag_of_the_weight():
    run(2, over_groups, [1, 2], functional, [None, 0, 1, -1], [True, False])
