"""Clipping: one norm of gradients that are whole, split, or parts of sums, on several ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F

from tests.distributed.models import batch, perceptron
from tests.distributed.test_layers_tensor import plan
from tests.shard.processes import run
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.shard.sums import clip

TYPES = (1.0, 2.0, float('inf'), -1.0, float('-inf'))


def norms(axes, data):
    """Return the norm of each type after a step, and the largest gradient when it was clipped."""
    with torch.device('meta'):
        module = perceptron(2).append(nn.Linear(6, 1, dtype=torch.float64))
    mesh, found = init_mesh(**axes), []
    model = DistributedGPipe(
        module,
        [2, 1] if 'pipe' in axes else [3],
        mesh=mesh,
        data=data,
        tensor_plan=plan() if 'tensor' in axes else None,
    )
    for norm_type in TYPES:
        model.zero_grad()
        x, target = batch(0, 4)
        rank, ranks = mesh.get_local_rank('data'), axes.get('data', 1)
        model.step(*(each.chunk(ranks)[rank] for each in (x, target[:, :1])), F.mse_loss)
        found += [model.clip_grad_norm_(1e-3, norm_type), model.clip_grad_norm_(1.0, norm_type)]
    return [norm.item() for norm in found]


@pytest.mark.parametrize(
    'axes, data',
    [
        ({'data': 2, 'tensor': 2}, 'shard'),
        ({'data': 2, 'pipe': 2}, 'shard'),
        ({'pipe': 2, 'tensor': 2}, 'replicate'),
    ],
)
def test_norms_equal_one_process(axes, data):
    """The bias of the last layer is one number: of two shards one is empty."""
    (expected,) = run(1, norms, {}, 'replicate')
    assert expected[1:6:2] == pytest.approx([1e-3] * 3, rel=1e-2)  # Others are less before.
    assert run(4, norms, axes, data) == [pytest.approx(expected, rel=1e-9)] * 4


def mesh_of_two():
    return init_mesh(tensor=2)['tensor']


def parts():
    """Return the norm of gradients on two ranks, and their sums afterwards."""
    mesh = mesh_of_two()
    x = torch.full((2,), 3.0)
    grads = [
        DTensor.from_local(x.clone(), mesh, [each]) for each in (Partial(), Shard(0), Replicate())
    ]
    norm = clip(grads, [x], {'tensor': dist.get_rank()}, 1.0, 2.0, dist.group.WORLD, x.device)
    return norm.item() ** 2, *(each.to_local().sum().item() for each in grads), x.sum().item()


def test_sums_and_shards_are_counted_as_they_are():
    norm = 2 * 6**2 + 4 * 3**2 + 2 * 3**2
    assert run(2, parts) == [pytest.approx((norm, *[6 / norm**0.5] * 4), rel=1e-5)] * 2


def not_a_number():
    """Return the norms on two ranks if either one has a gradient that is not a number."""
    places = {'tensor': dist.get_rank()}
    norms = []
    for rank in range(2):
        for norm_type in TYPES:
            gradient = torch.ones(2)
            if dist.get_rank() == rank:
                gradient[1] = float('nan')
            shard = DTensor.from_local(gradient, mesh_of_two(), [Shard(0)])
            norm = clip([shard], [], places, 1.0, norm_type, dist.group.WORLD, gradient.device)
            norms.append(norm.item())
    return norms


def test_a_norm_that_is_not_a_number_reaches_all_ranks():
    """In v0.28.0, the largest value hid it on the last rank, because gloo's maximum did."""
    for norms in run(2, not_a_number):
        assert all(map(math.isnan, norms))


def test_order_0_is_refused():
    with pytest.raises(ValueError, match='has an order other than 0: use norm_type=2.0'):
        clip([torch.ones(2)], [], {}, 1.0, 0, None, torch.device('cpu'))
