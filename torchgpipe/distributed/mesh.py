"""The mesh: data replicas × pipeline stages × tensor shards, one process each.

By default::

    data 0    pipe 0    tensor 0, 1        ranks 0, 1
              pipe 1    tensor 0, 1        ranks 2, 3
    data 1    pipe 0    tensor 0, 1        ranks 4, 5
              pipe 1    tensor 0, 1        ranks 6, 7

The ranks of a tensor axis send each other most, so they are next to each other.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from torchgpipe.base.devices import CPU, accelerator, current_device, is_cpu
from torchgpipe.base.private import has_backend, timeout_of
from torchgpipe.base.settings import AXES, check_axes
from torchgpipe.engine.partition import named_slots
from torchgpipe.shard.collectives import gathered
from torchgpipe.shard.world import parse_timeout, wait_at_exit


class Axis(NamedTuple):
    """An axis of a mesh, as one rank sees it: the ranks that differ from it along that axis only.

    Args:
        group: The group of these ranks; ``None`` if there are no others.
        mesh: The mesh of only these ranks; ``None`` if there are no others.
    """

    name: str
    size: int
    rank: int
    group: ProcessGroup | None
    mesh: DeviceMesh | None

    @property
    def ranks(self) -> list[int]:
        """Their numbers among all processes."""
        if self.group is None:
            return [dist.get_rank()]
        return dist.get_process_group_ranks(self.group)


def init_mesh(
    data: int = 1,
    pipe: int = 1,
    tensor: int = 1,
    *,
    device_type: str | None = None,
    timeout: float | timedelta | None = None,
    axes: Sequence[str] = AXES,
) -> DeviceMesh:
    """Create a mesh of all processes, and initialize ``torch.distributed`` where necessary.

    >>> init_mesh(device_type='cpu').mesh_dim_names  # one process; torchrun starts several
    ('data', 'pipe', 'tensor')
    >>> torch.distributed.destroy_process_group()

    Args:
        data: The number of replicas, each with its part of the batch.
        pipe: The number of ranks that share the stages of one replica.
        tensor: The number of ranks that share each layer.
        device_type: ``'cpu'``, ``'cuda'``, …; by default the accelerator's type, if there is one.
            Each rank uses the device with its number on the host, ``LOCAL_RANK``.
        timeout: How long a rank waits for another one: seconds, or a ``timedelta``; by default as
            in ``torch.distributed``.
        axes: The axes, from the outermost one. With ``('pipe', 'data', 'tensor')``, the ranks of a
            stage are next to each other, for example on one host.

    Raises:
        ValueError: The axes do not multiply to the number of processes, the timeout is not above
            zero, or the axes are neither in this order nor in the default one.
    """
    check_axes(axes)
    wait_at_exit()
    limit = None if timeout is None else parse_timeout(timeout)
    type_of_devices = device_type or accelerator() or str(CPU)
    on_cpu = is_cpu(type_of_devices)
    if not on_cpu and 'LOCAL_RANK' in os.environ:
        torch.accelerator.set_device_index(int(os.environ['LOCAL_RANK']))
    if not dist.is_initialized():
        place: dict[str, Any] = {}
        if 'RANK' not in os.environ:
            # This process is alone, so no other process has to find the store.
            place = {'store': dist.HashStore(), 'rank': 0, 'world_size': 1}  # type: ignore[attr-defined]
        dist.init_process_group('gloo' if on_cpu else None, timeout=limit, **place)
    check_sizes(data, pipe, tensor, dist.get_world_size())
    sizes = {'data': data, 'pipe': pipe, 'tensor': tensor}
    shape = []
    for axis in axes:
        shape.append(sizes[axis])
    return init_device_mesh(type_of_devices, tuple(shape), mesh_dim_names=tuple(axes))


def check_sizes(data: int, pipe: int, tensor: int, world: int) -> None:
    """Check the sizes of a mesh.

    Raises:
        ValueError: The axes do not multiply to the number of processes.
    """
    if min(data, pipe, tensor) < 1 or data * pipe * tensor != world:
        raise ValueError(
            f'a mesh of data={data} × pipe={pipe} × tensor={tensor} takes {data * pipe * tensor} '
            f'processes, but there are {world}; start as many: torchrun --nproc-per-node='
            f'{data * pipe * tensor} script.py'
        )


def axis_of(mesh: DeviceMesh, name: str) -> Axis:
    """Return an axis of a mesh.

    Raises:
        ValueError: This rank is not in the mesh, or an axis has an unknown name.
    """
    names = mesh.mesh_dim_names or ()
    if not names or not {*names} <= {*AXES}:
        raise ValueError(
            f'a mesh has axes of {AXES}, but this one has {names or "no names"}: '
            'name them by mesh_dim_names'
        )
    for axis, lines in lines_of(mesh).items():
        for ranks in lines:
            if ranks != sorted(ranks):
                raise ValueError(
                    f'along its {axis} axis the mesh has ranks {ranks}, but groups of '
                    'torch.distributed are in ascending order: make a mesh in that '
                    'order; stages go to other ranks by places=…'
                )
    place = mesh.get_coordinate()
    if place is None:
        raise ValueError(f'rank {dist.get_rank()} is not in the mesh {mesh}')
    if name not in names or mesh.size(names.index(name)) == 1:
        return Axis(name, 1, 0, None, None)
    dim = names.index(name)
    return Axis(name, mesh.size(dim), place[dim], mesh.get_group(dim), mesh[name])


def lines_of(mesh: DeviceMesh) -> dict[str, list[list[int]]]:
    """Return the ranks along each axis, a list for each place along the others."""
    names = mesh.mesh_dim_names or ()
    ranks = mesh.mesh
    lines = {}
    for axis in AXES:
        if axis in names:
            along = ranks.movedim(names.index(axis), -1)
            lines[axis] = along.reshape(-1, along.size(-1)).tolist()
        else:
            lines[axis] = ranks.reshape(-1, 1).tolist()
    return lines


def ranks_at(mesh: DeviceMesh, name: str, place: int | None = None) -> set[int]:
    """Return the ranks at this rank's place along an axis, or at the given place."""
    names = mesh.mesh_dim_names or ()
    ranks = mesh.mesh
    coordinate = mesh.get_coordinate()
    if name in names and coordinate is not None:
        dim = names.index(name)
        ranks = ranks.select(dim, coordinate[dim] if place is None else place)
    return {*ranks.flatten().tolist()}


@dataclass(frozen=True)
class MeshInfo:
    """A mesh, as one of its ranks sees it.

    Raises:
        ValueError: This rank is not in the mesh, or the mesh has other axes.
    """

    #: The mesh; ``None`` for a process without one.
    mesh: Any
    data: Axis
    pipe: Axis
    tensor: Axis
    #: The group of all ranks of the mesh; ``None`` if there is only one rank.
    everyone: ProcessGroup | None
    #: A group of the same ranks, in which only facts are exchanged.
    facts: ProcessGroup | None
    #: The device of this rank.
    device: torch.device
    #: By axis, the ranks along it, for each place along the others.
    lines: Mapping[str, Sequence[Sequence[int]]]
    #: For each rank along the pipe axis, all ranks that have the same stages.
    same_stages: Sequence[set[int]]
    #: The ranks at the same place along the tensor axis, with any stages.
    same_shard: set[int]

    @classmethod
    def of(cls, mesh: DeviceMesh) -> 'MeshInfo':
        """Return a mesh as this rank sees it. All ranks call it."""
        data, pipe, tensor = [axis_of(mesh, name) for name in AXES]
        return cls(
            mesh,
            data,
            pipe,
            tensor,
            group_of_all(mesh),
            group_of_facts(mesh),
            CPU if is_cpu(mesh.device_type) else current_device(),
            lines_of(mesh),
            [ranks_at(mesh, 'pipe', place) for place in range(pipe.size)],
            ranks_at(mesh, 'tensor'),
        )

    @property
    def axes(self) -> tuple[Axis, Axis, Axis]:
        """The axes data, pipe and tensor, whatever their order in the mesh."""
        return self.data, self.pipe, self.tensor

    @property
    def number(self) -> int:
        """The index of this rank among the ranks of the mesh."""
        return 0 if self.everyone is None else self.everyone.rank()

    @property
    def size(self) -> int:
        """The number of ranks of the mesh."""
        return 1 if self.everyone is None else self.everyone.size()


def group_of_all(mesh: DeviceMesh) -> ProcessGroup | None:
    """Return the group of all ranks of a mesh; ``None`` if there is only one rank."""
    if mesh.size() == 1:
        return None
    wait_at_exit()  # The mesh may not come from init_mesh.
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    return _group_of('all', {*mesh.mesh.flatten().tolist()}, use_local_synchronization=True)


def group_of_facts(mesh: DeviceMesh) -> ProcessGroup | None:
    """Return a group of all ranks of a mesh for their facts; ``None`` if there is only one rank.

    Messages in the same group as reductions would wait for these, or for a lock.
    """
    everyone = group_of_all(mesh)
    # NCCL would need memory for another group.
    if everyone is None or not has_backend(everyone, CPU):
        return everyone
    is_part = mesh.size() < dist.get_world_size()
    return _group_of('facts', {*mesh.mesh.flatten().tolist()}, use_local_synchronization=is_part)


class Edges(NamedTuple):
    """The process groups of the messages in a pipeline."""

    #: The group of messages from one rank to another one, by both.
    groups: dict[tuple[int, int], ProcessGroup]
    #: Whether messages in one direction never wait for messages in another one.
    apart: bool = True


#: Types of devices whose backend has no queues: gloo matches messages by sender and receiver.
WITHOUT_QUEUES = ('cpu',)

#: The largest number of edges that have a group each. NCCL needs memory for each of them, and Gloo
#: a connection for each two of its ranks.
MOST_EDGES = 32

#: By the group of all processes, the groups that were made once for all models, by their use and
#: their ranks.
_groups: WeakKeyDictionary[Any, dict[Any, ProcessGroup]] = WeakKeyDictionary()


def groups_of_edges(mesh: DeviceMesh, edges: Sequence[tuple[int, int]]) -> Edges:
    """Return the groups of the messages in the pipeline of this rank. All ranks call it.

    A group of NCCL has one queue for the messages of two ranks, in both directions. So each edge
    has a group, which the pipelines of all replicas share::

        data 0    rank 0 ──▶ rank 1 ──▶ rank 2        groups    0▶1, 1▶2, 2▶1, 1▶0 along pipe
        data 1    rank 3 ──▶ rank 4 ──▶ rank 5                  0▶1 has ranks 0, 1, 3, 4

    With Gloo, the messages of two ranks in one group wait for one lock, so groups for each edge
    are faster as well.

    If there are too many edges, or other processes outside of the mesh, there are two groups: for
    messages to higher ranks, and to lower ranks. With Gloo, one is enough. It connects all ranks
    of a group, so the number of ranks has a limit as well.
    """
    axis = axis_of(mesh, 'pipe')
    if axis.group is None:
        return Edges({})
    has_queues = mesh.device_type not in WITHOUT_QUEUES
    is_whole_world = mesh.size() == dist.get_world_size()
    most = len(edges) if has_queues else max(len(edges), mesh.size())
    has_groups = is_whole_world and most <= MOST_EDGES
    downwards = axis.group
    if has_queues and not has_groups:
        all_ranks = {*mesh.mesh.flatten().tolist()}
        downwards = _group_of('downwards', all_ranks, use_local_synchronization=True)

    groups = {}
    for sender, receiver in edges:
        group = axis.group
        if sender > receiver:
            group = downwards
        if has_groups:
            ranks = ranks_at(mesh, 'pipe', sender) | ranks_at(mesh, 'pipe', receiver)
            group = _group_of(sender < receiver, ranks)
        groups[axis.ranks[sender], axis.ranks[receiver]] = group
    return Edges(groups, has_groups or not has_queues)


def _group_of(use: Any, ranks: set[int], **options: Any) -> ProcessGroup:
    """Return a group of some ranks, which is made once for all models."""
    groups = _groups.setdefault(dist.group.WORLD, {})
    key = use, frozenset(ranks)
    if key not in groups:
        limit = timeout_of(dist.group.WORLD)
        groups[key] = dist.new_group(sorted(ranks), timeout=limit, **options)
    return groups[key]


class _Form(NamedTuple):
    """The form of a tensor, which has to be the same on all ranks that exchange it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.layout
    is_cache: bool


@torch.no_grad()
def take_first(module: nn.Module, axis: Axis) -> None:
    """Copy the parameters and buffers of the first rank of an axis to the others, by their names.

    A buffer that is in no state dict may have another form on each rank. It stays as it is, and so
    does a tensor of which ranks have parts: its layer was also an earlier one.

    Raises:
        ValueError: Ranks have tensors of other names or forms. All ranks raise this error.
    """
    if axis.group is None:
        return
    saved = module.state_dict().keys()
    tensors = {}
    forms = {}
    for name, _, x in named_slots(module):
        if not isinstance(x, DTensor):
            tensors[name] = x
            forms[name] = _Form(tuple(x.shape), x.dtype, x.layout, name not in saved)
    by_rank: list[dict[str, _Form]] = gathered(forms, axis.group)
    for name in sorted(set().union(*by_rank)):
        form_by_rank = [forms.get(name) for forms in by_rank]
        first = next(form for form in form_by_rank if form is not None)
        if len({*form_by_rank}) > 1:
            if not first.is_cache:
                raise _other_forms(name, axis, form_by_rank)
        elif first.layout is torch.strided:  # Others are only compared.
            _copy_first(tensors[name], axis)


def _other_forms(name: str, axis: Axis, forms: Sequence[_Form | None]) -> ValueError:
    words = {}
    for rank, form in zip(axis.ranks, forms):
        words[rank] = 'none' if form is None else f'{form.shape} of {form.dtype}'
    return ValueError(
        f"'{name}' has another form on each of ranks {axis.ranks}, which take the values of "
        f'the first one, along the {axis.name} axis: {words}. Make the same module on all '
        'ranks'
    )


def _copy_first(x: Tensor, axis: Axis) -> None:
    """Copy the values of one tensor of the first rank of an axis to the others."""
    value = x.contiguous()
    # Backends do not support all types.
    dist.broadcast(value.view(-1).view(torch.uint8), axis.ranks[0], axis.group)
    if value is not x:
        # An expanded tensor has equal values along a dimension, and is written to once.
        once = tuple([slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()])
        x[once].copy_(value[once])
