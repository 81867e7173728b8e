"""The scale of a loss: all ranks skip a step, or none does, and scales stay the same."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchgpipe.shard as ts
from tests.marks import slow
from tests.shard.plain import close, pair, whole
from tests.shard.processes import run


def make(linear, embedding):
    """Return a layer whose outputs are split, and one whose inputs are."""
    return nn.Sequential(
        linear(4, 6, dim=1), nn.Tanh(), ts.nn.RegisterParallelDim(-1), linear(6, 4, dim=0)
    )


def steps(kind, optimizer_options, bad, unscale):
    """Take steps, in one of which one rank of all finds a gradient that is not finite.

    Returns:
        The scale, and whether the step was taken.
    """
    _, sharded = pair(make)
    optimizer = torch.optim.AdamW(sharded.parameters(), **optimizer_options)
    scaler = kind('cpu', init_scale=8.0, growth_interval=10)
    rank = torch.distributed.get_rank()
    for step in range(2):
        before = whole(deepcopy(sharded))
        scaler.scale(sharded(torch.ones(2, 4).double()).sum()).backward()
        if step == 1 and rank == 1:
            sharded[0].weight.grad[0, 0] = bad
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale(), all(
        not torch.equal(value, before[key]) for key, value in whole(sharded).items()
    )


def all_steps():
    """Take them with each kind of optimizer."""
    options = {'foreach': False}, {'foreach': True}, {'fused': True}
    for bad in (float('inf'), float('nan')):
        for each in options:
            for unscale in (True, False):
                assert steps(ts.GradScaler, each, bad, unscale) == (4.0, False)
                assert steps(ts.GradScaler, each, 0.0, unscale) == (8.0, True)
    assert steps(torch.amp.GradScaler, {}, float('inf'), True)[0] == (
        4.0 if torch.distributed.get_rank() == 1 else 8.0
    )


@pytest.mark.parametrize('world, group', [(4, 2), slow(2, 2)])
def test_all_ranks_skip_a_step_where_one_finds_a_gradient_that_is_not_finite(world, group):
    """PyTorch's scaler skips it on this rank only, and the scales diverge."""
    run(world, all_steps, group=group)


def in_low_precision():
    """Train in low precision, scale the loss, clip and accumulate, compared with one process."""
    models = pair(make)
    scaler = {}
    for model in models:
        model.float()
        scaler = ts.GradScaler('cpu') if model is models[1] else torch.amp.GradScaler('cpu')
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(2, 3, 4, generator=generator)
            with torch.autocast('cpu', torch.bfloat16):
                output = model(x)
                assert output.dtype == torch.bfloat16
                loss = F.mse_loss(output.float(), y) / 2
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                ts.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    close(whole(models[1]), models[0].state_dict(), 1e-2)


def test_autocast_with_a_scaler_clipping_and_accumulation():
    run(2, in_low_precision, group=2)


def test_a_scaler_that_is_off_needs_no_groups():
    scaler = ts.GradScaler('cpu', enabled=False)
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scaler.scale(layer(torch.ones(1))).backward()
    before = layer.weight.item()
    scaler.step(optimizer)
    scaler.update()
    assert layer.weight.item() != before
