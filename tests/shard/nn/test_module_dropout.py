"""Dropout: one mask where activations are whole, others where they are not; and again the same."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import torchgpipe.shard as ts
from tests.shard.processes import run
from torchgpipe.shard.parameter import is_tagged


def tagged(dim, *shape):
    """Return ones."""
    return ts.nn.RegisterParallelDim(dim)(torch.ones(*shape, requires_grad=True))


def each(x):
    """Return the tensors of all ranks."""
    return ts.distributed.gather(x.detach()[None], 0)


def differ(masks):
    """Return whether all are different."""
    return all(not a.equal(b) for i, a in enumerate(masks) for b in masks[:i])


def masks(seed):
    """Look at masks, after a seed that is the same on all ranks, or is not."""
    rank, n = ts.distributed.get_rank(), ts.distributed.get_group_size()
    seed += rank if seed else 0
    layer = ts.nn.ParallelDropout(0.25)
    torch.manual_seed(seed)
    whole = [layer(tagged(None, 8, 50)), ts.nn.ParallelDropout(0.25, dim=None)(torch.ones(8, 50))]
    part = torch.ones(8, 50 + rank)
    parts = [layer(tagged(-1, 8, 50 + rank)), ts.nn.ParallelDropout(0.25, dim=-1)(part)]
    after = torch.rand(1)
    assert [ts.get_parallel_dim(x) for x in (*whole, *parts)] == [None, None, -1, -1]
    for x in whole:
        assert each(x).std(0).max() == 0 and x.unique().equal(torch.tensor([0, 1 / 0.75]))
    assert not whole[0].equal(whole[1])
    assert differ([x for part in parts for x in each(part[:, :50])])
    # After the first rank's seed, they equal one process's masks.
    torch.manual_seed(seed - rank if seed else 0)
    assert whole[0].equal(nn.Dropout(0.25)(torch.ones(8, 50)))
    # After the same seed, they are the same again, and so is the next number.
    torch.manual_seed(seed)
    again = [layer(tagged(None, 8, 50)) for _ in range(2)] + [
        layer(tagged(-1, 8, 50 + rank)) for _ in range(2)
    ]
    assert all(map(torch.equal, again, [*whole, *parts])) and torch.rand(1).equal(after)
    if not seed:
        assert each(after).std(0) == 0 or n == 1  # ranks stay together


@pytest.mark.parametrize('seed', [0, 5])
def test_masks(seed):
    run(4, masks, seed, group=4)


def recomputed():
    """Go through a checkpoint."""
    torch.manual_seed(3)
    for dim in (None, -1):
        layer = ts.nn.ParallelDropout(dim=dim)
        x = torch.randn(4, 10, requires_grad=True)
        seen = []

        def forward(x):
            seen.append(layer(x))
            return seen[-1] * 3

        with set_checkpoint_early_stop(False):
            y = checkpoint(forward, x, use_reentrant=False)
            torch.rand(5)
            y.sum().backward()
        assert len(seen) == 2 and seen[0].equal(seen[1])
        torch.testing.assert_close(x.grad * x / 3, seen[0])


def test_a_recomputation_draws_the_same():
    run(2, recomputed, group=2)


def like_plain():
    """Compare a group of one, evaluation, and the ends of the range with the plain layer."""
    for p in (0.0, 0.3, 1.0):
        for dim in (None, -1):
            for training in (True, False):
                x = torch.randn(5, 5)
                torch.manual_seed(1)
                expected = nn.Dropout(p).train(training)(x)
                torch.manual_seed(1)
                found = ts.nn.ParallelDropout(p, dim=dim).train(training)(x)
                assert found.equal(expected) and not is_tagged(x) and is_tagged(found)
    x = torch.ones(100)
    assert ts.nn.ParallelDropout(inplace=True, dim=None)(x).equal(x) and x.min() == 0


def test_a_group_of_one_has_the_plain_layer():
    run(1, like_plain, group=1)


def no_communication():
    """Call it on one rank alone, where nothing is drawn."""
    if ts.distributed.get_rank() == 0:
        for layer in (
            ts.nn.ParallelDropout(0.0),
            ts.nn.ParallelDropout().eval(),
            ts.nn.ParallelDropout(1.0),
        ):
            layer(tagged(None, 2))


def test_ranks_need_not_meet_where_nothing_is_drawn():
    run(2, no_communication, group=2)


def attention():
    """Let each rank drop out other weights of its own heads."""
    q = torch.ones(1, 2, 16, 4)
    with ts.draws(1):
        y = nn.functional.scaled_dot_product_attention(
            q, q, torch.randn(1, 2, 16, 4), dropout_p=0.5
        )
    assert differ(each(y))
    with torch.device('meta'), ts.draws(-1):  # the seed is drawn on the CPU
        pass
    with ts.draws(None):
        assert each(torch.rand(4)).std(0).max() == 0
    before = torch.get_rng_state()
    with pytest.raises(KeyError), ts.draws(-1):
        torch.rand(4)
        raise KeyError
    torch.randint(2, ())
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.randint(2**62, ()), torch.randint(2, ())
    assert torch.get_rng_state().equal(after)
    for wrong in (2, -2):
        with pytest.raises(ValueError, match='None, 0, 1 or -1'), ts.draws(wrong):
            pass


def test_draws_around_other_operations():
    run(2, attention, group=2)


def test_in_evaluation_no_tag_is_needed_and_none_given():
    x, layer = torch.ones(2), ts.nn.ParallelDropout().eval()
    assert layer(x).equal(x) and not is_tagged(layer(x))


def test_wrong_use_raises():
    with pytest.raises(ValueError, match=r'ParallelDropout\(p=0.5.*RegisterParallelDim'):
        ts.nn.ParallelDropout()(torch.ones(2))
    with pytest.raises(ValueError, match='from 0 to 1, not 2'):
        ts.nn.ParallelDropout(2)
    for dim in (2, 'last'):
        with pytest.raises(ValueError, match='None, 0, 1 or -1'):
            ts.nn.ParallelDropout(dim=dim)
