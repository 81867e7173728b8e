"""The start of a step: how often ranks exchange facts, and targets that do not say their size."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.models import batch, perceptron
from tests.distributed.test_layers_tensor import plan
from tests.shard.processes import run
from torchgpipe.distributed import DistributedGPipe, init_mesh, rank


def mean_square(output, target):
    """Return a loss that ignores the target."""
    return output.square().mean()


def exchanges(axes, loss_fn, has_target, task):
    """Return the loss of the fourth step or evaluation, and the exchanges of facts in it."""
    mesh = init_mesh(**axes)
    model = DistributedGPipe(perceptron(2), [1, 1], mesh=mesh, chunks=3)
    data = model._rank.mesh.data
    agree = rank.agree
    tasks = []

    def counted(task, *args):
        tasks.append(task)
        return agree(task, *args)

    rank.agree = counted
    try:
        for _ in range(4):
            tasks.clear()
            x, target = (part.chunk(data.size)[data.rank] for part in batch(0, 8))
            loss = getattr(model, task)(x, target if has_target else None, loss_fn)
    finally:
        rank.agree = agree
    return (loss[0] if task == 'evaluate' else loss).item(), len(tasks)


@pytest.mark.parametrize('task', ['step', 'evaluate'])
@pytest.mark.parametrize(
    'axes, loss_fn, has_target, most',
    [
        ({'pipe': 2}, F.mse_loss, True, 2),
        ({'pipe': 2}, mean_square, False, 3),
        ({'data': 2}, mean_square, False, 2),
    ],
)
def test_ranks_exchange_facts_twice_if_the_target_says_its_size(
    axes, loss_fn, has_target, most, task
):
    """Without a tensor in the target, the rank with the last stage first has to hear the sizes."""
    module = perceptron(2)
    x, target = batch(0, 8)
    expected = loss_fn(module(x), target).item()
    for loss, count in run(2, partial(exchanges, axes, loss_fn, has_target, task)):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert count <= most


class Own(nn.Module):
    """A loss with a weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, output, target):
        return (output * self.weight).square().mean()


def trained(balance, axes):
    """Return the gradient of the weight of a loss without a target, on the rank that has it."""
    model = DistributedGPipe(perceptron(2), balance, mesh=init_mesh(**axes), chunks=3)
    loss = Own()
    model.step(batch(0, 8)[0], None, loss)
    return loss.weight.grad


def test_a_loss_without_a_target_has_gradients_of_its_parameters():
    (expected,) = run(1, trained, [2], {})
    assert expected is not None
    first, last = run(2, trained, [1, 1], {'pipe': 2})
    assert first is None
    torch.testing.assert_close(last, expected, rtol=1e-12, atol=1e-14)


def sizes(in_input, in_target):
    """Return the error of a step whose target has another number of samples."""
    model = DistributedGPipe(perceptron(2), [1, 1], mesh=init_mesh(pipe=2), chunks=3)
    x, target = batch(0, 8)
    try:
        model.step(x[:in_input], target[:in_target], F.mse_loss)
    except ValueError as error:
        return str(error), model.step(x, target, F.mse_loss).item()


def test_a_target_of_another_size_is_refused_on_all_ranks_and_the_next_step_runs():
    module = perceptron(2)
    x, target = batch(0, 8)
    expected = F.mse_loss(module(x), target).item()
    for in_input, in_target in ((8, 7), (2, 8)):
        for text, loss in run(2, sizes, in_input, in_target):
            assert f'the target has {in_target} samples, but the input has {in_input}' in text
            assert loss == pytest.approx(expected, rel=1e-12)


def scaled(output, target):
    """Return a loss whose target is a number."""
    return (output - target).square().mean()


def other_numbers():
    """Pass a number as target that differs along the tensor axis; return the error."""
    mesh = init_mesh(pipe=2, tensor=2)
    model = DistributedGPipe(perceptron(2), [1, 1], mesh=mesh, chunks=2, tensor_plan=plan())
    with pytest.raises(ValueError) as info:
        model.step(batch(0, 8)[0], 1.0 + mesh.get_local_rank('tensor'), scaled)
    return str(info.value)


def test_a_target_that_is_a_number_is_the_same_along_the_tensor_axis():
    for text in run(4, other_numbers):
        assert 'along the tensor axis compute each layer together' in text
