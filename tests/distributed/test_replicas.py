"""Gradients of replicas: put together once in a step, or once in several."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.nn import functional as F

from tests.distributed.models import batch, full, perceptron, tied
from tests.shard.processes import run
from torchgpipe.distributed import DistributedGPipe, init_mesh


def accumulated(axes, data, make):
    """Accumulate gradients over three steps. Return them, and the gradients of one step of all."""
    mesh = init_mesh(**axes)
    with torch.device('meta'):
        module = make()
    model = DistributedGPipe(module, [4, 4], mesh=mesh, chunks=2, data=data)
    rank = mesh.get_local_rank('data')
    parts = [
        tuple(x.chunk(axes.get('data', 1))[rank] for x in batch(step, 4)) for step in range(3)
    ]
    with model.no_sync():
        model.step(*parts[2], F.mse_loss)
        model.zero_grad()  # It drops the gradients of that step.
        for x, target in parts[:2]:
            model.step(x, target, F.mse_loss)
    assert all(x.grad is None for x in model.parameters())
    model.step(*parts[2], F.mse_loss)
    several = {name: full(x.grad) for name, x in model.named_parameters()}
    model.zero_grad()
    for x, target in parts:
        model.step(x, target, F.mse_loss)
    return several, {name: full(x.grad) for name, x in model.named_parameters()}


@pytest.mark.parametrize(
    'ranks, axes, data, make',
    [
        (4, {'data': 2, 'pipe': 2}, 'replicate', perceptron),
        (4, {'data': 2, 'pipe': 2}, 'shard', tied),
        (2, {'pipe': 2}, 'replicate', tied),
    ],
)
def test_steps_without_reduction_are_added_up(ranks, axes, data, make):
    for several, each in run(ranks, accumulated, axes, data, make):
        assert several.keys() == each.keys()
        for name, grad in several.items():
            torch.testing.assert_close(grad, each[name], rtol=1e-12, atol=1e-12)


def half(x):
    """Halve a gradient, when it is complete."""
    x.grad.mul_(0.5)


def hooked_twice(data):
    """Take two steps without zero_grad; a hook sees the sum of both."""
    model = DistributedGPipe(perceptron(2), [2], mesh=init_mesh(data=2), chunks=2, data=data)
    for name, x in model.named_parameters():
        if 'bias' in name:
            x.register_post_accumulate_grad_hook(half)
    for step in range(2):
        x, target = (part.chunk(2)[torch.distributed.get_rank()] for part in batch(step, 8))
        model.step(x, target, F.mse_loss)
    return {name: full(x.grad) for name, x in model.named_parameters()}


@pytest.mark.parametrize('data', ['replicate', 'shard'])
def test_in_v0_28_a_hook_of_a_shard_saw_the_gradient_of_one_step_only(data):
    torch.manual_seed(0)
    module = perceptron(2)
    for name, x in module.named_parameters():
        if 'bias' in name:
            x.register_post_accumulate_grad_hook(half)
    for step in range(2):
        x, target = batch(step, 8)
        F.mse_loss(module(x), target).backward()
    for grads in run(2, hooked_twice, data):
        for name, x in module.named_parameters():
            torch.testing.assert_close(grads[name], x.grad, rtol=1e-10, atol=1e-12)


class Later(nn.Module):
    """A layer that may get a second parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x):
        return x * self.weight + getattr(self, 'bias', 0)


def copied_while_gradients_wait():
    """Copy a model with gradients that wait, to which a parameter was added."""
    layers = nn.Sequential(Later(), nn.Tanh(), Later())
    model = DistributedGPipe(layers, [3], mesh=init_mesh(data=2), chunks=2)
    x, target = (part.chunk(2)[torch.distributed.get_rank()] for part in batch(0, 8))
    with model.no_sync():
        model.step(x, target, F.mse_loss)
    model.get_submodule('0').bias = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    copy = deepcopy(model)
    for each in (model, copy):
        each.step(x, target, F.mse_loss)
    return [{name: x.grad for name, x in each.named_parameters()} for each in (model, copy)]


def test_a_copy_has_the_gradients_that_wait_also_after_a_parameter_was_added():
    for grads, grads_of_copy in run(2, copied_while_gradients_wait):
        assert grads.keys() == grads_of_copy.keys() == {'0.weight', '0.bias', '2.weight'}
        for name, grad in grads.items():
            torch.testing.assert_close(grads_of_copy[name], grad, rtol=0, atol=0)


class Weighted(nn.Module):
    """A loss with a weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, output, target):
        return F.mse_loss(output * self.weight, target)


def losses_in_turn():
    """Add up three steps, of which the second one has another loss; return a weight's gradient."""
    model = DistributedGPipe(perceptron(2), [2], mesh=init_mesh(data=2), chunks=2)
    loss = Weighted()
    parts = [
        tuple(x.chunk(2)[torch.distributed.get_rank()] for x in batch(step, 8))
        for step in range(3)
    ]
    with model.no_sync():
        model.step(*parts[0], loss)
        model.step(*parts[1], F.mse_loss)
    model.step(*parts[2], loss)
    return loss.weight.grad


def test_a_gradient_of_a_loss_waits_while_steps_have_another_loss():
    torch.manual_seed(0)
    module, loss = perceptron(2), Weighted()
    for step in (0, 2):
        x, target = batch(step, 8)
        loss(module(x), target).backward()
    for grad in run(2, losses_in_turn):
        torch.testing.assert_close(grad, loss.weight.grad, rtol=1e-10, atol=1e-12)


class Some(nn.Module):
    """A layer of which replicas use other parts, and none uses the last one."""

    def __init__(self):
        super().__init__()
        self.used, self.other, self.never = (
            nn.Linear(6, 6, dtype=torch.float64) for _ in range(3)
        )

    def forward(self, x):
        return self.other(x) if x.sum() > 0 else self.used(x)


def parts(data):
    """Return the gradients where each replica uses one part, or None."""
    mesh = init_mesh(data=2)
    model = DistributedGPipe(nn.Sequential(Some()), [1], mesh=mesh, data=data)
    x = torch.ones(2, 6, dtype=torch.float64) * (1 if mesh.get_local_rank('data') else -1)
    model.step(x, x, F.mse_loss)
    grads = {name: each.grad for name, each in model.named_parameters()}
    return {name: None if grad is None else full(grad) for name, grad in grads.items()}


def test_a_parameter_that_one_replica_uses_has_a_gradient_on_all_and_an_unused_one_has_none():
    expected, *others = [*run(2, parts, 'replicate'), *run(2, parts, 'shard')]
    for name, grad in expected.items():
        assert (grad is None) == ('never' in name)
        for found in others:
            assert found.keys() == expected.keys()
            assert found[name] is None if grad is None else torch.equal(found[name], grad)


def values():
    """Return the values of a model before and after wrapping, which differ by rank before."""
    torch.manual_seed(torch.distributed.get_rank())
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    module[1].running_mean.normal_()
    module[2].weight = nn.Parameter(torch.randn(3, 6)[:, ::2])
    own = {name: x.clone() for name, x in module.state_dict().items()}
    model = DistributedGPipe(module, [2, 1], mesh=init_mesh(data=2, pipe=2))
    return own, dict(model.state_dict())


def test_a_module_with_values_keeps_the_values_of_the_first_replica():
    found = run(4, values)
    for rank, (_, state) in enumerate(found):
        first, _ = found[rank % 2]
        for name, x in state.items():
            assert torch.equal(x, first[name])


def thawed(data):
    """Return gradients, also of the input, where the trained layers change from step to step."""
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
        found.append(
            (
                x.grad,
                {name: full(x.grad) for name, x in model.named_parameters() if x.grad is not None},
            )
        )
    return found


@pytest.mark.parametrize('data', ['replicate', 'shard'])
def test_other_layers_may_learn_in_each_step(data):
    """This includes layers that were frozen at first, and so are whole on all replicas."""
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


class Seen(nn.Linear):
    """A layer that notes the types that it computes with."""

    def forward(self, x):
        self.seen = x.dtype, self.weight.dtype
        return super().forward(x)


def wide():
    """Return two layers with values in double precision."""
    torch.manual_seed(0)
    return nn.Sequential(
        Seen(6, 8, dtype=torch.float64), nn.Tanh(), Seen(8, 6, dtype=torch.float64)
    )


def mixed(axes, precision, chunks):
    """Train with a policy; give types, the loss, gradients, the output and the evaluation."""
    mesh = init_mesh(**axes)
    pipe = axes.get('pipe', 1)
    model = DistributedGPipe(
        wide(),
        [3] if pipe == 1 else [2, 1],
        mesh=mesh,
        chunks=chunks,
        data='shard',
        mp_policy=precision,
    )
    data, rank = axes.get('data', 1), mesh.get_local_rank('data')
    x, target = (each.chunk(data)[rank] for each in batch(0, 16))
    types = []

    def loss_fn(output, target):
        types.append(output.dtype)
        return F.mse_loss(output, target)

    loss, output = model.step(
        x, target, loss_fn, return_output=True, schedule='zb-h1' if pipe > 1 else '1f1b'
    )
    types += [each for layer in model if isinstance(layer, Seen) for each in layer.seen]
    grads = {name: full(x.grad) for name, x in model.named_parameters()}
    return types, loss, grads, output, model.evaluate(x, target, F.mse_loss)[0]


@pytest.mark.parametrize('axes', [{}, {'data': 2, 'pipe': 2}])
def test_types_of_a_policy_follow_fsdp(axes):
    policy = MixedPrecisionPolicy(torch.float32, torch.float64, torch.float64)
    module = wide().float()
    x, target = batch(0, 16)
    expected = F.mse_loss(module(x.float()).double(), target)
    expected.backward()
    ranks = axes.get('data', 1) * axes.get('pipe', 1)
    for rank, (types, loss, grads, output, evaluated) in enumerate(
        run(ranks, mixed, axes, policy, 2)
    ):
        is_last = axes.get('pipe', 1) == 1 or rank % 2
        assert {*types} == ({torch.float32, torch.float64} if is_last else {torch.float32})
        assert types[:2] == [torch.float64] * 2 if is_last else True
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(evaluated, loss, rtol=1e-6, atol=0)
        assert output is None or output.dtype == torch.float64
        for name, grad in grads.items():
            assert grad.dtype == torch.float64
            torch.testing.assert_close(
                grad, module.get_parameter(name).grad.double(), rtol=1e-5, atol=1e-6
            )


def test_micro_batches_add_up_in_the_type_of_the_reduction():
    """In half precision, sixteen of them would lose digits that one does not."""
    x, target = batch(0, 16)
    module = wide()
    F.mse_loss(module(x), target).backward()

    def error(reduce):
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce, torch.float64)
        ((_, _, grads, _, _),) = run(1, mixed, {}, policy, 16)
        return sum((grad - module.get_parameter(name).grad).norm() for name, grad in grads.items())

    assert error(torch.float64) < 0.8 * error(torch.bfloat16)


def offloaded():
    """Train with parameters that wait on the host, which is the device."""
    model = DistributedGPipe(
        wide(), [3], mesh=init_mesh(data=2), data='shard', offload_policy=CPUOffloadPolicy()
    )
    x, target = (each.chunk(2)[torch.distributed.get_rank()] for each in batch(0, 8))
    model.step(x, target, F.mse_loss)
    return {name: full(x.grad) for name, x in model.named_parameters()}


def test_parameters_may_wait_on_a_host_that_is_the_device():
    module, (x, target) = wide(), batch(0, 8)
    F.mse_loss(module(x), target).backward()
    for grads in run(2, offloaded):
        for name, grad in grads.items():
            torch.testing.assert_close(grad, module.get_parameter(name).grad)


def cast_and_frozen():
    """Train in another type, with a frozen layer, and a checkpoint of each micro-batch."""
    module = wide().float()
    module[0].requires_grad_(False)
    model = DistributedGPipe(
        module,
        [3],
        mesh=init_mesh(data=2),
        data='shard',
        chunks=2,
        checkpoint='always',
        mp_policy=MixedPrecisionPolicy(torch.float64),
    )
    x, target = (each.chunk(2)[torch.distributed.get_rank()] for each in batch(0, 8))
    for _ in range(2):
        model.zero_grad()
        model.step(x.float(), target, F.mse_loss)
    return {name: full(x.grad) for name, x in model.named_parameters() if x.grad is not None}


def test_a_policy_casts_frozen_parameters_too():
    module, (x, target) = wide(), batch(0, 8)
    module.float().double()[0].requires_grad_(False)
    F.mse_loss(module(x.float().double()), target).backward()
    for grads in run(2, cast_and_frozen):
        assert grads.keys() == {
            name for name, x in module.named_parameters() if x.grad is not None
        }
        for name, grad in grads.items():
            torch.testing.assert_close(grad, module.get_parameter(name).grad.float())
