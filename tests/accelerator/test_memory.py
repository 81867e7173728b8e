"""Peak memory of each device in a step, by its allocator: as the guide to memory says."""

import threading
from itertools import accumulate

import pytest
import torch
from torch import nn

from tests.marks import MODES
from tests.skip.layers import Pop, Stash
from torchgpipe import GPipe
from torchgpipe.balance import profile
from torchgpipe.plan.costs import peaks as held
from torchgpipe.schedule import make

pytestmark = pytest.mark.sim

#: Micro-batches, partitions; rows of a micro-batch, columns, layers of a partition.
M, N = 16, 4
ROWS, COLUMNS, DEPTH = 128, 64, 24
UNEVEN = [12, 36, 12, 36]
#: Layers that are there in place of others.
SKIP = {1: lambda: Stash(lambda x: (x, x.tanh())), DEPTH * N - 1: Pop}


def layers(kinds):
    """Return `N` times `DEPTH` layers; some are of other kinds, by their places."""
    model = [
        layer for _ in range(N * DEPTH // 2) for layer in (nn.Linear(COLUMNS, COLUMNS), nn.Tanh())
    ]
    for place, kind in kinds.items():
        model[place] = kind()
    return nn.Sequential(*model)


def keep_pace(gpipe):
    """Let a partition begin with a gradient when the one before it has begun with the last one.

    Autograd has a thread for each device. A thread that is ahead of another keeps more memory, up
    to a gradient for each micro-batch. That differs from run to run.
    """
    begun = [threading.Semaphore(1) for _ in range(N + 1)]

    def begin(j, first):
        if not first:
            begun[j].acquire(timeout=30)
        begun[j + 1].release()

    def look(j, args, output):
        first = not args[0].requires_grad
        output.register_hook(lambda grad: begin(j, first))

    for j, partition in enumerate(gpipe.partitions):
        partition.register_forward_hook(lambda _, *values, j=j: look(j, *values))


def peaks(gpipe, x):
    """Return the peak bytes of each device in a step."""
    for device in range(N):
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
    output = gpipe(x)
    output.backward(torch.ones_like(output))
    for device in range(N):
        torch.accelerator.synchronize(device)
    return [torch.accelerator.max_memory_allocated(device) for device in range(N)]


def formula(costs, balance, mode, param_scale):
    """Return the bytes that the guide to memory tells."""
    cuts = [0, *accumulate(balance)]
    blocks, stages = costs.blocks(M, param_scale), held(make('gpipe', N, M), mode, True)
    return [blocks.bytes(*cut) for cut in zip(cuts, cuts[1:], stages)]


@pytest.mark.parametrize(
    'kinds, balance, mode',
    [  # all pairs
        (kinds, balance, mode)
        for k, mode in enumerate(MODES)
        for kinds, balance in (
            ({}, [[DEPTH] * N, UNEVEN][k % 2]),
            (SKIP, [UNEVEN, [DEPTH] * N][k % 2]),
        )
    ],
)
def test_the_peak_of_each_device_follows_the_formula(kinds, balance, mode):
    model, x = layers(kinds), torch.rand(M * ROWS, COLUMNS)
    costs = profile(model, x, device='cpu', timeout=0.01)
    before = [torch.accelerator.memory_allocated(device) for device in range(N)]
    gpipe, x = GPipe(model, balance, chunks=M, checkpoint=mode), x.to('sim:0')
    keep_pace(gpipe)
    for param_scale in (2, 3):  # in the second step there are gradients to add to
        for measured, there, expected in zip(
            peaks(gpipe, x), before, formula(costs, balance, mode, param_scale)
        ):
            assert measured - there == pytest.approx(expected, rel=0.1)
