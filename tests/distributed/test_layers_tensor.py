"""Layers that are split along the tensor axis, beside stages and replicas."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
from torch.nn import functional as F

from tests.distributed.models import MODELS, Block, batch, full, train
from tests.distributed.test_model import alone, check, part
from tests.shard.processes import run
from torchgpipe import plan as plans
from torchgpipe.distributed import DistributedGPipe, SequenceColwiseParallel, init_mesh
from torchgpipe.distributed.layers import check_plan
from torchgpipe.plan import Transformer
from torchgpipe.shard.sums import like


def plan():
    """Split each block."""
    return {'*.up': ColwiseParallel(), '*.down': RowwiseParallel()}


def trained(axes, name, stages, data, schedule):
    """Train on a rank."""
    with torch.device('meta'):
        module = MODELS[name]()
    mesh = init_mesh(**axes)
    model = DistributedGPipe(
        module, [8 // stages] * stages, mesh=mesh, chunks=3, data=data, tensor_plan=plan()
    )
    rank = mesh.get_local_rank('data')
    return train(model, lambda x: part(x, axes.get('data', 1), rank), schedule=schedule)


@pytest.mark.slow
def test_tensor_and_pipe():
    found = run(4, trained, {'tensor': 2, 'pipe': 2}, 'tied', 2, 'replicate', '1f1b')
    check(found, alone('tied'))


@pytest.mark.slow
@pytest.mark.parametrize('axes', [('data', 'pipe', 'tensor'), ('pipe', 'data', 'tensor')])
def test_data_and_pipe_and_tensor(axes):
    sizes = {'tensor': 2, 'pipe': 2, 'data': 2, 'axes': axes}
    check(run(8, trained, sizes, 'perceptron', 4, 'shard', 'interleaved'), alone('perceptron'))


def planned(axes):
    """Train by a plan that knows sizes alone."""
    data = axes.get('data', 1)
    found = plans.plan(
        Transformer(6, 8, 2, 10, 6),
        mesh=axes,
        machine='H100',
        batch=6 * data,
        schedules=['zb-v'],
        shardings=['shard'],
        micro_batches=[2],
    )
    with torch.device('meta'):
        module = MODELS['perceptron']()
    options = {'tensor_plan': plan()} if 'tensor' in axes else {}
    with pytest.raises(ValueError, match='the plan is for the mesh .*, but this one is'):
        DistributedGPipe(module, found, mesh=init_mesh(data=4), **options)
    mesh = init_mesh(**found.mesh, axes=found.axes)
    if data > 1:
        other = init_mesh(**found.mesh, axes=('pipe', 'data', 'tensor'))
        with pytest.raises(
            ValueError, match=r"axes are \['data', 'pipe'\], .* \['pipe', 'data'\]"
        ):
            DistributedGPipe(module, found, mesh=other, **options)
    if data == 1:
        with pytest.raises(ValueError, match="the plan says data='replicate', so leave"):
            DistributedGPipe(module, found, mesh=mesh, data='shard', **options)
    model = DistributedGPipe(module, found, mesh=mesh, **options)
    assert model.chunks == 3 and len(model.balance) == 4
    assert any(isinstance(x, DTensor) for x in model.parameters())
    return train(model, lambda x: part(x, data, mesh.get_local_rank('data')), schedule='auto')


@pytest.mark.slow
@pytest.mark.parametrize('axes', [{'data': 2, 'pipe': 2}, {'pipe': 2, 'tensor': 2}])
def test_a_plan_for_a_mesh(axes):
    check(run(4, planned, axes), alone('perceptron'))


def initial(axes, stages):
    """Give the initial values of a mesh."""
    with torch.device('meta'):
        module = MODELS['tied']()
    model = DistributedGPipe(
        module,
        [8 // stages] * stages,
        mesh=init_mesh(**axes),
        seed=5,
        data='shard',
        tensor_plan=plan() if 'tensor' in axes else None,
    )
    return {name: full(x) for name, x in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize(
    'axes',
    [
        {'pipe': 2},
        {'tensor': 2},
        pytest.param({'data': 2, 'pipe': 2, 'tensor': 2}, marks=pytest.mark.slow),
    ],
)
def test_initial_values_are_the_same_on_all_meshes(axes):
    ranks = torch.tensor([*axes.values()]).prod().item()
    (expected,) = run(1, initial, {}, 1)
    found = {}
    for each in run(ranks, initial, axes, 2 if 'pipe' in axes else 1):
        found.update(each)
    assert found.keys() == expected.keys()
    assert not torch.equal(expected['1.up.weight'], expected['2.up.weight'])
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


def test_a_plan_that_matches_no_layer_lists_the_layers():
    module = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"'0\.1'.*names like it: .*'0\.0'"):
        check_plan({'0.1': ColwiseParallel()}, module, 2)


def adapted():
    """Train where layers that are split are frozen, and recomputed."""
    with torch.device('meta'):
        module = MODELS['perceptron']()
    for k in (0, 1, 4, 5):
        module[k].requires_grad_(False)
    model = DistributedGPipe(
        module,
        [4, 4],
        mesh=init_mesh(pipe=2, tensor=2),
        chunks=3,
        checkpoint='always',
        tensor_plan=plan(),
    )
    return train(model, lambda x: x, sizes=(8, 8))[0][-1][0]


@pytest.mark.slow
def test_frozen_layers_that_are_split_are_recomputed():
    assert len({*run(4, adapted, timeout=60)}) == 1


def tied_and_split():
    """Give how many parameters there are where one of two places is split by its own name."""

    def made(plan):
        first, last = (nn.Linear(6, 6, bias=False) for _ in range(2))
        last.weight = first.weight
        return DistributedGPipe(
            nn.Sequential(first, nn.Tanh(), last), [3], mesh=init_mesh(tensor=2), tensor_plan=plan
        )

    with pytest.raises(ValueError, match="splits it in other ways there: .*'2.weight': 'whole'"):
        made({'0': ColwiseParallel()})
    model = made({'0': ColwiseParallel(), '2': ColwiseParallel(), '[02]': RowwiseParallel()})
    assert model.get_parameter('2.weight').placements == (Shard(0),)  # The first line counts.
    return len([*model.parameters()])


def test_layers_tied_on_one_rank_stay_tied_when_they_are_split():
    assert run(2, tied_and_split) == [1, 1]


class Dropped(Block):
    """A layer that drops some elements of a tensor that is not split."""

    def forward(self, x):
        return F.dropout(super().forward(x))


def dropped(axes):
    """Give losses and norms where each rank has a generator in another state."""
    torch.manual_seed(torch.distributed.get_rank())
    model = DistributedGPipe(
        [Dropped, Dropped],
        [2],
        mesh=init_mesh(**axes),
        chunks=2,
        tensor_plan=plan() if axes else None,
    )
    return [
        (model.step(*batch(step, 4), F.mse_loss).item(), model.clip_grad_norm_(1.0).item())
        for step in range(2)
    ]


def test_ranks_along_the_tensor_axis_drop_the_same():
    """They draw the same as the first rank, and as one process."""
    ((one, two),) = run(1, dropped, {})
    for found in run(2, dropped, {'tensor': 2}):
        assert found == [pytest.approx(one, rel=1e-10), pytest.approx(two, rel=1e-10)]


def laid_out():
    """Give a gradient of which each rank has a summand, laid out as its parameter is."""
    mesh = init_mesh(tensor=2)['tensor']
    x = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    grad = DTensor.from_local(torch.ones(4, 2) + torch.distributed.get_rank(), mesh, [Partial()])
    return like(x, grad).to_local().tolist()


def test_a_gradient_gets_the_layout_of_its_parameter():
    assert run(2, laid_out) == [[[3, 3], [3, 3]]] * 2


def values():
    """Give the values of a model that each rank has made with others."""
    torch.manual_seed(torch.distributed.get_rank())
    model = DistributedGPipe(
        nn.Sequential(Block(), nn.Linear(6, 6)), [2], mesh=init_mesh(tensor=2), tensor_plan=plan()
    )
    return {name: full(x) for name, x in model.named_parameters()}


def test_a_module_with_values_keeps_the_values_of_the_first_shard():
    first, second = run(2, values)
    assert all(torch.equal(x, second[name]) for name, x in first.items())


def frozen():
    """Return the names of parameters with a gradient, and of those that require one."""
    module = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, 8))
    module[0].requires_grad_(False)
    module[1].weight.requires_grad_(False)
    tensor_plan = {
        '0': SequenceParallel(),
        '1': SequenceColwiseParallel(),
        '2': RowwiseParallel(output_layouts=Shard(1)),
    }
    mesh = init_mesh(tensor=2, device_type='cpu')
    model = DistributedGPipe(module, [3], mesh=mesh, tensor_plan=tensor_plan)
    x = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(0))
    model.step(x, x, F.mse_loss)
    learned = {name for name, p in model.named_parameters() if p.grad is not None}
    return learned, {name for name, p in model.named_parameters() if p.requires_grad}


def test_in_v0_30_a_style_of_pytorch_made_frozen_parameters_learn():
    for learned, required in run(2, frozen):
        assert learned == required == {'1.bias', '2.weight', '2.bias'}
