"""The loss of a mini-batch over ranks: its parameters, its counts, and its scale."""

from math import nan

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from tests.distributed.models import Block, batch, full, perceptron
from tests.distributed.saving import fresh
from tests.distributed.test_layers_shared import Mixture
from tests.shard.processes import run
from torchgpipe.distributed import DistributedGPipe, GradScaler, init_mesh
from torchgpipe.distributed.steps import check_same_losses
from torchgpipe.shard.nn import Experts


def built(axes, **options):
    """A model over some ranks, with the values of `fresh()`."""
    with torch.device('meta'):
        module = perceptron()
    return DistributedGPipe(module, [4, 4], mesh=init_mesh(**axes), **options)


class Scaled(nn.Module):
    """A loss with a parameter, which stands in it twice."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.same = nn.ParameterList([self.weight])

    def forward(self, output, target):
        return (output * self.weight - target).square().mean()


def loss_parameter(data):
    """Give the gradient of a loss's parameter."""
    model, loss = built({'data': 2}, data=data), Scaled()
    x, target = (x.split([2, 3])[torch.distributed.get_rank()] for x in batch(0, 5))
    return model.step(x, target, loss).item(), loss.weight.grad.item()


def test_parameters_of_the_loss_are_reduced_too():
    loss, (x, target) = Scaled(), batch(0, 5)
    value = loss(fresh()(x), target)
    value.backward()
    for found in run(2, loss_parameter, 'shard'):
        assert found == pytest.approx((value.item(), loss.weight.grad.item()), rel=1e-12)


def ignoring(output, target):
    """Return a mean over labels that are not ignored, which the library cannot detect."""
    return F.cross_entropy(output, target, ignore_index=-100)


def regular(output, target):
    """A mean over samples, with one over parameters, which do not depend on them."""
    classes = torch.eye(4)
    return F.mse_loss(output, classes[target]) + F.cross_entropy(classes, torch.arange(4))


def of_other_sizes(axes):
    """Give the loss where replicas have other numbers of samples."""
    mesh = init_mesh(**axes)
    model = DistributedGPipe(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), [1, 1], mesh=mesh)
    sizes = [3, 1] if 'data' in axes else [4]
    x, target = (
        each.split(sizes)[mesh.get_local_rank('data')]
        for each in (torch.ones(4, 3), torch.tensor([0, 1, 2, 3]))
    )
    return [model.step(x, target, loss).item() for loss in (ignoring, regular)]


def test_a_loss_that_replicas_divide_by_their_samples_is_none_of_these():
    (expected,) = run(1, of_other_sizes, {})
    for axes in ({'data': 2}, {'pipe': 2}):
        assert run(2, of_other_sizes, axes) == [pytest.approx(expected)] * 2


def labelled():
    """Mini-batches of which a half has no labels, and of which both have some."""
    for step, there in enumerate([[1, 0], [1, 1], [0, 1], [1, 0]]):
        x, _ = batch(step, 4)
        yield (
            x,
            torch.tensor([0, 3, 5, 2]).where(
                torch.tensor(there).bool().repeat_interleave(2), -100
            ),
        )


def halves(axes, options):
    """Give the loss and the gradients of such mini-batches, of which each replica has a half."""
    model, found = built(axes, chunks=axes.get('pipe', 1), **options), []
    data = axes.get('data', 1)
    for x, target in labelled():
        model.zero_grad()
        rank = torch.distributed.get_rank() % data
        loss = model.step(x.chunk(data)[rank], target.chunk(data)[rank], F.cross_entropy)
        found.append((loss.item(), {name: full(x.grad) for name, x in model.named_parameters()}))
    return found


@pytest.mark.parametrize('axes, options', [({'pipe': 2}, {}), ({'data': 2}, {'data': 'shard'})])
def test_a_micro_batch_or_a_replica_without_labels(axes, options):
    """Whether it has none in the first step, from which messages are known, or in a later one."""
    model, ranks = fresh(), run(2, halves, axes, options)
    for step, (x, target) in enumerate(labelled()):
        model.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        for found in ranks:
            value, grads = found[step]
            assert value == pytest.approx(loss.item(), rel=1e-12) and grads
            for name, grad in grads.items():
                torch.testing.assert_close(
                    grad, model.get_parameter(name).grad, rtol=1e-10, atol=1e-12
                )


def by_a_scaler(cls):
    """Train with a scaler, and infinite gradients on the first rank in one step."""
    model, scaler = built({'pipe': 2}, chunks=2), cls('cpu', init_scale=4.0)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(model.step(*batch(step, 4), F.mse_loss, scale=scaler.scale).item())
        if step == 1 and torch.distributed.get_rank() == 0:
            model.get_parameter('0.up.bias').grad[0] = float('inf')
        scaler.step(optimizer)
        scaler.update()
    return losses, scaler.get_scale()


@pytest.mark.parametrize('cls', [ShardedGradScaler, GradScaler])
def test_all_ranks_follow_a_scaler(cls):
    """Also one without the last stage, which has no loss to scale."""
    model, losses = fresh(), []
    for step in range(3):
        x, target = batch(step, 4)
        loss = F.mse_loss(model(x), target)
        losses.append(loss.item())
        with torch.no_grad():
            for p, grad in zip(model.parameters(), torch.autograd.grad(loss, model.parameters())):
                p -= 0.1 * grad * (step != 1)
    assert run(2, by_a_scaler, cls) == [(pytest.approx(losses, rel=1e-12), 2.0)] * 2


def mixture():
    """Return a residual mixture of experts, of which each replica has some."""
    return Mixture(Experts(6, 8, experts=4, k=2, balance=0))


def with_parts(axes, make, plan, scales):
    """Train with parts of split layers and plain parameters."""
    torch.manual_seed(0)
    mesh = init_mesh(**axes)
    model = DistributedGPipe(
        nn.Sequential(make(), nn.Linear(6, 6)).double(), [2], mesh=mesh, tensor_plan=plan
    )
    optimizer, losses = torch.optim.AdamW(model.parameters(), 0.1, foreach=False), []
    scaler = GradScaler('cpu', init_scale=4.0, enabled=scales)
    replicas, replica = axes.get('data', 1), mesh.get_local_rank('data')
    for step in range(3):
        x, target = (part.chunk(replicas)[replica] for part in batch(step, 8))
        losses.append(model.step(x, target, F.mse_loss, scale=scaler.scale).item())
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    'axes, make, plan',
    [
        ({'tensor': 2}, Block, {'0.up': ColwiseParallel(), '0.down': RowwiseParallel()}),
        ({'data': 2}, mixture, {}),
    ],
)
def test_in_v0_22_no_scaler_took_parts_of_layers_beside_plain_parameters(axes, make, plan):
    expected = run(2, with_parts, axes, make, plan, False)
    assert run(2, with_parts, axes, make, plan, True) == [
        pytest.approx(losses, rel=1e-10) for losses in expected
    ]


def skipped_with_parts():
    """Take two steps, with an infinite gradient in the second rank's part in the first one."""
    torch.manual_seed(0)
    plan = {'0.up': ColwiseParallel(), '0.down': RowwiseParallel()}
    model = DistributedGPipe(
        nn.Sequential(Block(), nn.Linear(6, 6)).double(),
        [2],
        mesh=init_mesh(tensor=2),
        tensor_plan=plan,
    )
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), GradScaler('cpu', init_scale=4.0)
    before = full(model.get_parameter('0.up.weight').detach()).clone()
    changed = []
    for step in range(2):
        model.step(*batch(step, 4), F.mse_loss, scale=scaler.scale)
        if step == 0 and torch.distributed.get_rank() == 1:
            model.get_parameter('0.up.weight').grad.to_local()[0] = float('inf')
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = full(model.get_parameter('0.up.weight').detach())
        changed.append(not torch.equal(after, before))
    return changed, scaler.get_scale()


def test_all_ranks_skip_a_step_if_a_part_is_infinite():
    assert run(2, skipped_with_parts) == [([False, True], 2.0)] * 2


def without_parameters():
    """Take a step with infinite gradients; the second rank has no parameters."""
    model = DistributedGPipe(
        nn.Sequential(nn.Linear(6, 6).double(), nn.Tanh()), [1, 1], mesh=init_mesh(pipe=2)
    )
    parameters = [*model.parameters()]
    optimizer = torch.optim.SGD(parameters or [torch.zeros(())], 0.1)
    scaler = GradScaler('cpu', init_scale=4.0)
    model.step(*batch(0, 4), F.mse_loss, scale=scaler.scale)
    for x in parameters:
        x.grad.fill_(float('inf'))
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def test_a_rank_without_parameters_follows_a_scaler():
    assert run(2, without_parameters) == [2.0, 2.0]


def test_in_v0_28_a_loss_that_is_no_number_on_one_rank_equalled_the_others():
    check_same_losses({0: 1.0, 1: 1.001})
    check_same_losses({0: nan, 1: nan})
    for losses in ({0: 1.0, 1: nan}, {0: nan, 1: 1.0}, {0: 1.0, 1: 1.1}):
        with pytest.raises(RuntimeError, match='ranks along the tensor axis compute one loss'):
            check_same_losses(losses)
