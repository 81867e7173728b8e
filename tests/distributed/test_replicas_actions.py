"""Gathers and reductions within a step: memory, their order over ranks, and late gradients."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from tests.distributed.models import Behind, batch, full, perceptron
from tests.distributed.test_model import alone, check, trained
from tests.shard.processes import Failure, outcomes, run
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe, init_mesh


def wide():
    """Return layers of 8 stages with equal parameters."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)])


def whole_bytes(most, schedule):
    """Return the most bytes of whole parameters in a step, of one stage, and of the shards."""
    model = DistributedGPipe(
        wide(),
        [1] * 8,
        mesh=init_mesh(data=2, pipe=2),
        chunks=8,
        data='shard',
        max_active_stages=most,
    )
    replicas, peak = model._rank.replicas, [0]

    def at(_):
        peak[0] = max(
            peak[0], sum(x.untyped_storage().nbytes() for x in replicas.whole_parameters())
        )

    with mock.patch.object(model._steps, '_at', at):
        for _ in range(2):
            model.step(torch.ones(8, 32), torch.ones(8, 32), F.mse_loss, schedule=schedule)
    stage = 4 * (32 * 32 + 32)
    shards = sum(x.grad.to_local().nbytes for x in model.parameters())
    return peak[0], stage, shards


@pytest.mark.parametrize(
    'schedule, most', [('interleaved', 1), ('looped-bfs', 2), ('interleaved', None)]
)
def test_no_more_stages_are_whole_than_allowed(schedule, most):
    for peak, stage, shards in run(4, whole_bytes, most, schedule):
        assert peak == (most or 3) * stage
        assert shards == 4 * stage / 2


def collectives(data, schedule):
    """Return the collectives of this rank over replicas in a step, in order, with their sizes."""
    stages = 8 if schedule == 'interleaved' else 2
    model = DistributedGPipe(
        wide(),
        [8 // stages] * stages,
        mesh=init_mesh(data=2, pipe=2),
        chunks=4,
        data=data,
        compare_every=0,
    )
    x = torch.ones(4, 32)
    model.step(x, x, F.mse_loss, schedule=schedule)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
    ) as profile:
        model.step(x, x, F.mse_loss, schedule=schedule)
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [
        (event.name, str(event.input_shapes))
        for event in events
        if event.name.startswith('c10d::')
        and 'reduce' in event.name
        or event.name == 'c10d::_allgather_base_'
    ]


@pytest.mark.parametrize(
    'data, schedule', [('replicate', 'interleaved'), ('shard', 'interleaved'), ('shard', '1f1b')]
)
def test_each_stage_is_reduced_once_in_one_order_on_all_replicas(data, schedule):
    found = run(4, collectives, data, schedule)
    assert found[0] == found[2] and found[1] == found[3]
    for names in found:
        assert sum('reduce' in name for name, _ in names) == (
            4 if schedule == 'interleaved' else 1
        )
        assert ('allgather' in str(names)) == (data == 'shard')


@pytest.mark.parametrize('data, sizes', [('shard', (8, 3)), ('replicate', (3, 8))])
def test_replicas_may_have_other_numbers_of_micro_batches(data, sizes):
    """The second replica has one micro-batch, or two."""
    found = run(
        4,
        trained,
        {'data': 2, 'pipe': 2},
        'perceptron',
        8,
        None,
        {'schedule': 'interleaved', 'sizes': sizes},
        {'data': data, **({'max_active_stages': 2} if data == 'shard' else {})},
    )
    check(found, alone('perceptron', sizes=sizes))


class Uses(nn.Module):
    """A layer that uses a parameter of another layer, for large inputs."""

    def __init__(self, other):
        super().__init__()
        self.inner = nn.Linear(6, 6, dtype=torch.float64)
        self.others = [other]

    def forward(self, x):
        return self.inner(x) * (self.others[0].weight.sum() if x.sum() > 0 else 1)


def later(data, large=slice(0, 8)):
    """Train on two replicas, where the first stage uses a parameter of the second one."""
    torch.manual_seed(0)
    last = nn.Linear(6, 6, dtype=torch.float64)
    layers = nn.Sequential(Uses(last), last)
    x, target = -torch.ones(8, 6, dtype=torch.float64), torch.ones(8, 6, dtype=torch.float64)
    x[large] = 1
    if not data:
        model = GPipe(layers, [2], devices=['cpu'], chunks=8)
        own = slice(0, 8)
    else:
        model = DistributedGPipe(
            layers, [1, 1], mesh=init_mesh(data=2), chunks=4, data=data, checkpoint='never'
        )
        number = torch.distributed.get_rank()
        own = slice(4 * number, 4 * number + 4)
    for _ in range(2):
        model.step(x[own], target[own], F.mse_loss)
    return [each.grad for each in model.parameters()]


def test_a_gradient_after_the_reduction_of_its_parameter_is_reduced_as_well():
    for large in (slice(0, 8), slice(7, 8)):
        (expected,) = run(1, later, '', large)
        for grads in run(2, later, 'replicate', large):
            torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-12)


def test_a_parameter_that_another_stage_uses_is_refused_with_shards():
    for large, text in (
        (slice(0, 8), 'has to have it as a parameter as well'),
        (slice(7, 8), "'1.weight' is used by a layer of another stage"),
    ):
        results = outcomes(2, later, 'shard', large)
        assert all(isinstance(result, Failure) for result in results)
        assert any(text in result.text for result in results), results[0].text


def refused(cases):
    """Make models with options that do not fit."""
    for options, text in cases:
        with pytest.raises(ValueError, match=text):
            DistributedGPipe(perceptron(), [4, 4], mesh=init_mesh(), **options)


def test_options_that_do_not_fit_are_refused():
    number = "max_active_stages is a positive number, .*but is {}, with data='{}'"
    cases = [
        ({'max_active_stages': 0, 'data': 'shard'}, number.format(0, 'shard')),
        ({'max_active_stages': 2}, number.format(2, 'replicate')),
        (
            {'mp_policy': MixedPrecisionPolicy(torch.float32)},
            "mp_policy are of FSDP2: they take data='shard'",
        ),
    ]
    run(1, refused, cases)


def frozen_while_waiting(data):
    """Freeze a layer of the last rank while its gradient waits, and train it later.

    Returns:
        Whether a step raised, whether gradients were there after that, and the gradients after
        two steps.
    """
    model = DistributedGPipe(
        perceptron(4), [1] * 4, mesh=init_mesh(data=2, pipe=2), chunks=2, data=data
    )
    number = model._rank.mesh.data.rank
    x, target = (each.chunk(2)[number] for each in batch(0, 8))
    with model.no_sync():
        model.step(x, target, F.mse_loss, schedule='looped-bfs')
    for name, each in model.named_parameters():
        each.requires_grad_(not name.startswith('3.'))
    with pytest.raises(RuntimeError) as error:
        model.step(x, target, F.mse_loss, schedule='looped-bfs')
    there = [each.grad for each in model.parameters() if each.grad is not None]
    for each in model.parameters():
        each.requires_grad_(True)
    model.step(x, target, F.mse_loss, schedule='looped-bfs')
    return (
        str(error.value),
        there,
        {name: full(each.grad) for name, each in model.named_parameters()},
    )


def twice():
    """Return the gradients of the whole mini-batch, twice."""
    model = DistributedGPipe(perceptron(4), [4], mesh=init_mesh())
    for _ in range(2):
        model.step(*batch(0, 8), F.mse_loss)
    return {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize('data', ['replicate', 'shard'])
def test_all_ranks_raise_if_a_gradient_of_one_waits(data):
    (expected,) = run(1, twice)
    for rank, (error, there, grads) in enumerate(run(4, frozen_while_waiting, data)):
        assert 'a gradient waits from a step within no_sync()' in error and not there
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-12, atol=1e-12)


def replaced_while_waiting(steps):
    """Replace a parameter while its gradient waits; return the error of a step that reduces."""
    model = DistributedGPipe(perceptron(2), [2], mesh=init_mesh(data=2), chunks=2)
    x, target = (each.chunk(2)[dist.get_rank()] for each in batch(0, 8))
    layer = model.get_submodule('0')
    for _ in range(steps):
        with model.no_sync():
            model.step(x, target, F.mse_loss)
        name, parameter = next(layer.named_parameters())
        owner, _, key = name.rpartition('.')
        setattr(layer.get_submodule(owner), key, nn.Parameter(parameter.detach().clone()))
    with pytest.raises(RuntimeError) as error:
        model.step(x, target, F.mse_loss)
    return str(error.value)


@pytest.mark.parametrize('steps', [1, 2])
def test_a_gradient_of_a_parameter_that_was_replaced_is_not_reduced(steps):
    for error in run(2, replaced_while_waiting, steps):
        assert 'a gradient waits from a step within no_sync()' in error


def other_loss_while_waiting():
    """Take two losses in turn; return the error of a step that reduces."""
    model = DistributedGPipe(perceptron(2), [2], mesh=init_mesh(data=2), chunks=2)
    x, target = (each.chunk(2)[dist.get_rank()] for each in batch(0, 8))
    torch.manual_seed(0)
    first, second = [Scaled().double() for _ in range(2)]
    for loss in (first, second):
        with model.no_sync():
            model.step(x, target, loss)
    with pytest.raises(RuntimeError) as error:
        model.step(x, target, second)
    return str(error.value)


class Scaled(nn.Module):
    """A loss with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return F.mse_loss(output * self.scale, target)


def test_a_gradient_of_another_loss_is_not_reduced():
    for error in run(2, other_loss_while_waiting):
        assert 'a gradient waits from a step within no_sync()' in error


def behind(data, k, axes):
    """Train with a loss that has layer ``k``, and return its gradient."""
    model = DistributedGPipe(perceptron(2), [1, 1], mesh=init_mesh(**axes), chunks=2, data=data)
    x, target = (
        each.chunk(axes.get('data', 1))[model._rank.mesh.data.rank] for each in batch(0, 8)
    )
    for _ in range(2):
        model.step(x, target, Behind(model.get_submodule(str(k))))
    return full(model.get_parameter(f'{k}.up.weight').grad)


def test_a_loss_may_have_a_layer_of_the_last_stage():
    (expected,) = run(1, behind, 'replicate', 1, {})
    for grad in run(2, behind, 'shard', 1, {'data': 2}):
        torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


def test_a_loss_with_a_layer_of_another_stage_is_refused_with_shards():
    for each in outcomes(2, behind, 'shard', 0, {'data': 2}):
        assert isinstance(each, Failure)
        assert "loss_fn has '0.up.weight', a parameter of another stage" in each.text


def kept(data):
    """Return the reductions of a step without synchronization."""
    model = DistributedGPipe(
        perceptron(2), [1, 1], mesh=init_mesh(data=2), compare_every=0, data=data
    )
    x, target = batch(0, 4)
    with model.no_sync(), torch.profiler.profile() as profile:
        model.step(x, target, F.mse_loss)
    return [event.name for event in profile.events() if 'reduce' in event.name]


def test_a_step_without_synchronization_reduces_nothing():
    for data in ('replicate', 'shard'):
        assert run(2, kept, data) == [[], []], data


def types_of_parameters():
    """Return their types after a call, a step, and a step whose loss raises on all ranks."""

    def fails(output, target):
        raise ValueError('no loss')

    def types():
        return {type(each).__name__ for each in model.parameters()}

    model = DistributedGPipe(perceptron(2), [1, 1], mesh=init_mesh(data=2), chunks=2, data='shard')
    x, target = batch(0, 4)
    model(x)
    after_a_call = types()
    model.step(x, target, F.mse_loss)
    after_a_step = types()
    with pytest.raises((ValueError, RuntimeError)):
        model.step(x, target, fails)
    return after_a_call, after_a_step, types()


def test_parameters_are_shards_but_within_steps_and_calls():
    assert run(2, types_of_parameters) == [({'DTensor'},) * 3] * 2
