"""Clipping: the norm and the gradients of one process, for any order of the norm."""

import pytest
import torch
from torch import nn

import torchgpipe.shard as ts
from tests.shard.plain import close, give_gradients, gradients, pair, whole_gradients
from tests.shard.processes import run

INF = float('inf')


def make(linear, embedding):
    """Return layers, whole, row parallel and column parallel; shards are uneven or empty."""
    return nn.Sequential(
        embedding(7, 5, dim=0),
        nn.Linear(5, 5),
        linear(5, 3, dim=1),
        nn.Tanh(),
        linear(3, 5, dim=0),
    )


def clip_all():
    """Clip by norms of all orders, and compare with one process."""
    plain, sharded = pair(make)
    for norm_type in (2.0, 1.0, INF, 3.5, 0.0, -1.0, 'inf'):
        for max_norm in (0.1, 1e6):
            give_gradients(plain, sharded)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
            norm = ts.clip_grad_norm_(sharded.parameters(), max_norm, norm_type)
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
            close(whole_gradients(sharded), gradients(plain))
    return norm.item()


def clip_some():
    """Leave gradients out, give parameters twice, one alone, and none."""
    plain, sharded = pair(make)
    for module in (plain, sharded):
        module[4].weight.grad = module[4].bias.grad = None
    give_gradients(plain, sharded)
    for module in (plain, sharded):
        module[1].weight.grad = module[0].weight.grad = None
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    norm = ts.clip_grad_norm_([*sharded.parameters()] * 2, 0.5, foreach=False)
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(sharded[1].bias.grad, plain[1].bias.grad, rtol=1e-12, atol=0)
    one = ts.clip_grad_norm_(sharded[2].weight, 0.01)
    torch.testing.assert_close(one, nn.utils.clip_grad_norm_(plain[2].weight, 0.01))
    assert ts.clip_grad_norm_(sharded[0].weight, 1.0) == 0
    with pytest.warns(UserWarning, match='empty generator'):
        assert ts.clip_grad_norm_((p for p in ()), 1.0) == 0


def clip_half():
    """Return a norm of the type that one process gives."""
    plain, sharded = pair(make)
    plain, sharded = plain.half(), sharded.half()
    give_gradients(plain, sharded)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    norm = ts.clip_grad_norm_(sharded.parameters(), 1.0)
    assert norm.dtype == expected.dtype == torch.half
    torch.testing.assert_close(norm, expected)


def clip_nonfinite():
    """Have a gradient on one rank only that is not finite."""
    plain, sharded = pair(make)
    for bad in (INF, float('nan')):
        give_gradients(plain, sharded)
        if ts.distributed.get_rank() == 0:
            sharded[0].weight.grad[0, 0] = bad
        with pytest.raises(RuntimeError, match='non-finite'):
            ts.clip_grad_norm_(sharded.parameters(), 1.0, error_if_nonfinite=True)
        assert not ts.clip_grad_norm_(sharded.parameters(), 1.0).isfinite()


def clip_what_differs():
    """Have other last bits in a whole gradient on each rank, as devices may give them."""
    plain, sharded = pair(make)
    give_gradients(plain, sharded)
    sharded[1].weight.grad += 1e-9 * ts.distributed.get_rank()
    return ts.clip_grad_norm_(sharded.parameters(), 1.0).item()


def everything():
    """Do all of it, in one start of processes."""
    clip_some()
    clip_half()
    clip_nonfinite()
    return clip_all(), clip_what_differs()


@pytest.mark.parametrize('world, group', [(2, 1), (4, 2), (4, 4)])
def test_clip_grad_norm_over_local_shards_equals_one_process_on_all_ranks(world, group):
    """In TorchShard 0.1.0, it differed from rank to rank, so replicas diverged."""
    norms = run(world, everything, group=group)
    assert all(norm == norms[rank // group * group] for rank, norm in enumerate(norms))


def test_without_shards_it_is_the_one_of_pytorch():
    """No parallel groups are needed, as nothing is communicated."""
    layer = nn.Linear(3, 3)
    layer.weight.grad = torch.ones(3, 3)
    assert ts.clip_grad_norm_(layer.parameters(), 1.0) == 3
    assert layer.weight.grad.norm() < 1
