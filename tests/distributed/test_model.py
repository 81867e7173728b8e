"""Training on several processes, against one process that has the whole model."""

import copy
from functools import cache

import pytest
import torch
from torch import nn

from tests.distributed.models import MODELS, batch, train
from tests.distributed.saving import fresh
from tests.marks import slow
from tests.shard.processes import run
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.plan import Costs, StageCosts, search_schedule
from torchgpipe.schedule import make
from torchgpipe.schedule.generators import V_SHAPED

LAYERS = 8


def part(x, data, rank, even=False):
    """The part of a replica: the first one has a sample more than the others, or two."""
    if even:
        return x.chunk(data)[rank]
    first = len(x) - (data - 1) * (len(x) // (data + 1))
    return x if data == 1 else x.split([first, *[len(x) // (data + 1)] * (data - 1)])[rank]


def trained(axes, name, stages, places, options, settings, even=False):
    """Train on a rank."""
    with torch.device('meta'):
        module = MODELS[name]()
    mesh = init_mesh(**axes)
    model = DistributedGPipe(
        module, [LAYERS // stages] * stages, mesh=mesh, chunks=3, places=places, **settings
    )
    data, rank = axes.get('data', 1), mesh.get_local_rank('data')
    return train(model, lambda x: part(x, data, rank, even), **options)


@cache
def alone(name, chunks=0, **options):
    """Train a model in one process, with the initial values that all meshes have.

    With batch normalization it has as many micro-batches as replicas have together.
    """
    return run(1, trained_alone, name, chunks, options)[0]


def trained_alone(name, chunks, options):
    with torch.device('meta'):
        module = MODELS[name]()
    model = DistributedGPipe(module, [LAYERS], mesh=init_mesh())
    layers = nn.Sequential(*copy.deepcopy(list(model.children())))
    gpipe = GPipe(
        layers, [LAYERS], devices=['cpu'], chunks=chunks or 1, deferred_batch_norm=chunks > 0
    )
    gpipe.clip_grad_norm_ = lambda norm: nn.utils.clip_grad_norm_(gpipe.parameters(), norm)
    return train(gpipe, lambda x: x, **options)


def check(found, expected):
    """Check that the ranks together have the results of one process."""
    steps, parameters, buffers = expected
    for rank, _, _ in found:
        for (loss, norm, grads), (own_loss, own_norm, own) in zip(steps, rank):
            assert own_loss == pytest.approx(loss, rel=1e-10)
            assert own_norm == pytest.approx(norm, rel=1e-8)
            for name, grad in own.items():
                torch.testing.assert_close(grad, grads[name], rtol=1e-10, atol=1e-10)
    for k, whole in ((1, parameters), (2, buffers)):
        there = {name: x for rank in found for name, x in rank[k].items()}
        assert there.keys() == whole.keys()
        for rank in found:
            for name, x in rank[k].items():
                torch.testing.assert_close(x, whole[name], rtol=1e-10, atol=1e-10)


SCHEDULES = [
    ('gpipe', 2, None),
    ('1f1b', 2, None),
    ('interleaved', 4, None),
    ('looped-bfs', 4, None),
    ('zb-h1', 2, None),
    *((name, 4, [0, 1, 1, 0]) for name in V_SHAPED),
]


@pytest.mark.parametrize('schedule, stages, places', SCHEDULES)
def test_schedules(schedule, stages, places):
    found = run(2, trained, {'pipe': 2}, 'unet', stages, places, {'schedule': schedule}, {})
    check(found, alone('unet'))


@pytest.mark.parametrize('name, model', [('v-half', 'unet'), ('v-min', 'tied')])
def test_a_v_of_four_ranks(name, model):
    found = run(
        4,
        trained,
        {'pipe': 4},
        model,
        8,
        [*range(4), *reversed(range(4))],
        {'schedule': name},
        {'checkpoint': 'always' if name == 'v-min' else 'never'},
    )
    check(found, alone(model))


@pytest.mark.parametrize('is_searched', [False, True])
def test_micro_batches_that_a_schedule_recomputes(is_searched):
    schedule = make('zb-v', 2, 3).recomputing([{1}, {0, 2}, {}, {2}])
    if is_searched:
        stages = [StageCosts(1.0 + j, 2.0, activation_bytes=1.0) for j in range(4)]
        schedule = search_schedule(
            Costs(stages), 2, 3, 3.0, places=[0, 1, 1, 0], effort=3_000
        ).schedule
        assert any(map(schedule.recomputed, range(4)))
    found = run(
        2,
        trained,
        {'pipe': 2},
        'unet',
        4,
        [0, 1, 1, 0],
        {'schedule': schedule},
        {'checkpoint': 'never'},
    )
    check(found, alone('unet'))


@pytest.mark.parametrize(
    'name, data, even',
    [
        ('perceptron', 'shard', False),
        ('dictionaries', 'shard', False),
        ('frozen', 'replicate', False),
        ('tied', 'replicate', False),
        ('unet', 'shard', False),
        # With the same numbers of micro-batches, replicas reduce within the step.
        ('frozen', 'shard', True),
        ('tied', 'shard', True),
        ('tied', 'replicate', True),
        ('unet', 'replicate', True),
    ],
)
def test_models(name, data, even):
    axes, options = {'data': 2, 'pipe': 2}, {'schedule': 'interleaved'}
    found = run(4, trained, axes, name, 4, None, options, {'data': data}, even)
    check(found, alone(name))


@pytest.mark.parametrize(
    'name, data, even',
    [('tied', 'replicate', True), slow('unet', 'shard', False), slow('tied', 'shard', True)],
)
def test_a_mesh_in_which_the_ranks_of_a_stage_are_neighbours(name, data, even):
    axes = {'data': 2, 'pipe': 2, 'axes': ('pipe', 'data', 'tensor')}
    options = {'schedule': 'interleaved'}
    found = run(4, trained, axes, name, 4, None, options, {'data': data}, even)
    check(found, alone(name))


@pytest.mark.parametrize('data', ['shard', slow('replicate')])
def test_batch_norm_sees_all_replicas(data):
    sizes = (12, 6, 12)
    found = run(
        4,
        trained,
        {'data': 2, 'pipe': 2},
        'resnet',
        2,
        None,
        {'sizes': sizes},
        {'data': data, 'deferred_batch_norm': True},
        True,
    )
    check(found, alone('resnet', 6, sizes=sizes))


def sharded_floats():
    """Gradients of a linear layer in single precision, of which each replica has a part."""
    model = DistributedGPipe([lambda: nn.Linear(6, 4)], [1], mesh=init_mesh(data=2), data='shard')
    x, weight = torch.ones(3, 6), model.get_parameter('0.weight')
    model.step(x, torch.zeros(3, 4), nn.functional.mse_loss)
    linear = nn.Linear(6, 4)
    linear.load_state_dict(
        {
            name.removeprefix('0.'): value.full_tensor()
            for name, value in model.state_dict().items()
        }
    )
    nn.functional.mse_loss(linear(x), torch.zeros(3, 4)).backward()
    torch.testing.assert_close(weight.grad.full_tensor(), linear.weight.grad)


def test_shards_in_single_precision():
    run(2, sharded_floats)


def clipped(axes):
    """Give norms of other types, and a gradient that is no larger than it may be."""
    with torch.device('meta'):
        module = MODELS['tied']()
    model = DistributedGPipe(module, [4, 4], mesh=init_mesh(**axes))
    model.step(*batch(0, 4), nn.functional.mse_loss)
    found = [model.clip_grad_norm_(100.0, kind).item() for kind in (1.0, 2.0, float('inf'))]
    return [*found, *(model.clip_grad_norm_(0.2, float('inf')).item() for _ in range(2))]


def test_norms_of_other_types():
    ((*whole, most, before, after),) = run(1, clipped, {})
    assert before == most and after == pytest.approx(0.2, rel=1e-4) and most > 0.2
    for found in run(2, clipped, {'pipe': 2}):
        assert found == pytest.approx([*whole, most, before, after], rel=1e-10)
    model = fresh('tied')
    nn.functional.mse_loss(model(batch(0, 4)[0]), batch(0, 4)[1]).backward()
    assert [*whole, most] == pytest.approx(
        [
            nn.utils.get_total_norm([x.grad for x in model.parameters()], kind).item()
            for kind in (1.0, 2.0, float('inf'))
        ]
    )


def called():
    """Check running statistics after a call, and its output along another dimension."""
    mesh, x = init_mesh(data=2), torch.arange(24.0).view(8, 3)
    norm = DistributedGPipe(
        [lambda: nn.BatchNorm1d(3)], [1], mesh=mesh, chunks=2, deferred_batch_norm=True
    )
    norm(x.chunk(2)[torch.distributed.get_rank()])
    torch.testing.assert_close(norm.get_buffer('0.running_mean'), x.mean(0) * 0.1)
    model = DistributedGPipe([nn.Tanh], [1], mesh=mesh, chunks=2, batch_dim=1)
    torch.testing.assert_close(model(x), x.tanh())


def test_calls_without_gradients():
    run(2, called)
