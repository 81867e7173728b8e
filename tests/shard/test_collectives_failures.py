"""A rank that raises: the others end, with an error that names it."""

import datetime

import pytest
import torch
import torch.distributed as dist

import torchgpipe.shard as ts
from tests.shard.processes import Failure, outcomes, run
from torchgpipe.shard import collectives


class Raises(torch.autograd.Function):
    """Raise in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError('in backward')


def fails(where, who):
    """Take some steps, in which a rank raises."""
    collectives.GRACE = datetime.timedelta(seconds=3)
    ts.distributed.init_process_group(timeout=datetime.timedelta(seconds=60))
    for step in range(3):
        x = torch.ones(8, requires_grad=True)
        y = ts.distributed.reduce(ts.distributed.scatter(x))
        if step and dist.get_rank() == who:
            if where == 'forward':
                raise KeyError('in forward')
            y = Raises.apply(y)
        y = ts.distributed.gather(y)
        y.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize('where, who', [('forward', 3), ('backward', 0)])
def test_the_others_name_the_rank_that_raises(where, who):
    found = outcomes(4, fails, where, who)
    assert all(isinstance(each, Failure) for each in found)
    for rank, failure in enumerate(found):
        if rank == who:
            assert f'in {where}' in failure.text
        else:
            assert f'failed on rank {rank}: rank {who} did not take part' in failure.text


class Fails:
    """Work that fails at once."""

    def wait(self, timeout):
        raise RuntimeError('as on all ranks')

    def is_completed(self):
        return True


class Slow:
    """Work that takes long."""

    waits = 3

    def wait(self, timeout):
        self.waits -= 1
        if self.waits:
            raise RuntimeError('it takes longer')

    def is_completed(self):
        return False


def together():
    """Fail on all ranks, and go on."""
    group = ts.distributed.get_group()
    for _ in range(2):
        with pytest.raises(RuntimeError, match='on all others') as caught:
            collectives.complete(Fails, group, True)
        assert 'as on all ranks' in str(caught.value.__cause__)
        collectives.complete(Slow, group, True)
        assert ts.distributed.reduce(torch.ones(1)) == 2
    with pytest.raises(RuntimeError, match='^at the start$'):
        collectives.complete(start_fails, group, True)


def start_fails():
    """Do not even start."""
    raise RuntimeError('at the start')


@pytest.mark.slow
def test_a_failure_of_all_ranks_is_over_when_they_go_on():
    run(2, together, group=2)


def absent():
    """Keep away from a collective, and live on."""
    collectives.GRACE = datetime.timedelta(seconds=1)
    ts.distributed.init_process_group(timeout=datetime.timedelta(seconds=2))
    if dist.get_rank() == 1:
        store = dist.distributed_c10d._get_default_store()
        store.wait(['done'], datetime.timedelta(seconds=60))
        return 'lives'
    try:
        ts.distributed.reduce(torch.ones(1))
    finally:
        dist.distributed_c10d._get_default_store().set('done', '')


@pytest.mark.slow
def test_a_rank_that_keeps_away_is_named_after_the_timeout():
    failure, lives = outcomes(2, absent)
    assert 'rank 1 did not take part' in failure.text and lives == 'lives'
