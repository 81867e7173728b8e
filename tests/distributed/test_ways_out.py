"""Each way out that an error names is followed literally, and then holds.

A case is a pair of functions, which run on each rank. The first one raises. The second one does as
the error says, and returns whether the results are right.
"""
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.devices import cpu_only
from tests.distributed.models import batch
from tests.shard.processes import Failure, outcomes, run
from torchgpipe.distributed import DistributedGPipe, init_mesh

pytestmark = cpu_only('processes meet by gloo')


class Case(NamedTuple):
    """An error with its way out.

    Args:
        world: The number of ranks.
        text: The way out in the error.
        wrong: Raises the error, on some rank at least.
        right: Does as the error says.
    """

    world: int
    text: str
    wrong: object
    right: object


def linear(**options):
    """Return a small model of one stage, and its input and target for this replica."""
    torch.manual_seed(0)
    mesh = init_mesh(**options.pop('axes', {'data': torch.distributed.get_world_size()}))
    module = options.pop('module', None) or nn.Sequential(nn.Linear(6, 6)).double()
    return DistributedGPipe(module, [len(module)], mesh=mesh, **options)


def plain_loss(x, target, loss=F.mse_loss):
    """Return the loss of the model of `linear` in one process."""
    torch.manual_seed(0)
    return loss(nn.Sequential(nn.Linear(6, 6)).double()(x), target).item()


# --- samples
# ----------------------------------------------------------------------------------


def share(x, sizes):
    """Return this replica's part of a mini-batch."""
    return x.split(sizes)[torch.distributed.get_rank()]


def step_without_samples():
    model, (x, target) = linear(), batch(0, 3)
    model.step(share(x, [3, 0]), share(target, [3, 0]), F.mse_loss)


def divided_samples():
    model, (x, target) = linear(), batch(0, 3)
    loss = model.step(share(x, [2, 1]), share(target, [2, 1]), F.mse_loss)
    return loss.item() == pytest.approx(plain_loss(x, target), rel=1e-12)


def evaluation_without_samples():
    model, (x, target) = linear().eval(), batch(0, 3)
    model.evaluate(share(x, [3, 0]), share(target, [3, 0]), F.mse_loss)


def evaluation_of_none():
    model, (x, target) = linear().eval(), batch(0, 3)
    if torch.distributed.get_rank() == 1:
        loss, _ = model.evaluate(None, None, F.mse_loss)
    else:
        loss, _ = model.evaluate(x, target, F.mse_loss)
    return loss.item() == pytest.approx(plain_loss(x, target), rel=1e-12)


CASES = [
    Case(2, 'divide it so that each one has samples', step_without_samples, divided_samples),
    Case(2, 'a replica without samples passes None for input and target',
         evaluation_without_samples, evaluation_of_none),
]


@pytest.mark.parametrize('case', CASES, ids=lambda case: case.right.__name__)
def test_a_way_out_that_an_error_names(case):
    failures = [result.text for result in outcomes(case.world, case.wrong)
                if isinstance(result, Failure)]
    assert any(case.text in text for text in failures), failures
    assert run(case.world, case.right) == [True] * case.world
