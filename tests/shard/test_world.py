"""The mesh of replicas and parallel groups."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torchgpipe.shard as ts
from tests.shard.processes import run
from torchgpipe.shard import world


def places(groups):
    """Say where this rank is, for one size of groups after the other."""
    found = []
    for group in groups:
        ts.distributed.init_process_group(group)
        found.append(place())
        own = ts.distributed.get_group(), ts.distributed.get_data_group()
        ts.distributed.destroy_process_group()
        assert not ts.distributed.is_initialized()
        for each in own:
            with pytest.raises(ValueError):
                dist.get_backend(each)
    return found


def place():
    """Say where this rank is, and who is in its groups."""
    now = world.current()
    assert ts.distributed.is_initialized() and ts.distributed.get_mesh() is now.mesh
    assert now.mesh.mesh_dim_names == ('data', 'tensor')
    assert now.mesh.shape == (now.data_size, now.tensor_size)
    place = ts.distributed.get_data_rank(), now.tensor_rank
    assert tuple(now.mesh.get_coordinate()) == place
    group, data = ts.distributed.get_group(), ts.distributed.get_data_group()
    assert group is now.mesh.get_group('tensor') and data is now.mesh.get_group('data')
    assert ts.distributed.get_world_size() == dist.get_world_size()
    assert ts.distributed.get_group_size() == now.tensor_size
    ones = torch.ones(2)
    dist.all_reduce(ones[:1], group=group)
    dist.all_reduce(ones[1:], group=data)
    assert ones.tolist() == [now.tensor_size, now.data_size]
    return (
        ts.distributed.get_rank(),
        dist.get_process_group_ranks(group),
        ts.distributed.get_data_rank(),
        dist.get_process_group_ranks(data),
    )


def test_consecutive_ranks_are_a_group():
    found = run(4, places, [1, 2, 4, -1])
    ranks = range(4)
    assert [each[0] for each in found] == [(0, [r], r, [0, 1, 2, 3]) for r in ranks]
    assert [each[1] for each in found] == [
        (r % 2, [r - r % 2, r - r % 2 + 1], r // 2, [r % 2, r % 2 + 2]) for r in ranks
    ]
    assert [each[2] for each in found] == [(r, [0, 1, 2, 3], 0, [r]) for r in ranks]
    assert [each[3] for each in found] == [each[2] for each in found]


def meshes():
    """Hand meshes over, of several forms."""
    found = []
    for shape, names in [
        ((2, 2), ('data', 'tensor')),
        ((2, 2), ('tensor', 'data')),
        ((2, 2), ('pipe', 'tensor')),
        ((4,), None),
        ((4,), ('tp',)),
        ((2, 1, 2), ('data', 'pipe', 'tensor')),
    ]:
        mesh = init_device_mesh('cpu', shape, mesh_dim_names=names)
        ts.distributed.init_process_group(mesh=mesh)
        assert (ts.distributed.get_mesh() is mesh) == (names == ('data', 'tensor'))
        found.append(place())
        alone = ts.distributed.get_data_group()
        ts.distributed.destroy_process_group()
        if 'data' not in (names or ()):
            with pytest.raises(ValueError):
                dist.get_backend(alone)
        for axis in range(mesh.ndim):
            dist.barrier(mesh.get_group(axis))  # it is still there
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('tensor', 'pipe'))
    for message, wrong in [
        ('divides|group_size out', {'group_size': 4, 'mesh': mesh}),
        ("called 'tensor'", {'mesh': init_device_mesh('cpu', (2, 2))}),
    ]:
        with pytest.raises(ValueError, match=message):
            ts.distributed.init_process_group(**wrong)
    ts.distributed.init_process_group(2, mesh=mesh)
    ts.distributed.destroy_process_group()
    part = init_device_mesh('cpu', (2,)) if dist.get_rank() < 2 else None
    assert part is None or ts.distributed.init_process_group(mesh=part) is None
    if part is None:
        with pytest.raises(ValueError, match=f'rank {dist.get_rank()} is not in the mesh'):
            ts.distributed.init_process_group(mesh=DeviceMesh('cpu', [0, 1]))
    return found


def test_a_mesh_is_handed_over():
    found = run(4, meshes)
    rows = [(r % 2, [r - r % 2, r - r % 2 + 1], r // 2, [r % 2, r % 2 + 2]) for r in range(4)]
    columns = [(r // 2, [r % 2, r % 2 + 2], r % 2, [r - r % 2, r - r % 2 + 1]) for r in range(4)]
    alone = [(r % 2, [r - r % 2, r - r % 2 + 1], 0, [r]) for r in range(4)]
    whole = [(r, [0, 1, 2, 3], 0, [r]) for r in range(4)]
    for i, expected in enumerate([rows, columns, alone, whole, whole, rows]):
        assert [each[i] for each in found] == expected, i


def refusals():
    """Do it wrong."""
    rank = dist.get_rank()  # torch.distributed forgets it
    for call in [
        ts.distributed.get_group,
        ts.distributed.get_group_size,
        ts.distributed.get_rank,
        ts.distributed.get_mesh,
        ts.distributed.get_data_group,
        ts.distributed.destroy_process_group,
        lambda: ts.distributed.reduce(torch.ones(1)),
    ]:
        with pytest.raises(RuntimeError, match='ts.distributed.init_process_group'):
            call()
    for size in (0, 3, 8, -2):
        with pytest.raises(ValueError, match=f'4 processes cannot .* groups of {size}:'):
            ts.distributed.init_process_group(size)
    ts.distributed.init_process_group(2)
    with pytest.raises(RuntimeError, match='already, of 2'):
        ts.distributed.init_process_group(2)
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    assert not ts.distributed.is_initialized()
    for call in (ts.distributed.get_group, ts.distributed.init_process_group):
        with pytest.raises(RuntimeError, match='torch.distributed.init_process_group'):
            call()
    dist.init_process_group(
        'gloo', store=dist.PrefixStore('again', store), rank=rank, world_size=4
    )
    with pytest.raises(RuntimeError, match='there are no parallel groups'):
        ts.distributed.get_rank()
    ts.distributed.init_process_group(4)


def test_wrong_use_raises():
    run(4, refusals)


def test_without_torch_distributed():
    with pytest.raises(RuntimeError, match='torch.distributed.init_process_group first'):
        ts.distributed.init_process_group(1)
