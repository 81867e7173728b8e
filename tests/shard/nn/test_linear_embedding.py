"""Embeddings, compared with one process."""

import copy

import pytest
import torch
from torch import nn

import torchgpipe.shard as ts
from tests.marks import slow
from tests.shard.nn.oracle import (
    close,
    cut,
    double,
    over_groups,
    same_gradients,
    same_parameters,
    same_start,
)
from tests.shard.processes import run
from torchgpipe.shard.parameter import is_tagged

OPTIONS = [
    {},
    {'padding_idx': 0},
    {'padding_idx': 3},
    {'padding_idx': -1},
    {'max_norm': 0.8},
    {'max_norm': 0.8, 'norm_type': 1.0},
    {'max_norm': 0.3, 'norm_type': 0.0},
    {'max_norm': 0.8, 'norm_type': float('inf'), 'padding_idx': -3},
    {'scale_grad_by_freq': True},
    {'scale_grad_by_freq': True, 'padding_idx': -2},
    {'sparse': True},
    {'sparse': True, 'padding_idx': 1},
    {'max_norm': 0.5, 'scale_grad_by_freq': True},
]


def ids_of(number):
    """Draw numbers of rows, some of them several times, and some not at all."""
    return torch.randint(number, (2, 3 * number // 4))


def same_as_plain(number, features, dim, options):
    """Compare initial values, outputs, changes of the table, and gradients."""
    plain, table = same_start(
        lambda: nn.Embedding(number, features, **options, dtype=torch.double),
        lambda: ts.nn.ParallelEmbedding(number, features, **options, dim=dim, dtype=torch.double),
    )
    assert table.padding_idx == plain.padding_idx
    ids = ids_of(number)
    function = copy.deepcopy(table)
    for forward, module in [
        (table, table),
        (
            lambda ids: ts.nn.functional.parallel_embedding(ids, function.weight, **options),
            function,
        ),
    ]:
        expected_table = copy.deepcopy(plain)
        for each in (ids, ids[0], ids[:, :0], ids[0, 0]):
            expected, found = expected_table(each), forward(each)
            close(found, expected)
            assert is_tagged(found) and ts.get_parallel_dim(found) is None
            if not each.dim():
                continue  # the plain one has no gradient with some options
            grad = double(*expected.shape)
            expected.backward(grad)
            found.backward(grad)
        same_gradients(expected_table, module)
        torch.testing.assert_close(
            module.weight,
            cut(expected_table.weight, {0: 0, 1: 1, None: None}[dim]),
            rtol=1e-12,
            atol=1e-12,
            check_stride=False,
        )
    assert not is_tagged(ids)


@pytest.mark.parametrize(
    'world, groups, sizes',
    [(2, [2], [(31, 5)]), slow(4, [2, 4], [(7, 3)]), slow(4, [1, 4], [(5, 7)])],
)
def test_results_equal_one_process(world, groups, sizes):
    run(world, over_sizes, groups, sizes)


def over_sizes(groups, sizes):
    """Check with each option."""
    for number, features in sizes:
        over_groups(groups, same_as_plain, [number], [features], [None, 0, 1], OPTIONS)


def converts(dim, options):
    """Compare a converted table with the original."""
    plain = nn.Embedding(7, 5, **options, dtype=torch.double).eval()
    plain.weight.requires_grad_('sparse' not in options)
    table = ts.nn.ParallelEmbedding.convert_parallel_embedding(plain, dim)
    same_parameters(plain, table)
    assert not table.training and table.dim == dim and not is_tagged(plain.weight)
    assert str(table) == str(plain).replace('Embedding(', 'ParallelEmbedding(').replace(
        ')', f', dim={dim})'
    )
    ids = ids_of(7)
    close(table(ids), plain(ids))


def test_conversion_keeps_the_options():
    run(2, over_groups, [1, 2], converts, [None, 0, 1, -1], OPTIONS)


def given(dim):
    """Start from a table that is there."""
    weight = double(7, 5)
    before = weight.clone()
    table = ts.nn.ParallelEmbedding(7, 5, _weight=weight, dim=dim)
    assert table.weight.equal(cut(weight, dim)) and weight.equal(before) and not is_tagged(weight)
    assert table.weight.requires_grad
    with pytest.raises(ValueError, match=r'of shape \(7, 5\), and not of \(5, 7\)'):
        ts.nn.ParallelEmbedding(7, 5, _weight=weight.T, dim=dim)
    rows = table(torch.arange(7))
    close(rows, weight)


def test_a_table_that_is_given():
    run(2, over_groups, [1, 2], given, [None, 0, 1])


def refuses(dim):
    """Look up rows that do not exist."""
    table = ts.nn.ParallelEmbedding(7, 5, dim=dim)
    for wrong in (7, -1, 100):
        with pytest.raises(IndexError, match=f'^{wrong} is not .* 7' if dim == 0 else None):
            table(torch.tensor([0, wrong, 6]))
    for padding_idx in (7, -8):
        with pytest.raises(ValueError, match=f'less than 7, not {padding_idx}'):
            ts.nn.ParallelEmbedding(7, 5, padding_idx, dim=dim)
    for wrong in (2, -2):
        with pytest.raises(ValueError, match='None, 0, 1 or -1'):
            ts.nn.ParallelEmbedding(7, 5, dim=wrong)
        with pytest.raises(ValueError, match='None, 0, 1 or -1'):
            ts.nn.ParallelEmbedding.convert_parallel_embedding(nn.Embedding(7, 5), wrong)


def test_wrong_numbers_raise():
    run(2, over_groups, [2], refuses, [None, 0, 1])


def meta(dim):
    """Make a table without memory; then give it memory, and values."""
    table = ts.nn.ParallelEmbedding(7, 5, 3, dim=dim, device='meta')
    assert table.weight.is_meta
    table.to_empty(device='cpu')
    same_start(lambda: nn.Embedding(7, 5, 3), lambda: [table.reset_parameters(), table][1])


def test_the_meta_device():
    run(2, over_groups, [2], meta, [None, 0, 1])
