"""Rows that are gathered in DDP, or behind it: gradients equal one process's in float64."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchgpipe.shard as ts
from tests.shard.plain import close, gradients, pair, whole_gradients
from tests.shard.processes import run


@dataclass
class Found:
    """The outputs of a model."""

    logits: torch.Tensor
    aside: torch.Tensor
    scale: nn.Parameter
    rows: torch.Tensor


class Net(nn.Module):
    """Whole parameters in front of the gather, behind it, and on both sides.

    `where` says where rows are gathered: in the forward pass, or behind it, where `head` follows.
    """

    where = 'inside'
    reentrant = None

    def __init__(self, linear, embedding):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.both = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.linspace(1, 2, 5))
        self.head = nn.Sequential(
            linear(6, 7, dim=1),
            nn.Tanh(),
            ts.nn.RegisterParallelDim(-1),
            linear(7, 6, dim=0),
            nn.LayerNorm(6),
            linear(6, 5, dim=0),
        )

    def features(self, x):
        """Compute features, and gather them over the group."""
        x = self.both(self.backbone(x))
        return ts.distributed.gather(x, dim=0) if self.where == 'inside' else x

    def last(self, x):
        """Return logits of features, whole ones in parts on the way."""
        return self.head(ts.distributed.gather(ts.distributed.scatter(self.both(x)), size=6))

    def forward(self, x):
        features = (
            self.features(x)
            if self.reentrant is None
            else checkpoint(self.features, x, use_reentrant=self.reentrant)
        )
        aside = self.backbone(x).square().mean()
        return Found(
            self.last(features) if self.where == 'inside' else features,
            aside,
            self.scale,
            torch.arange(len(x)),
        )


def samples(number):
    """Return samples and their targets."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(number, 4, dtype=torch.double, generator=generator),
        torch.randint(5, (number,), generator=generator),
    )


def loss_of(found, model, y):
    """Compute the loss of all rows of the group, and add the loss of this rank's rows."""
    logits = found.logits
    if model.where == 'behind':
        logits = model.last(ts.distributed.gather(logits, dim=0))
    return F.cross_entropy(logits * found.scale, y) + found.aside


def expected(plain, x, y):
    """Return the gradients of one process."""
    features = plain.both(plain.backbone(x))
    logits = plain.head(plain.both(features))
    (F.cross_entropy(logits * plain.scale, y) + plain.backbone(x).square().mean()).backward()
    return gradients(plain)


def same_as_plain(where, reentrant=None):
    """Wrap all of it, and accumulate over two passes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plain, sharded = pair(Net)
    sharded.where, sharded.reentrant = where, reentrant
    ts.register_ddp_parameters_to_ignore(sharded)
    ddp = DistributedDataParallel(sharded)
    for _ in range(2):  # Once more changes nothing.
        ts.register_ddp_gathered_features(ddp)
    batch = samples(2 * 3 * world)
    with torch.no_grad():
        ddp(batch[0])  # It leaves nothing behind.
    for i in range(2):
        x, y = (tensor.view(2, world, 3, *tensor.shape[1:])[i] for tensor in batch)
        with ddp.no_sync() if i == 0 else nullcontext():
            found = ddp(x[rank])
            loss = loss_of(found, sharded, ts.distributed.gather(y[rank], dim=0))
            (loss / 2).backward()
    ts.average_gradients(ddp)
    close(whole_gradients(sharded), expected(plain, *batch))


def refused():
    """Gather where no gradient is recorded; return an unknown type."""
    _, sharded = pair(Net)
    sharded.reentrant = True
    ts.register_ddp_parameters_to_ignore(sharded)
    ddp = DistributedDataParallel(sharded)
    ts.register_ddp_gathered_features(ddp)
    x = samples(3)[0].requires_grad_()
    with pytest.raises(ValueError, match='no gradient is recorded.*use_reentrant=False'):
        ddp(x)
    sharded.reentrant = None
    with torch.no_grad():
        ddp(x)
    ddp(x)
    sharded.features = lambda x: ts.distributed.gather(F.pad(x, (0, 2)).detach(), dim=0)
    assert ddp(x).logits.shape == (6, 5)
    sharded.where, sharded.forward = 'behind', lambda x: {'features': {1, 2}, 'x': x * 2}
    with pytest.raises(TypeError, match='gives dict with something'):
        ddp(x)


@pytest.mark.parametrize('world, group', [(2, 2), (4, 2)])
def test_layers_after_the_gather_have_the_gradient_of_one_process(world, group):
    """In v0.8.0, the gradients of whole parameters there, such as a row parallel layer's bias,
    were n times too large."""
    run(world, each, group=group)


def each():
    """Gather in the forward pass, behind it, and in a checkpoint."""
    for where, reentrant in (('inside', None), ('behind', None), ('inside', False)):
        same_as_plain(where, reentrant)


def test_rows_that_are_gathered_out_of_sight_are_refused():
    run(2, refused, group=2)
