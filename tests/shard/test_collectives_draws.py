"""Random numbers on the ranks of a group: one rank's for all, or each rank's own."""

import torch

import torchgpipe.shard as ts
from tests.shard.processes import run
from torchgpipe.shard.world import current


def of_all(x):
    """Return a tensor of each rank of the group."""
    return [*ts.distributed.gather(x[None], 0)]


def drawn():
    """Draw with equal seeds, and with a seed of each rank."""
    rank = current().tensor_rank
    for seed, first_seed in ((7, 7), (rank, 0)):
        torch.manual_seed(first_seed)
        alone = torch.rand(2)
        torch.manual_seed(seed)
        with ts.draws(None):
            assert all(x.equal(alone) for x in of_all(torch.rand(2)))
        torch.manual_seed(seed)
        with ts.draws(-1):
            first, second = of_all(torch.rand(2))
        assert not first.equal(second)


def repeated():
    """The state of the generator decides the numbers of a shard."""
    torch.manual_seed(3)
    state = torch.get_rng_state()
    found = []
    for _ in range(2):
        torch.set_rng_state(state)
        with ts.draws(1):
            found.append(torch.rand(3))
    assert found[0].equal(found[1])
    assert not torch.get_rng_state().equal(state)  # the next operation draws other numbers


def test_ranks_draw_equal_or_different_numbers():
    run(2, drawn, group=2)


def test_a_restored_state_repeats_the_numbers_of_a_shard():
    run(2, repeated, group=2)
