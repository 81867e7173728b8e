"""Collectives in place, or without a gradient."""

import pytest
import torch
import torch.distributed as dist

import torchgpipe.shard as ts
from tests.shard.processes import run
from torchgpipe.shard import collectives, distributed


def low_level():
    """Use the collectives that the functions call."""
    group, rank = ts.distributed.get_group(), ts.distributed.get_rank()
    first = ts.distributed.get_data_rank() * 2
    x = torch.full((2,), float(dist.get_rank()))
    assert collectives.all_reduce(x.clone(), group).tolist() == [2 * first + 1] * 2
    assert collectives.all_reduce(x.clone(), group, dist.ReduceOp.MAX).tolist() == [first + 1] * 2
    scattered = torch.ones(2, 3).T
    assert distributed.reduce_(scattered).equal(torch.full((3, 2), 2.0)) and scattered.sum() == 6
    packed = torch.ones(2, 3)
    assert distributed.reduce_(packed) is packed and packed.sum() == 12
    assert collectives.broadcast(x.clone(), group).tolist() == [first] * 2
    assert collectives.broadcast(x.clone(), group, 1).tolist() == [first + 1] * 2
    assert collectives.all_sizes(torch.zeros(1, 3 + rank), group, 1) == [3, 4]
    assert collectives.all_gather(x[:rank], group, 0, [0, 1]).tolist() == [first + 1]


@pytest.mark.slow
def test_collectives_of_several_groups():
    run(4, low_level, group=2)
