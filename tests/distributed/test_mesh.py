"""Meshes that fit, and errors for meshes that do not fit."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.shard.processes import run
from torchgpipe.base.private import timeout_of
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.distributed import mesh as meshes
from torchgpipe.distributed.mesh import axis_of, group_of_all, groups_of_edges, ranks_at


def wrong():
    """Return the errors for meshes, places and settings that do not fit."""
    rank, found = torch.distributed.get_rank(), []
    layers, mesh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), init_mesh(pipe=2)
    for make in (
        lambda: init_mesh(data=0),
        lambda: init_mesh(pipe=2, axes=('data', 'tensor', 'pipe')),
        lambda: init_mesh(pipe=2, axes=('pipe', 'tensor')),
        lambda: DistributedGPipe(layers, [1, 1], mesh=init_device_mesh('cpu', (2,))),
        lambda: DistributedGPipe(layers, [2], mesh=mesh),
        lambda: DistributedGPipe(layers, [1, 1], mesh=mesh, places=[0, 0]),
        lambda: DistributedGPipe(layers, [1, 1], mesh=mesh, chunks=0),
        lambda: DistributedGPipe(3, [1, 1], mesh=mesh),
        lambda: DistributedGPipe(layers, [1, 1], mesh=mesh, seed=rank),
        lambda: DistributedGPipe(layers, [1, 1], mesh=mesh, chunks=1 + rank),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as info:
            make()
        found.append(str(info.value))
    model = DistributedGPipe(layers, [1, 1], mesh=mesh, chunks=2)
    x, target = torch.ones(4, 2), torch.ones(4, 2)
    loss = nn.functional.mse_loss

    def on_one_without_sync():
        with model.no_sync() if rank else nullcontext():
            model.step(x, target, loss)

    for step in (
        lambda: model.step(x, target, loss, schedule='zb-v'),
        lambda: model.step(x, target, loss, schedule=['1f1b', 'gpipe'][rank]),
        lambda: model(x) if rank else model.step(x, target, loss, schedule='gpipe'),
        on_one_without_sync,
        lambda: model.step(x if rank else x[:0], target, loss),
        lambda: model.step(x, target[:3], loss),
        lambda: model.step(x, target, nn.MSELoss(reduction='sum')),
        lambda: model.eval().step(x, target, loss),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as info:
            step()
        found.append(str(info.value))
    model.train()
    return found, model.step(x, target, loss).item()


def test_wrong_arguments_are_refused_on_all_ranks_and_training_goes_on():
    (first, loss), (second, other) = run(2, wrong)
    words = [
        'data=0',
        "axes are ('data', 'pipe', 'tensor') or",
        "axes are ('data', 'pipe', 'tensor') or",
        'name them by mesh_dim_names',
        'places are [0]',
        'places are [0, 0]',
        'chunks must be a positive integer',
        'this is a int',
        'other settings on rank 1',
        'other settings on rank 1',
        'places=[0, 0]',
        *['other settings on rank 1'] * 3,
        '',
        '',
        '',
        'evaluation mode',
    ]
    for one, two, word in zip(first, second, words, strict=True):
        assert word in one and word in two, (one, two)
    assert 'empty' in first[14] and 'rank 0' in second[14]
    assert 'the target has 3 samples' in first[15] and first[15] == second[15]
    assert 'rank 1' in first[16] and 'sum' in second[16]
    assert loss == other


def seen(is_ours):
    """Return the axes of a mesh in another order, ours or one that the user made."""
    if is_ours:
        mesh = init_mesh(data=2, pipe=2, axes=('pipe', 'data', 'tensor'))
    else:
        mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('pipe', 'data'))
    data, pipe, tensor = (axis_of(mesh, name) for name in ('data', 'pipe', 'tensor'))
    return (
        data.ranks,
        pipe.ranks,
        tensor.ranks,
        sorted(ranks_at(mesh, 'pipe')),
        group_of_all(mesh).size(),
    )


@pytest.mark.parametrize('is_ours', [False, True])
def test_axes_by_their_names(is_ours):
    found = run(4, seen, is_ours)
    assert found[3] == ([2, 3], [1, 3], [3], [2, 3], 4)
    assert found[0] == ([0, 1], [0, 2], [0], [0, 1], 4)


def limits():
    """Return the timeouts of the groups that a model makes."""
    mesh = init_mesh(pipe=2)
    model = DistributedGPipe(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), [1, 1], mesh=mesh)
    rank = model._rank
    groups = [rank.mesh.facts, *rank.edges.groups.values()]
    assert torch.distributed.group.WORLD not in groups
    return [timeout_of(group).total_seconds() for group in groups]


def test_groups_for_facts_and_messages_have_the_timeout_of_the_group_of_all_processes():
    assert run(2, limits, timeout=77) == [[77.0] * 3] * 2


def edges(queues, limit):
    """Return the losses of two models on a mesh, and facts about the groups of their messages."""
    meshes.WITHOUT_QUEUES, meshes.MOST_EDGES = () if queues else ('cpu',), limit
    mesh = init_mesh(data=2, pipe=2)
    losses = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        model = DistributedGPipe(layers, [1] * 4, mesh=mesh, chunks=4)
        for _ in range(3):
            losses.append(
                model.step(
                    torch.ones(4, 4),
                    torch.ones(4, 4),
                    nn.functional.mse_loss,
                    schedule='interleaved',
                ).item()
            )
    # Receives are early only if nothing waits behind them.
    early = any(key[0] for _, rows in model._steps._kinds.values() for key in rows if key)
    assert early is model._rank.edges.apart
    found = groups_of_edges(mesh, [(0, 1), (1, 0)])
    assert all(found.groups[each] is group for each, group in model._rank.edges.groups.items())
    groups = [found.groups[each] for each in sorted(found.groups)]
    return (
        losses,
        found.apart,
        sorted(found.groups),
        [each.size() for each in groups],
        len({*map(id, groups)}),
        len(meshes._groups.get(torch.distributed.group.WORLD, ())),
    )


@pytest.mark.slow
def test_messages_have_a_group_for_each_edge_or_one_for_each_direction():
    cases = (False, 32), (False, 1), (True, 32), (True, 1)
    host, one, each, few = (run(4, edges, *options) for options in cases)
    for rank in range(4):
        pipe = rank // 2 * 2
        losses, *facts = one[rank]
        there = [(pipe, pipe + 1), (pipe + 1, pipe)]
        # There is one more group, of facts.
        assert facts == [True, there, [2, 2], 1, 1]
        assert host[rank] == each[rank] == (losses, True, there, [4, 4], 2, 3)  # for both models
        assert few[rank] == (losses, False, there, [2, 4], 2, 2)
