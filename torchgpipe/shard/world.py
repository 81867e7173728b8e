"""The world: the processes as a mesh of replicas and parallel groups, and their end.

A thread of gloo holds a sent tensor until after it has reported the end of the operation. It may
be the last owner. To free a tensor of Python, a thread takes the interpreter's lock. If the
interpreter has ended, this ends the thread in a destructor, and the process with it: ``terminate
called without an active exception``. ``torchrun`` then reports a failure of a finished training::

    main thread        wait ── loss.item() ── the script ends ── the interpreter ends ──
    thread of gloo     done ┘ ·············· not scheduled ··············· let go ✗

``destroy_process_group`` waits for the threads of a group only where nothing else keeps it: a
DeviceMesh does, and the graph of a loss.

A row of the mesh is a parallel group, which holds one copy of the sharded layers. A column has the
replicas of one part of them. Six ranks in groups of two::

               tensor ──▶
    data   │   0   1      ◀── the parallel group of ranks 0 and 1
           ▼   2   3
               4   5
                   ▲
                   └── ranks 1, 3 and 5 hold the same shard
"""

import atexit
import time
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

#: The directory of the threads of this process. Some systems do not have it.
THREADS = Path('/proc/self/task')

#: For how many seconds the end of a process waits at most.
LIMIT = 10.0


@cache
def wait_at_exit() -> None:
    """Let this process wait for threads of gloo when it ends. Who makes groups calls this."""
    atexit.register(let_threads_finish)


def let_threads_finish() -> None:
    """Wait until no thread of gloo has anything to do, or the limit is reached.

    One that waits for the interpreter's lock does not run either, and gets it in the pause between
    two looks.
    """
    quiet = 0
    end = time.monotonic() + LIMIT
    while quiet < 2 and time.monotonic() < end:
        time.sleep(0.001)
        quiet = 0 if any(_runs(thread) for thread in THREADS.glob('*/stat')) else quiet + 1


def _runs(thread: Path) -> bool:
    """Return whether this is a thread of gloo that runs, or would if it had a core."""
    try:
        name, _, rest = thread.read_text().partition('(')[2].rpartition(')')
    except OSError:  # It has just ended.
        return False
    return name.startswith('pt_gloo') and rest.split()[0] == 'R'


#: The axes of the mesh.
AXES = ('data', 'tensor')


class World:
    """The mesh, and the place of this rank in it."""

    def __init__(self, mesh: DeviceMesh, owned_groups: tuple[ProcessGroup, ...] = ()) -> None:
        self.mesh = mesh
        self.tensor_group = mesh.get_group('tensor')
        self.data_group = mesh.get_group('data')
        self.tensor_rank = self.tensor_group.rank()
        self.tensor_size = self.tensor_group.size()
        self.data_size = self.data_group.size()
        #: The group of all processes for which the mesh was made.
        self.everyone = dist.group.WORLD
        #: The groups that were made for the mesh, and are destroyed with it.
        self.owned_groups = owned_groups
        #: Whether fused encoder layers were allowed before.
        self.fastpath = torch.backends.mha.get_fastpath_enabled()


# One for the process, as in torch.distributed, because autograd's threads also have to find it.
_world: World | None = None


def is_initialized() -> bool:
    """Return whether there are parallel groups."""
    return _world is not None and dist.group.WORLD is _world.everyone


def current() -> World:
    """Return the world of this process; raise if there are no parallel groups yet."""
    if _world is None or not is_initialized():
        raise RuntimeError(
            'there are no parallel groups: call ts.distributed.init_process_group(group_size), '
            'after torch.distributed.init_process_group, before making or calling sharded layers'
        )
    return _world


def needed_by(dim: int | None) -> World | None:
    """Return the world that a layer of this parallel dimension needs.

    A layer that is not split needs none. Without parallel groups, it behaves as the plain layer.
    """
    return None if dim is None and not is_initialized() else current()


def parse_timeout(timeout: float | timedelta) -> timedelta:
    """Return a timeout, which may be a number of seconds.

    Raises:
        TypeError: It has another type.
        ValueError: It is not above zero, or longer than a ``timedelta`` can be.
    """
    if isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        try:
            timeout = timedelta(seconds=timeout)
        except (OverflowError, ValueError):  # infinity, NaN
            raise ValueError(
                f'timeout is a finite number of seconds, but is {timeout}; leave it '
                'out for 30 minutes'
            ) from None
    if not isinstance(timeout, timedelta):
        raise TypeError(
            'timeout is a number of seconds, or a datetime.timedelta, but is a '
            f'{type(timeout).__name__}'
        )
    if timeout <= timedelta(0):
        raise ValueError(f'timeout is a time above zero, but is {timeout}')
    return timeout


def init_process_group(
    group_size: int = -1,
    *,
    mesh: DeviceMesh | None = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Split the processes of ``torch.distributed`` into parallel groups. All have to call it.

    A group has consecutive ranks and holds one copy of the sharded layers. If there are more
    processes than in one group, the groups are replicas of each other.

    Args:
        group_size: The number of processes in a group: a divisor of all, or -1 for all.
        mesh: A mesh whose groups to use. It has one axis, or an axis ``'tensor'``, along which
            layers are split. It may also have an axis ``'data'``, of replicas.
        timeout: How long a collective of the groups waits for a rank: seconds, or a
            ``timedelta``; by default as in ``torch.distributed.new_group``, half an hour with
            gloo.

    Raises:
        RuntimeError: ``torch.distributed`` is not initialized, or there are groups already.
        ValueError: The size does not divide the number of processes, or the mesh does not fit.
    """
    global _world
    if not dist.is_initialized():
        raise RuntimeError(
            'parallel groups stand on torch.distributed: call '
            'torch.distributed.init_process_group first'
        )
    if is_initialized():
        raise RuntimeError(
            'there are parallel groups already, of '
            f'{current().tensor_size}: call ts.distributed.destroy_process_group '
            'before making others'
        )
    wait_at_exit()
    limit = None if timeout is None else parse_timeout(timeout)
    _world = _make(group_size, limit) if mesh is None else _take(group_size, mesh)
    # nn.TransformerEncoderLayer would otherwise read the weights of its layers without calling
    # them, in eval mode, and treat shards as full tensors.
    torch.backends.mha.set_fastpath_enabled(False)


def destroy_process_group() -> None:
    """Destroy the parallel groups. A mesh that was passed in stays as it is.

    Raises:
        RuntimeError: There are no parallel groups.
    """
    global _world
    before = current().fastpath
    owned_groups = current().owned_groups
    _world = None
    torch.backends.mha.set_fastpath_enabled(before)
    for group in owned_groups:
        dist.destroy_process_group(group)


def _make(group_size: int, timeout: timedelta | None) -> World:
    """Split all ranks into groups of consecutive ones."""
    number = dist.get_world_size()
    size = number if group_size == -1 else group_size
    if size < 1 or number % size:
        raise ValueError(
            f'{number} processes cannot be cut into groups of {group_size}: a group size divides '
            'the number of processes, or is -1 for one group of all'
        )
    grid = torch.arange(number).view(-1, size)
    # Every rank makes all groups, in the same order, as torch.distributed requires.
    data, _ = dist.new_subgroups_by_enumeration(grid.T.tolist(), timeout=timeout)
    tensor, _ = dist.new_subgroups_by_enumeration(grid.tolist(), timeout=timeout)
    mesh = DeviceMesh.from_group([data, tensor], device_type(), grid, mesh_dim_names=AXES)
    return World(mesh, (data, tensor))


def _take(group_size: int, mesh: DeviceMesh) -> World:
    """Use the groups of an existing mesh."""
    names = ('tensor',) if mesh.ndim == 1 else mesh.mesh_dim_names or ()
    if 'tensor' not in names:
        raise ValueError(
            f"a mesh needs an axis called 'tensor', or only one; this one has "
            f'{mesh.ndim}, {mesh.mesh_dim_names}: name them by mesh_dim_names'
        )
    place = mesh.get_coordinate()
    if place is None:
        raise ValueError(f'rank {dist.get_rank()} is not in the mesh {mesh}')
    size = mesh.size(names.index('tensor'))
    if group_size not in (-1, size):
        raise ValueError(
            f'the groups of the mesh have {size} ranks, not {group_size}: leave group_size out'
        )
    if names == AXES:
        return World(mesh)
    grid = mesh.mesh[tuple(slice(None) if name in AXES else i for name, i in zip(names, place))]
    tensor = mesh.get_group(names.index('tensor'))
    owned_groups: tuple[ProcessGroup, ...] = ()
    if 'data' in names:
        grid = grid if names.index('data') < names.index('tensor') else grid.T
        data = mesh.get_group(names.index('data'))
    else:
        grid = grid.view(1, -1)
        data = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        owned_groups = (data,)
    grid_mesh = DeviceMesh.from_group([data, tensor], mesh.device_type, grid, mesh_dim_names=AXES)
    return World(grid_mesh, owned_groups)


def device_type() -> str:
    """Return the type of the devices on which processes exchange tensors."""
    accelerator = torch.accelerator.current_accelerator()
    backends = dict(pair.split(':') for pair in dist.get_backend_config().split(','))
    if accelerator is None or backends.get(accelerator.type, 'gloo') == 'gloo':
        return 'cpu'
    return accelerator.type


# --- this rank's place
# ----------------------------------------------------------------------------------


def get_group() -> ProcessGroup:
    """Return this rank's parallel group."""
    return current().tensor_group


def get_group_size() -> int:
    """Return the number of ranks in a parallel group."""
    return current().tensor_size


def get_rank() -> int:
    """Return this rank's number within its parallel group."""
    return current().tensor_rank


def get_world_size() -> int:
    """Return the number of all processes."""
    return dist.get_world_size()


def get_mesh() -> DeviceMesh:
    """Return the mesh of all ranks, with the axes ``'data'`` and ``'tensor'``."""
    return current().mesh


def get_data_group() -> ProcessGroup:
    """Return the group of the ranks that hold the same shard as this one, in each replica."""
    return current().data_group


def get_data_rank() -> int:
    """Return the number of the replica that this rank belongs to."""
    return current().data_group.rank()
