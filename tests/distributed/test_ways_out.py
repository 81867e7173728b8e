"""Each way out that an error names is followed literally, and then holds.

A case is a pair of functions, which run on each rank. The first one raises. The second one does as
the error says, and returns whether the results are right.
"""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from tests.distributed.models import batch
from tests.shard.processes import Failure, outcomes, run
from torchgpipe import GPipe
from torchgpipe import shard as ts
from torchgpipe.distributed import DistributedGPipe, init_mesh


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


# --- clipping
# ----------------------------------------------------------------------------------


def stages():
    """Return a model of two stages after a backward, one on each rank."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    model = DistributedGPipe(layers, [1, 1], mesh=init_mesh(pipe=2))
    model.step(*batch(0, 4), F.mse_loss)
    return model


def clipped_by_pytorch():
    nn.utils.clip_grad_norm_(stages().parameters(), 0.1)


def clipped_by_the_model():
    model = stages()
    norm = model.clip_grad_norm_(0.1)
    torch.manual_seed(0)
    layers, (x, target) = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double(), batch(0, 4)
    F.mse_loss(layers(x), target).backward()
    expected = nn.utils.clip_grad_norm_(layers.parameters(), 0.1)
    grads = {name: x.grad for name, x in layers.named_parameters()}
    return norm.item() == pytest.approx(expected.item(), rel=1e-6) and all(
        torch.allclose(x.grad, grads[name]) for name, x in model.named_parameters()
    )


# --- layers that are split
# ----------------------------------------------------------------------------------


def with_shards(how):
    """Give a model layers of torchgpipe.shard, as values, on the meta device or by functions."""
    mesh = init_mesh(tensor=2)
    ts.distributed.init_process_group(mesh=mesh['data', 'tensor'])
    functions = [
        partial(ts.nn.ParallelLinear, 6, 8, dim=1),
        nn.ReLU,
        partial(ts.nn.ParallelLinear, 8, 6, dim=0),
    ]
    try:
        with torch.device('meta' if how == 'meta' else 'cpu'):
            module = functions if how == 'functions' else nn.Sequential(*(f() for f in functions))
        DistributedGPipe(module, [3], mesh=mesh, tensor_plan={'0': ColwiseParallel()})
    finally:
        ts.distributed.destroy_process_group()


def with_styles():
    """Use plain layers in their place, with the styles that the error names."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).double()
    x, target = batch(0, 4)
    expected = F.mse_loss(layers(x), target).item()
    model = DistributedGPipe(
        layers,
        [3],
        mesh=init_mesh(tensor=2),
        tensor_plan={'0': ColwiseParallel(), '2': RowwiseParallel()},
    )
    return model.step(x, target, F.mse_loss).item() == pytest.approx(expected, rel=1e-12)


def with_shards_in_a_pipeline():
    """Let such a model run in a GPipe on each rank."""
    mesh = init_mesh(tensor=2)
    ts.distributed.init_process_group(mesh=mesh['data', 'tensor'])
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)).double()
    x, target = batch(0, 4)
    expected = F.mse_loss(layers(x), target).item()
    convert = ts.nn.ParallelLinear.convert_parallel_linear
    split = nn.Sequential(
        convert(layers[0], dim=1),
        layers[1],
        ts.nn.RegisterParallelDim(-1),
        convert(layers[2], dim=0),
    )
    pipeline = GPipe(split, [2, 2], devices=['cpu', 'cpu'], chunks=2)
    loss = pipeline.step(x, target, F.mse_loss).item()
    ts.distributed.destroy_process_group()
    return loss == pytest.approx(expected, rel=1e-12)


# --- the mesh and the model
# ----------------------------------------------------------------------------------


def wrong_places():
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    DistributedGPipe(layers, [2], mesh=init_mesh(pipe=2))


def a_stage_for_each_rank():
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    return len(DistributedGPipe(layers, [1, 1], mesh=init_mesh(pipe=2)).balance) == 2


def without_a_plan():
    linear(axes={'tensor': 2})


def with_a_plan():
    return linear(axes={'tensor': 2}, tensor_plan={'*': ColwiseParallel()}) is not None


def moves():
    """Return a model with batch normalization, whose replicas have other statistics."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double()


def own_statistics():
    model, (x, target) = linear(module=moves()), batch(0, 8)
    for _ in range(2):
        model.step(share(x, [4, 4]), share(target, [4, 4]), F.mse_loss)


def deferred_statistics():
    model, (x, target) = linear(module=moves(), deferred_batch_norm=True), batch(0, 8)
    for _ in range(2):
        model.step(share(x, [4, 4]), share(target, [4, 4]), F.mse_loss)
    expected = 0.9 * 0.1 + 0.1
    mean = moves()[0](x).mean(0)
    return torch.allclose(model.get_buffer('1.running_mean'), mean * expected)


class Counts(nn.Module):
    """A layer that counts its samples.

    Args:
        group: The replicas, over which it adds up the counts.
        is_buffer: Whether the count is a buffer.
    """

    def __init__(self, group=None, is_buffer=True):
        super().__init__()
        self.group, self.seen = group, torch.zeros(())
        if is_buffer:
            del self.seen
            self.register_buffer('seen', torch.zeros(()))

    def forward(self, x):
        count = torch.tensor(float(len(x)))
        if self.group is not None:
            torch.distributed.all_reduce(count, group=self.group)
        with torch.no_grad():
            self.seen += count
        return x * 1


def counted(*args):
    """Take steps within no_sync and without; return the count."""
    model = linear(module=nn.Sequential(nn.Linear(6, 6).double(), Counts(*args)), chunks=2)
    for step in range(2):
        x, target = batch(step, 8)
        with model.no_sync():
            model.step(share(x, [5, 3]), share(target, [5, 3]), F.mse_loss)
        model.step(share(x, [5, 3]), share(target, [5, 3]), F.mse_loss)
    return model[1].seen.item()


def counted_in_a_buffer():
    counted()


def counted_over_replicas():
    mesh = init_mesh(data=2)
    return counted(mesh['data'].get_group()) == 4 * 8


def counted_in_an_attribute():
    return counted(None, False) == 4 * share(torch.ones(8), [5, 3]).numel()


def kept_gradient():
    """Return a model with a gradient that waits within no_sync."""
    model, (x, target) = linear(), batch(0, 4)
    with model.no_sync():
        model.step(share(x, [2, 2]), share(target, [2, 2]), F.mse_loss)
    return model, share(x, [2, 2]), share(target, [2, 2])


def frozen_too_early():
    model, x, target = kept_gradient()
    model.get_parameter('0.bias').requires_grad_(False)
    model.step(x, target, F.mse_loss)


def frozen_after_the_step():
    model, x, target = kept_gradient()
    model.step(x, target, F.mse_loss)
    model.get_parameter('0.bias').requires_grad_(False)
    model.step(x, target, F.mse_loss)
    return True


CASES = [
    Case(2, 'divide it so that each one has samples', step_without_samples, divided_samples),
    Case(
        2,
        'a replica without samples passes None for input and target',
        evaluation_without_samples,
        evaluation_of_none,
    ),
    Case(2, 'model.clip_grad_norm_(max_norm)', clipped_by_pytorch, clipped_by_the_model),
    *(
        Case(
            2,
            'ColwiseParallel() for dim=1, RowwiseParallel() for dim=0',
            partial(with_shards, how),
            with_styles,
        )
        for how in ('values', 'meta', 'functions')
    ),
    Case(
        2,
        'runs in a GPipe on each rank',
        partial(with_shards, 'values'),
        with_shards_in_a_pipeline,
    ),
    Case(2, 'give the balance a number for each stage', wrong_places, a_stage_for_each_rank),
    Case(2, 'ColwiseParallel()', without_a_plan, with_a_plan),
    Case(2, 'batch norm takes deferred_batch_norm=True', own_statistics, deferred_statistics),
    Case(
        2,
        "torch.distributed.all_reduce with group=mesh['data'].get_group()",
        counted_in_a_buffer,
        counted_over_replicas,
    ),
    Case(
        2,
        'keeps them in an attribute that is no buffer',
        counted_in_a_buffer,
        counted_in_an_attribute,
    ),
    Case(
        2,
        'freeze parameters, and take other losses, after the step',
        frozen_too_early,
        frozen_after_the_step,
    ),
]


def test_a_way_out_that_an_error_names():
    for case in CASES:
        failures = [
            result.text
            for result in outcomes(case.world, case.wrong)
            if isinstance(result, Failure)
        ]
        assert any(case.text in text for text in failures), (case, failures)
        assert run(case.world, case.right) == [True] * case.world, case
