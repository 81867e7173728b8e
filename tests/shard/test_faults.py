"""Faults of TorchShard 0.1.0 without a test in another file, by their names.

Faults of the cross entropy are tested in nn/test_loss.py, faults of memory in nn/test_init.py, and
faults of the norm of gradients in test_clipping.py. Faults of DistributedDataParallel are tested
in test_replicas.py, and faults of state dicts in test_state.py and test_checkpoint.py.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchgpipe.shard as ts
from tests.shard.processes import run


def trained(features, classes):
    """Compare the loss and gradients of a split embedding and two linear layers to one process."""
    double = {'dtype': torch.double}
    torch.manual_seed(1)
    plain = nn.Sequential(
        nn.Embedding(classes, features, **double),
        nn.Linear(features, features, **double),
        nn.Linear(features, classes, **double),
    )
    torch.manual_seed(1)
    model = nn.Sequential(
        ts.nn.ParallelEmbedding(classes, features, dim=0, **double),
        ts.nn.ParallelLinear(features, features, dim=0, **double),
        ts.nn.ParallelLinear(features, classes, dim=1, **double),
    )
    x, y = torch.arange(2 * classes) % classes, torch.arange(2 * classes) // 2
    expected = F.cross_entropy(plain(x), y)
    expected.backward()
    loss = ts.nn.functional.parallel_cross_entropy(model(x), y)
    loss.backward()
    assert abs(loss.item() - expected.item()) < 1e-12
    for one, other in zip(model.parameters(), plain.parameters()):
        whole = ts.dtensor(one, one.grad).full_tensor()
        assert (whole - other.grad).abs().max() < 1e-12


@pytest.mark.slow
def test_group_size_below_world_size():
    run(4, trained, 6, 8, group=2)


@pytest.mark.parametrize('features, classes', [(5, 7), (3, 31)])
def test_sizes_that_the_group_does_not_divide(features, classes):
    run(2, trained, features, classes, group=2)
    run(4, trained, features, classes, group=4)


def lost():
    """Lose a tag in front of a layer and of a loss."""
    up, down = ts.nn.ParallelLinear(6, 8, dim=1), ts.nn.ParallelLinear(8, 6, dim=0)
    with pytest.raises(
        ValueError,
        match=r'ParallelLinear\(in_features=8, out_features=6.*'
        r'ts.nn.RegisterParallelDim\(-1\)',
    ):
        down(up(torch.rand(2, 6)).relu())
    with pytest.raises(RuntimeError, match=r'ts.nn.RegisterParallelDim\(-1\) before the loss'):
        ts.nn.functional.parallel_cross_entropy(up(torch.rand(2, 6)) * 2, torch.tensor([0, 1]))


def test_the_tag_is_lost_by_any_operation():
    run(2, lost, group=2)


def rows():
    """Look up rows of a table whose padding is not in the first shard, with a largest norm."""
    torch.manual_seed(1)
    plain = nn.Embedding(7, 4, padding_idx=6, max_norm=1.0, dtype=torch.double)
    model = ts.nn.ParallelEmbedding.convert_parallel_embedding(plain, dim=0)
    assert (model.padding_idx, model.max_norm) == (6, 1.0)
    x = torch.tensor([[0, 6, 3], [6, 5, 0]])
    for each in (plain, model):
        each(x).square().sum().backward()
    assert torch.equal(ts.dtensor(model.weight).full_tensor(), plain.weight)
    whole = ts.dtensor(model.weight, model.weight.grad).full_tensor()
    assert (whole - plain.weight.grad).abs().max() < 1e-12 and not whole[6].any()


def test_padding_idx_outside_the_first_shard_max_norm_and_conversion_with_dim_0():
    run(2, rows, group=2)


def values():
    """Make a layer where the seeds of ranks differ, and return its whole weight."""
    torch.manual_seed(ts.distributed.get_rank())
    return ts.dtensor(ts.nn.ParallelLinear(5, 7, dim=1).weight).full_tensor()


def test_initialisation_differs_by_rank_unless_all_seeds_agree():
    torch.manual_seed(0)
    expected = nn.Linear(5, 7).weight
    for found in run(2, values, group=2):
        assert torch.equal(found, expected)


def masks(seed):
    """Return masks of a whole activation and of a part of one."""
    torch.manual_seed(seed)
    x = torch.ones(64, dtype=torch.double)
    return [ts.nn.ParallelDropout(0.5, dim=dim)(x) for dim in (None, -1)]


def test_dropout_draws_the_same_or_different_masks_by_luck():
    (whole, part), (same, other) = run(2, masks, 1, group=2)
    assert torch.equal(whole, same) and not torch.equal(part, other)
    (again, part_again), _ = run(2, masks, 1, group=2)
    assert torch.equal(whole, again) and torch.equal(part, part_again)
