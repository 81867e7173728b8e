"""Timelines of several ranks, by one clock."""

import time

import torch
from torch.nn import functional as F

from tests.distributed.models import batch, unet
from tests.shard.processes import run
from torchgpipe.distributed import DistributedGPipe, clocks, init_mesh
from torchgpipe.timeline import record


def recorded(shift):
    """Record a step, on clocks that differ by some seconds."""
    now, rank = time.perf_counter, torch.distributed.get_rank()
    time.perf_counter = lambda: now() + shift * rank
    model = DistributedGPipe(unet(), [2] * 4, mesh=init_mesh(pipe=2), chunks=2)
    model.step(*batch(0, 8), F.mse_loss, schedule='interleaved')
    with record(model) as timeline:
        model.step(*batch(0, 8), F.mse_loss, schedule='interleaved')
    return timeline.devices, timeline.actions


def test_all_ranks_get_the_lanes_of_all_and_causes_come_first():
    (devices, actions), (others, same) = run(2, recorded, 1000.0)
    assert devices == others == ('rank 0', 'rank 1') and actions == same
    ends = {str(timed.action): timed.end for timed in actions}
    starts = {str(timed.action): timed.start for timed in actions}
    assert {timed.device for timed in actions} == {0, 1}
    for i in range(2):
        for stage in range(3):
            assert ends[f'{stage}F{i}'] <= starts[f'{stage + 1}F{i}'] + 0.001
            assert ends[f'{stage + 1}B{i}'] <= starts[f'{stage}B{i}'] + 0.001
    assert max(ends.values()) < 100


def recorded_alone():
    """Record a step on the first rank only."""
    model = DistributedGPipe(unet(), [2] * 4, mesh=init_mesh(pipe=2), chunks=2)
    if torch.distributed.get_rank():
        model.step(*batch(0, 8), F.mse_loss, schedule='interleaved')
        return None
    with record(model, merge=False) as timeline:
        model.step(*batch(0, 8), F.mse_loss, schedule='interleaved')
    return timeline.devices, {str(timed.action) for timed in timeline.actions}


def test_a_rank_records_its_own_lane_without_the_others():
    (devices, actions), _ = run(2, recorded_alone)
    assert devices == ('cpu:0',)
    assert actions == {f'{j}{kind}{i}' for j in (0, 2) for kind in 'FB' for i in range(2)} | {
        f'{j}R0' for j in (0, 2)
    }


def test_one_rank_has_its_own_clock():
    assert clocks.merge([], 3.0, None, torch.device('cpu')) == []
