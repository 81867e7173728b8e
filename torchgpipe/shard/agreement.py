"""Agreement: what fails on one rank of a group is raised on all of them, and the rank is named.

::

    rank 0              rank 1                 rank 2
    works               raises                 works
      └── did you fail? ──┴── yes, and why ──────┘      all ranks come here
    raises: rank 1      raises what it raised  raises: rank 1

Without it, the others would wait in their next collective for a rank that never comes there.
"""
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from torchgpipe.shard import world
from torchgpipe.shard.collectives import all_reduce

__all__ = ['agreed', 'same_everywhere']


@contextmanager
def agreed(what: str, group: ProcessGroup | None = None) -> Iterator[None]:
    """Raise on all ranks of a group if one of them raises within, where nobody communicates.

    Args:
        what: What is being done, for the message.
        group: The ranks that do it; those of the parallel group if not given.

    Raises:
        RuntimeError: Another rank has raised; it names the rank and says what it raised.
    """
    group = group or world.current().tensor_group
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:  # An interrupt, too: the others would wait for this rank.
        error = raised
    reasons = _reasons(error, group)
    if error is not None:
        raise error
    for rank, reason in zip(dist.get_process_group_ranks(group), reasons):
        if reason is not None:
            raise RuntimeError(f'{what} failed on rank {rank}, so it ended here, too: {reason}')


def same_everywhere(what: str, values: list[Any]) -> None:
    """See that all ranks of the parallel group have the same.

    Args:
        what: What it is, for the message.
        values: What can be compared and pickled.

    Raises:
        RuntimeError: On all ranks: a rank has something else than the first one.
    """
    group = world.current().tensor_group
    ranks = dist.get_process_group_ranks(group)
    first, *others = _gathered(values, group)
    for rank, other in zip(ranks[1:], others):
        if other != first:
            raise RuntimeError(
                f'{what} are not the same on all ranks of the group {ranks}: rank {ranks[0]} has '
                f'{_other(first, other)}, rank {rank} {_other(other, first)}. Let all ranks of a '
                'group call this for the same model')


def _reasons(error: BaseException | None, group: ProcessGroup) -> list[str | None]:
    """Say whether this rank failed, and why; give why other ranks did."""
    failed = torch.tensor(float(error is not None), device=world.current().mesh.device_type)
    if not all_reduce(failed, group, dist.ReduceOp.MAX):
        return []
    return _gathered(None if error is None else f'{type(error).__name__}: {error}', group)


def _gathered(value: Any, group: ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _other(these: list[Any], those: list[Any]) -> str:
    """Name the first of these that is not among those."""
    return next((repr(one) for one in these if one not in those), 'nothing of the kind')
