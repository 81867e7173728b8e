"""Clock offsets between ranks.

::

    first rank     asks at t0                 has the answer at t1
    other rank                 answers: now                          now − (t0 + t1) / 2
"""
import time

import torch
import torch.distributed as dist

from torchgpipe.schedule import Timed
from torchgpipe.shard.failures import gathered

__all__ = ['merge']

#: How often each clock is read; the answer with the shortest round trip counts.
ASKED = 8


def merge(actions: list[Timed], began: float, group: dist.ProcessGroup | None,
          device: torch.device) -> list[Timed]:
    """Return the actions of all ranks of a group, in seconds of the first one's clock.

    Args:
        actions: The actions of this rank, in seconds since a recording began.
        began: The time when the recording began, by this rank's clock.
        group: The ranks; lanes are in their order.
        device: The device of this rank.
    """
    if group is None:
        return actions
    began -= _ahead(group, device)
    found: list[list[Timed]] = gathered([
        timed._replace(device=group.rank(), start=timed.start + began, end=timed.end + began)
        for timed in actions], group)
    return sum(found, [])


def _ahead(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return by how much this rank's clock is ahead of the first one's."""
    first, *others = dist.get_process_group_ranks(group)
    now = torch.zeros((), dtype=torch.float64, device=device)
    for rank in others:
        best = float('inf'), 0.
        for _ in range(ASKED):
            if dist.get_rank() == first:
                start = time.perf_counter()
                dist.send(now, rank, group)
                dist.recv(now, rank, group)
                end = time.perf_counter()
                best = min(best, (end - start, now.item() - (start + end) / 2))
            elif dist.get_rank() == rank:
                dist.recv(now, first, group)
                dist.send(now.fill_(time.perf_counter()), first, group)
        if dist.get_rank() == first:
            dist.send(now.fill_(best[1]), rank, group)
        elif dist.get_rank() == rank:
            dist.recv(now, first, group)
    return 0. if dist.get_rank() == first else now.item()
