"""Experts that are spread over replicas, on meshes, against one process without any pipeline."""

import copy
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.models import DOUBLE, batch, full
from tests.distributed.saving import OFFLOAD
from tests.distributed.test_model import check
from tests.marks import slow
from tests.shard.processes import outcomes, run
from torchgpipe.distributed import DistributedGPipe, init_mesh, load_checkpoint
from torchgpipe.shard.nn import Experts

CHUNKS = 3


class Mixture(nn.Module):
    """A layer with experts, that hands on the losses of tokens."""

    def __init__(self, k=2, capacity=0.8):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=DOUBLE)
        self.experts = Experts(6, 5, 5, k, capacity=capacity, balance=0.4, z=0.1, dtype=DOUBLE)

    def forward(self, value):
        x, losses = value if isinstance(value, tuple) else (value, value.new_zeros(len(value)))
        y, aux = self.experts(self.linear(x))
        return x + y, losses + aux


def mixtures():
    """A model of layers with experts."""
    return nn.Sequential(Mixture(1), Mixture(), Mixture(2, None), Mixture(3))


def loss_of(output, target):
    """Return a loss of a sequence, plus the auxiliary losses of its layers."""
    return F.mse_loss(output[0], target) + output[1].mean()


def share(x, data, rank):
    """The part of a replica: a part of each micro-batch that one process has."""
    return torch.cat([each.tensor_split(data)[rank] for each in x.tensor_split(CHUNKS)])


def made(axes, **options):
    with torch.device('meta'):
        module = mixtures()
    mesh = init_mesh(**axes)
    pipe = axes.get('pipe', 1)
    return mesh, DistributedGPipe(
        module, mesh=mesh, chunks=CHUNKS, **{'balance': [4 // pipe] * pipe, **options}
    )


def trained(axes, schedule, options, sizes=(12, 15, 12)):
    """Train on a rank."""
    mesh, model = made(axes, **options)
    data, rank = axes.get('data', 1), mesh.get_local_rank('data')
    return train(
        model,
        lambda x, target: model.step(
            share(x, data, rank), share(target, data, rank), loss_of, schedule=schedule
        ),
        model.clip_grad_norm_,
        sizes,
    )


@cache
def alone():
    """Train the plain layers, with the initial values that all meshes have."""
    return run(1, trained_alone)[0]


def trained_alone():
    layers = nn.Sequential(*copy.deepcopy(list(made({})[1].children())))
    assert not layers[0].experts.communicates

    def step(x, target):
        whole = 0
        for pair in zip(x.tensor_split(CHUNKS), target.tensor_split(CHUNKS)):
            loss = loss_of(layers(pair[0]), pair[1]) * (len(pair[0]) / len(x))
            loss.backward()
            whole += loss.detach()
        return whole

    return train(layers, step, lambda norm: nn.utils.clip_grad_norm_(layers.parameters(), norm))


def train(model, step, clip, sizes=(12, 15, 12)):
    """Take steps; return losses, norms, gradients, parameters and no buffers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    found = []
    for number, size in enumerate(sizes):
        optimizer.zero_grad()
        loss = step(*batch(number, size))
        assert all(x.grad is not None for x in model.parameters())
        grads = {name: full(x.grad) for name, x in model.named_parameters()}
        found.append((loss.item(), clip(0.5).item(), grads))
        optimizer.step()
    return found, {name: full(x) for name, x in model.named_parameters()}, {}


@pytest.mark.parametrize(
    'axes, schedule, options',
    [
        ({}, '1f1b', {}),
        ({'data': 2}, '1f1b', {}),
        ({'data': 2, 'pipe': 2}, 'zb-h1', {}),
        slow({'data': 2, 'pipe': 2}, 'gpipe', {'checkpoint': 'always'}),
        slow({'data': 2, 'pipe': 2}, '1f1b', {'data': 'shard'}),
        slow({'data': 2, 'pipe': 2}, 'looped-bfs', {**OFFLOAD, 'balance': [1] * 4}),
        slow({'data': 3}, '1f1b', {'checkpoint': 'never'}),
    ],
)
def test_training_equals_one_process(axes, schedule, options):
    ranks = axes.get('data', 1) * axes.get('pipe', 1)
    check(run(ranks, trained, axes, schedule, options), alone())


def shared(data):
    """Give the loss and the norm of gradients where one layer stands in two places."""
    with torch.device('meta'):
        layer = Mixture()
        module = nn.Sequential(layer, Mixture(), layer, Mixture())
    mesh = init_mesh(data=data)
    model = DistributedGPipe(module, [4], mesh=mesh, chunks=CHUNKS)
    x, target = (share(x, data, mesh.get_local_rank('data')) for x in batch(0, 12))
    return model.step(x, target, loss_of).item(), model.clip_grad_norm_(1.0).item()


def test_a_layer_in_two_places_is_spread_once():
    (one,) = run(1, shared, 1)
    assert run(2, shared, 2) == [pytest.approx(one, rel=1e-12)] * 2


def tensor_too():
    """Train where ranks along the tensor axis have the same experts."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel

    plan = {'*.linear': ColwiseParallel(output_layouts=Replicate())}
    return trained({'data': 2, 'tensor': 2}, '1f1b', {'tensor_plan': plan})


@pytest.mark.slow
def test_beside_layers_that_are_split():
    check(run(4, tensor_too), alone())


def saved(folder, data):
    """Train, save, and go on; return the losses of later steps."""
    mesh, model = made({'data': 2, 'pipe': 2}, data=data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for number in range(4):
        if number == 2:
            model.save(folder, optimizer)
        x, target = (share(x, 2, mesh.get_local_rank('data')) for x in batch(number, 12))
        optimizer.zero_grad()
        losses.append(model.step(x, target, loss_of).item())
        optimizer.step()
    return losses[2:]


def went_on(folder, axes):
    """Continue from a checkpoint."""
    mesh, model = made(axes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=7.0)
    model.load(folder, optimizer)
    losses = []
    for number in (2, 3):
        x, target = (
            share(x, axes['data'], mesh.get_local_rank('data')) for x in batch(number, 12)
        )
        optimizer.zero_grad()
        losses.append(model.step(x, target, loss_of).item())
        optimizer.step()
    return losses


@pytest.mark.slow
def test_a_checkpoint_goes_on_where_experts_are_spread_in_another_way(tmp_path):
    expected, *_ = run(4, saved, f'{tmp_path}/saved', 'shard')
    for axes in ({'data': 1}, {'data': 3}):
        for losses in run(axes['data'], went_on, f'{tmp_path}/saved', axes):
            assert losses == pytest.approx(expected, rel=1e-12)
    plain = mixtures()
    before = plain[1].experts.up.clone()
    load_checkpoint(f'{tmp_path}/saved', plain)
    assert plain[1].experts.up.shape == before.shape and not torch.equal(
        plain[1].experts.up, before
    )


def accumulated(data):
    """Give the gradients of two steps, reduced at once, and of each."""
    mesh, model = made({'data': 2}, data=data)
    parts = [
        [share(x, 2, mesh.get_local_rank('data')) for x in batch(step, 12)] for step in range(2)
    ]
    with model.no_sync():
        model.step(*parts[1], loss_of)
        model.zero_grad()  # It drops the gradients of that step.
        model.step(*parts[0], loss_of)
    assert all(x.grad is None for x in model.parameters())
    model.step(*parts[1], loss_of)
    several = {name: full(x.grad) for name, x in model.named_parameters()}
    model.zero_grad()
    for each in parts:
        model.step(*each, loss_of)
    for name, x in model.named_parameters():
        torch.testing.assert_close(full(x.grad), several[name], rtol=1e-12, atol=1e-12)


def test_gradients_of_experts_wait_with_the_others():
    for data in ('replicate', 'shard'):
        run(2, accumulated, data)


def frozen(data, later):
    """Train where a layer with experts is frozen when the model is made."""
    with torch.device('meta'):
        module = mixtures()
    module[1].requires_grad_(False)
    mesh = init_mesh(data=2)
    model = DistributedGPipe(module, [4], mesh=mesh, chunks=CHUNKS, data=data)
    model.get_submodule('1').requires_grad_(later)
    x, target = (share(x, 2, mesh.get_local_rank('data')) for x in batch(0, 12))
    model.step(x, target, loss_of)
    return {name: full(x.grad) for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize('data, later', [('replicate', False), ('shard', True)])
def test_frozen_experts_hand_gradients_on(data, later):
    """They may learn later."""
    steps, _, _ = alone()
    for grads in run(2, frozen, data, later):
        missing = {*steps[0][2]} - {*grads}
        assert missing == (
            set() if later else {name for name in steps[0][2] if name.startswith('1.')}
        )
        for name, grad in grads.items():
            torch.testing.assert_close(grad, steps[0][2][name], rtol=1e-12, atol=1e-12)


def evaluated():
    mesh, model = made({'data': 2, 'pipe': 2})
    model.eval()
    output = model(share(batch(0, 12)[0], 2, mesh.get_local_rank('data')))
    return None if output is None else [x.detach() for x in output]


def test_evaluation_exchanges_tokens_too():
    x, _ = batch(0, 12)
    ((whole, _),) = run(1, evaluated_alone)
    found = run(4, evaluated)
    assert found[0] is None and found[2] is None
    for rank in (0, 1):
        torch.testing.assert_close(
            found[2 * rank + 1][0], share(whole, 2, rank), rtol=1e-12, atol=1e-12
        )


def evaluated_alone():
    return [x.detach() for x in made({})[1](batch(0, 12)[0])]


def uneven():
    mesh, model = made({'data': 2, 'pipe': 2})
    x, target = batch(0, 3 if mesh.get_local_rank('data') else 2)
    model.step(x, target, loss_of)


def test_replicas_with_other_numbers_of_micro_batches_are_refused():
    for each in outcomes(4, uneven, timeout=60):
        assert 'number of micro-batches, but ranks have {0: 2, 2: 3}' in each.text


def uncounted():
    mesh, model = made({'data': 2})
    x, target = batch(0, 3)
    if mesh.get_local_rank('data'):
        target[1] = 0
    model.step(x, target, loss_of, normalizer=lambda target: target.ne(0).sum())


def test_a_micro_batch_without_a_backward_is_refused():
    one, two = outcomes(2, uncounted, timeout=60)
    assert 'a step of this model failed on rank 1, so it ended here, too: ' in one.text
    for each in (one, two):
        assert 'micro-batch 1 has nothing that counts' in each.text


def evaluated_in_mode(axes, mode, options):
    """Evaluate and call the model, in a mode without gradients, and train it afterwards."""
    mesh, model = made(axes, **options)
    data, rank = axes.get('data', 1), mesh.get_local_rank('data')
    x, target = (share(part, data, rank) for part in batch(0, 12))
    with mode():
        first, _ = model.eval().evaluate(x, target, loss_of)
        output = model(x)
    model.train()
    second = model.step(x, target, loss_of)
    return first.item(), second.item(), None if output is None else output[0].sum().item()


@pytest.mark.parametrize(
    'axes, options',
    [({'data': 2}, {'data': 'shard'}), ({'data': 2, 'pipe': 2}, {})],
)
def test_in_v0_22_parts_of_layers_could_not_be_evaluated_in_inference_mode(axes, options):
    world = axes['data'] * axes.get('pipe', 1)
    expected = run(world, evaluated_in_mode, axes, torch.no_grad, options)
    assert run(world, evaluated_in_mode, axes, torch.inference_mode, options) == expected


def changed_in_place(mode):
    """Evaluate a model whose first layer changes its input in place."""
    layers = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6, dtype=DOUBLE))
    model = DistributedGPipe(layers, [1, 1], mesh=init_mesh(pipe=2), chunks=2).eval()
    with mode():
        x, target = batch(0, 4)
        loss, _ = model.evaluate(x + 0, target, F.mse_loss)
    return loss.item()


def test_inputs_made_in_inference_mode_may_be_changed_in_place():
    torch.manual_seed(0)
    assert run(2, changed_in_place, torch.inference_mode) == run(
        2, changed_in_place, torch.no_grad
    )
