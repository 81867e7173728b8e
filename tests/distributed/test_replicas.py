"""Gradients of replicas: put together once in a step, or once in several."""
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from tests.devices import cpu_only
from tests.distributed.models import batch, full, perceptron, tied
from tests.shard.processes import run
from torchgpipe.distributed import DistributedGPipe, init_mesh

pytestmark = cpu_only('processes meet by gloo')


def accumulated(axes, data, make):
    """Add up three steps; give the gradients, and those of one step of all."""
    mesh = init_mesh(**axes)
    with torch.device('meta'):
        module = make()
    model = DistributedGPipe(module, [4, 4], mesh=mesh, chunks=2, data=data)
    rank = mesh.get_local_rank('data')
    parts = [tuple(x.chunk(axes.get('data', 1))[rank] for x in batch(step, 4))
             for step in range(3)]
    with model.no_sync():
        model.step(*parts[2], F.mse_loss)
        model.zero_grad()  # It drops what that has left.
        for x, target in parts[:2]:
            model.step(x, target, F.mse_loss)
    assert all(x.grad is None for x in model.parameters())
    model.step(*parts[2], F.mse_loss)
    several = {name: full(x.grad) for name, x in model.named_parameters()}
    model.zero_grad()
    for x, target in parts:
        model.step(x, target, F.mse_loss)
    return several, {name: full(x.grad) for name, x in model.named_parameters()}


@pytest.mark.parametrize('ranks, axes, data', [
    (4, {'data': 2, 'pipe': 2}, 'replicate'), (4, {'data': 2, 'pipe': 2}, 'shard'),
    (2, {'pipe': 2}, 'replicate')])
@pytest.mark.parametrize('make', [perceptron, pytest.param(tied, marks=pytest.mark.slow)])
def test_steps_without_reduction_are_added_up(ranks, axes, data, make):
    for several, each in run(ranks, accumulated, axes, data, make):
        assert several.keys() == each.keys()
        for name, grad in several.items():
            torch.testing.assert_close(grad, each[name], rtol=1e-12, atol=1e-12)


def reductions(data):
    """Count the collectives of gradients in a step, of so many micro-batches."""
    mesh = init_mesh(data=2, pipe=1)
    model = DistributedGPipe(perceptron(), [4, 4], mesh=mesh, chunks=4, data=data)
    x, target = batch(0, 8)
    model.step(x, target, F.mse_loss)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model.step(x, target, F.mse_loss)
    return [event.name for event in profile.events() if 'reduce' in event.name
            and event.name.startswith('gloo:')]


@pytest.mark.parametrize('data', ['replicate', 'shard'])
def test_a_step_reduces_once(data):
    for names in run(2, reductions, data):
        assert len(names) == 1, names


def unused(data):
    """Give which parameters have a gradient, where a layer is used on the second replica only."""
    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.used = nn.Linear(6, 6, dtype=torch.float64)
            self.other = nn.Linear(6, 6, dtype=torch.float64)
            self.never = nn.Linear(6, 6, dtype=torch.float64)

        def forward(self, x):
            return self.other(x) if x.sum() > 0 else self.used(x)

    mesh = init_mesh(data=2)
    model = DistributedGPipe(nn.Sequential(Some()), [1], mesh=mesh, data=data)
    x = torch.ones(2, 6, dtype=torch.float64) * (1 if mesh.get_local_rank('data') else -1)
    model.step(x, x, F.mse_loss)
    return {name: x.grad is not None for name, x in model.named_parameters()}


@pytest.mark.parametrize('data', ['replicate', 'shard'])
def test_what_one_replica_uses_has_a_gradient_on_all_and_what_none_uses_has_none(data):
    first, second = run(2, unused, data)
    assert first == second == {
        f'0.{name}.{kind}': name != 'never' for name in ('used', 'other', 'never')
        for kind in ('weight', 'bias')}


def values():
    """Give what a model with values of its own on each rank becomes."""
    torch.manual_seed(torch.distributed.get_rank())
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[1].running_mean.normal_()
    module[2].weight = nn.Parameter(torch.randn(3, 6)[:, ::2])
    own = {name: x.clone() for name, x in module.state_dict().items()}
    model = DistributedGPipe(module, [2, 1], mesh=init_mesh(data=2, pipe=2))
    return own, dict(model.state_dict())


def test_a_module_with_values_keeps_those_of_the_first_replica():
    found = run(4, values)
    for rank, (_, state) in enumerate(found):
        first, _ = found[rank % 2]
        for name, x in state.items():
            assert torch.equal(x, first[name])


def sharded():
    """Tell whether parameters are sharded after a call, and after a step."""
    model = DistributedGPipe(perceptron(), [8], mesh=init_mesh(data=2), data='shard')
    x, target = batch(0, 4)
    model(x)
    found = [all(isinstance(each, DTensor) for each in model.parameters())]
    model.step(x, target, F.mse_loss)
    return [*found, all(isinstance(each, DTensor) for each in model.parameters())]


def test_parameters_are_shards_but_within_steps_and_calls():
    assert run(2, sharded) == [[True, True]] * 2


class Either(nn.Module):
    """A layer of which replicas use other parts."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (nn.Linear(6, 6, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        return self.other(x) if x.sum() > 0 else self.one(x)


def parts(data):
    """Give gradients where each replica uses one part."""
    mesh = init_mesh(data=2)
    model = DistributedGPipe(nn.Sequential(Either()), [1], mesh=mesh, data=data)
    x = torch.ones(2, 6, dtype=torch.float64) * (1 if mesh.get_local_rank('data') else -1)
    model.step(x, x, F.mse_loss)
    return {name: full(each.grad) for name, each in model.named_parameters()}


def test_in_other_replicas_other_parameters_may_learn():
    (one, _), (other, _) = run(2, parts, 'replicate'), run(2, parts, 'shard')
    assert one.keys() == other.keys()
    assert all(torch.equal(grad, other[name]) for name, grad in one.items())


def thawed(data):
    """Give gradients where what learns changes from step to step, and those of the input."""
    module = perceptron(2)
    module[0].requires_grad_(False)
    model = DistributedGPipe(module, [1, 1], mesh=init_mesh(data=2), data=data)
    found = []
    for step, learns in enumerate([(False, True), (True, False), (False, True), (True, True)]):
        model.zero_grad()
        for layer, each in zip(model.children(), learns):
            layer.requires_grad_(each)
        x, target = (part.chunk(2)[torch.distributed.get_rank()] for part in batch(step, 4))
        model.step(x.requires_grad_(), target, F.mse_loss)
        found.append((x.grad, {name: full(x.grad) for name, x in model.named_parameters()
                               if x.grad is not None}))
    return found


@pytest.mark.parametrize('data', ['replicate', 'shard'])
def test_what_learns_may_change(data):
    """Also what was frozen when the model was made, and so is on all replicas."""
    torch.manual_seed(0)
    module, ranks = perceptron(2), run(2, thawed, data)
    for step, learns in enumerate([(False, True), (True, False), (False, True), (True, True)]):
        module.zero_grad()
        for layer, each in zip(module, learns):
            layer.requires_grad_(each)
        x, target = batch(step, 4)
        F.mse_loss(module(x.requires_grad_()), target).backward()
        assert torch.allclose(torch.cat([found[step][0] for found in ranks]), x.grad)
        expected = {name: x.grad for name, x in module.named_parameters() if x.grad is not None}
        for found in ranks:
            assert found[step][1].keys() == expected.keys()
            for name, grad in found[step][1].items():
                torch.testing.assert_close(grad, expected[name], rtol=1e-10, atol=1e-12)
