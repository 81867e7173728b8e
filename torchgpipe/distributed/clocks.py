"""Clocks of ranks: the actions of all ranks in the time of the first one.

The offset of a rank's clock results from one exchange::

    first rank     asks at t0                 has the answer at t1
    other rank                 answers: now                          now − (t0 + t1) / 2
"""

import time

import torch
import torch.distributed as dist

from torchgpipe.schedule import Timed
from torchgpipe.shard.collectives import gathered

#: How often each clock is read; the answer with the shortest round trip counts.
READS = 8


def merge(
    actions: list[Timed], began: float, group: dist.ProcessGroup | None, device: torch.device
) -> list[Timed]:
    """Return the actions of all ranks of a group, in seconds of the first one's clock.

    Args:
        actions: The actions of this rank, in seconds since a recording began.
        began: The time when the recording began, by this rank's clock.
        group: The ranks; lanes are in their order.
    """
    if group is None:
        return actions
    began -= _offset(group, device)
    shifted = []
    for timed in actions:
        start = timed.start + began
        end = timed.end + began
        shifted.append(timed._replace(device=group.rank(), start=start, end=end))
    by_rank: list[list[Timed]] = gathered(shifted, group)
    return sum(by_rank, [])


def _offset(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return by how much this rank's clock is ahead of the first one's, in seconds."""
    this_rank = dist.get_rank()
    first, *later = dist.get_process_group_ranks(group)
    now = torch.zeros((), dtype=torch.float64, device=device)
    for rank in later:
        if this_rank == first:
            dist.send(now.fill_(_offset_of(rank, group, now)), rank, group)
        elif this_rank == rank:
            for _ in range(READS):
                dist.recv(now, first, group)
                dist.send(now.fill_(time.perf_counter()), first, group)
            dist.recv(now, first, group)
    return 0.0 if this_rank == first else now.item()


def _offset_of(rank: int, group: dist.ProcessGroup, now: torch.Tensor) -> float:
    """Return by how much a rank's clock is ahead of this one, the first."""
    shortest = float('inf')
    offset = 0.0
    for _ in range(READS):
        start = time.perf_counter()
        dist.send(now, rank, group)
        dist.recv(now, rank, group)
        end = time.perf_counter()
        if end - start < shortest:
            shortest = end - start
            offset = now.item() - (start + end) / 2
    return offset
