"""Parallel groups: make them, ask for this rank's place in them, and move tensors within one."""
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torchgpipe.shard import world
from torchgpipe.shard.collectives import copy, gather, reduce, scatter
from torchgpipe.shard.world import is_initialized

__all__ = ['copy', 'destroy_process_group', 'gather', 'get_data_group', 'get_data_rank',
           'get_group', 'get_group_size', 'get_mesh', 'get_rank', 'get_world_size',
           'init_process_group', 'is_initialized', 'reduce', 'scatter']


def init_process_group(group_size: int = -1, *, mesh: DeviceMesh | None = None,
                       timeout: timedelta | None = None) -> None:
    """Cut the processes of ``torch.distributed`` into parallel groups. All have to call it.

    A group is made of consecutive ranks and holds one copy of the sharded layers. If there are
    more processes than that, the groups are replicas of each other.

    Args:
        group_size: How many processes a group has: a divisor of their number, or -1 for all.
        mesh: Use its groups: it has one axis, or one that is called ``'tensor'``, along which
            layers are split, and possibly one that is called ``'data'``, of replicas.
        timeout: For how long a collective of the groups waits for a rank; by default as
            ``torch.distributed.new_group`` has it, half an hour with gloo.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialised, or there are groups already.
        ValueError: The size does not divide the number of processes, or the mesh does not fit.
    """
    world.init(group_size, mesh, timeout)


def destroy_process_group() -> None:
    """Forget the parallel groups. A mesh that was handed over stays as it is.

    Raises:
        RuntimeError: There are none.
    """
    world.destroy()


def get_group() -> ProcessGroup:
    """Return this rank's parallel group."""
    return world.current().tensor_group


def get_group_size() -> int:
    """Return the number of ranks in a parallel group."""
    return world.current().tensor_size


def get_rank() -> int:
    """Return this rank's number within its parallel group."""
    return world.current().tensor_rank


def get_world_size() -> int:
    """Return the number of all processes."""
    return dist.get_world_size()


def get_mesh() -> DeviceMesh:
    """Return the mesh of all ranks, with the axes ``'data'`` and ``'tensor'``."""
    return world.current().mesh


def get_data_group() -> ProcessGroup:
    """Return the group of the ranks that hold the same part as this one, in each replica."""
    return world.current().data_group


def get_data_rank() -> int:
    """Return the number of the replica that this rank belongs to."""
    return world.current().data_rank
