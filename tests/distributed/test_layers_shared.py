"""One block, or the same experts, in several layers of a model on a mesh."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from tests.distributed.models import Block
from tests.shard.processes import run
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.shard.nn import Experts


class Mixture(nn.Module):
    """A residual mixture of experts, which may be another layer's as well."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x):
        y, _ = self.experts(x)
        return x + y


def whole_block():
    block = Block()
    return nn.Sequential(block, nn.Linear(6, 6), block)


def inner_block():
    block = Block()
    return nn.Sequential(
        nn.Sequential(block, nn.ReLU()), nn.Linear(6, 6), nn.Sequential(nn.Tanh(), block)
    )


def same_experts():
    experts = Experts(6, 8, experts=4, k=2, balance=0)
    return nn.Sequential(Mixture(experts), nn.Linear(6, 6), Mixture(experts))


def trained(make, on_meta, axes, balance, plan, data='replicate'):
    """Take three steps, and return the losses."""
    torch.manual_seed(0)
    with torch.device('meta' if on_meta else 'cpu'):
        module = make()
    mesh = init_mesh(**axes)
    model = DistributedGPipe(
        module.double(), balance, mesh=mesh, chunks=2, tensor_plan=plan, data=data
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        batches = torch.randn(2, 2, 4, 6, generator=generator, dtype=torch.float64)
        # Each micro-batch is divided over the replicas.
        share = batches.chunk(axes.get('data', 1), 2)[mesh.get_local_rank('data')]
        x, target = share.flatten(1, 2)
        losses.append(model.step(x, target, F.mse_loss).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


MESHES = [({'data': 2}, [3]), ({'pipe': 2}, [2, 1]), ({'data': 2, 'pipe': 2}, [2, 1])]
SPLIT = [({'tensor': 2}, [3]), ({'tensor': 2, 'pipe': 2}, [2, 1]), ({'tensor': 2, 'data': 2}, [3])]


@pytest.mark.slow
@pytest.mark.parametrize(
    'make, meshes, on_meta',
    [
        (whole_block, SPLIT[1:], False),
        (inner_block, SPLIT[::2], True),
        (same_experts, MESHES[::2], False),
        (same_experts, MESHES[1:2], True),
    ],
)
def test_in_v0_22_a_layer_in_several_places_was_split_or_spread_twice(make, meshes, on_meta):
    (expected,) = run(1, trained, make, on_meta, {}, [3], {})
    for axes, balance in meshes:
        world = axes.get('data', 1) * axes.get('pipe', 1) * axes.get('tensor', 1)
        plan = {'*up': ColwiseParallel(), '*down': RowwiseParallel()} if 'tensor' in axes else {}
        for losses in run(world, trained, make, on_meta, axes, balance, plan):
            assert losses == pytest.approx(expected, rel=1e-10), axes


def test_its_names_may_have_equal_styles_of_several_patterns():
    plan = {
        '0.up': ColwiseParallel(),
        '0.down': RowwiseParallel(),
        '2.up': ColwiseParallel(),
        '2.down': RowwiseParallel(),
    }
    (expected,) = run(1, trained, whole_block, False, {}, [3], {})
    assert (
        run(2, trained, whole_block, False, {'tensor': 2}, [3], plan)
        == [pytest.approx(expected, rel=1e-10)] * 2
    )


def refused(plans):
    """Make models with other plans."""
    for plan in plans:
        with pytest.raises(ValueError, match='give all of its names one style'):
            trained(whole_block, False, {'tensor': 2}, [3], plan)


def test_other_styles_under_its_names_are_refused():
    plan = {'0.up': ColwiseParallel(), '0.down': RowwiseParallel()}
    others = [
        {},
        {'2.up': RowwiseParallel()},
        {'2.up': ColwiseParallel(use_local_output=False)},
    ]
    run(2, refused, [{**plan, **other} for other in others])
