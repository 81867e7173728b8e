"""Replicas: gradients equal one process's on all samples, however samples are spread."""

import copy
import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import torchgpipe.shard as ts
from tests.marks import slow
from tests.shard.plain import (
    close,
    gradients,
    in_turn,
    pair,
    part,
    replicas,
    whole,
    whole_gradients,
)
from tests.shard.processes import outcomes, run


class Net(nn.Module):
    """A whole backbone, and a head whose last layer has a whole bias."""

    def __init__(self, linear, embedding):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten())
        self.head = nn.Sequential(
            linear(12, 7, dim=1), nn.Tanh(), ts.nn.RegisterParallelDim(-1), linear(7, 5, dim=0)
        )

    def forward(self, x):
        return self.head(self.backbone(x))


def samples(number):
    """Return samples and their targets."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(number, 1, 3, 3, dtype=torch.double, generator=generator)
    return x, torch.randint(5, (number,), generator=generator)


def plain_gradients(plain, batch):
    """Return the gradients of one process."""
    plain.zero_grad()
    F.cross_entropy(plain(batch[0]), batch[1]).backward()
    return gradients(plain)


def gathered():
    """Wrap the backbone, and gather its features over the group; accumulate, too."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for passes in (1, 2):
        plain, sharded = pair(Net)
        backbone = DistributedDataParallel(sharded.backbone)
        ts.register_ddp_gathered_features(backbone)
        batch = samples(3 * world * passes)
        for i in range(passes):
            x, y = part(part(batch, i, passes), rank, world)
            with nullcontext() if i == passes - 1 else backbone.no_sync():
                features = ts.distributed.gather(backbone(x), dim=0)
                loss = F.cross_entropy(sharded.head(features), ts.distributed.gather(y, dim=0))
                (loss / passes).backward()
        ts.average_gradients(sharded.head)
        close(whole_gradients(sharded), plain_gradients(plain, batch))


def nothing_gathered():
    """Wrap all of it, where all ranks of a group read the same batch."""
    plain, sharded = pair(Net)
    batch = samples(12)
    x, y = part(batch, *replicas())
    names = ts.register_ddp_parameters_to_ignore(sharded)
    assert names == ['head.0.weight', 'head.0.bias', 'head.3.weight']
    wrapped = DistributedDataParallel(sharded)
    # The wrapped model gets the values of rank 0, except for the shards.
    close(whole(sharded), plain.state_dict())
    F.cross_entropy(wrapped(x), y).backward()
    version = sharded.head[3].bias.grad._version
    ts.average_gradients(wrapped)
    assert sharded.head[3].bias.grad._version == version  # DDP has averaged it.
    close(whole_gradients(sharded), plain_gradients(plain, batch))


def over_the_data_axis():
    """Wrap all of it with the group of replicas, or with the other one, or nothing at all."""
    for group in (ts.distributed.get_data_group(), ts.distributed.get_group(), None):
        plain, sharded = pair(Net)
        batch = samples(12)
        x, y = part(batch, *replicas())
        model = sharded
        if group is ts.distributed.get_group():
            ts.register_ddp_parameters_to_ignore(sharded)
        if group is not None:
            model = DistributedDataParallel(sharded, process_group=group)
        F.cross_entropy(model(x), y).backward()
        versions = [parameter.grad._version for parameter in sharded.parameters()]
        ts.average_gradients(model)
        if replicas()[1] == 1 or group is ts.distributed.get_data_group():
            assert versions == [parameter.grad._version for parameter in sharded.parameters()]
        close(whole_gradients(sharded), plain_gradients(plain, batch))


def ignored_before():
    """Tell DDP of more, and of a tied shard by each of its names."""
    _, sharded = pair(Net)
    sharded.again = sharded.head
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        sharded, ['backbone.0.bias']
    )
    assert ts.register_ddp_parameters_to_ignore(copy.deepcopy(sharded).to('meta'))
    names = ts.register_ddp_parameters_to_ignore(sharded)
    assert 'again.0.weight' in names and 'backbone.0.bias' not in names
    assert DistributedDataParallel(sharded).parameters_to_ignore == {'backbone.0.bias', *names}


def not_ignored():
    """Wrap shards as if they were copies, and call them."""
    layers = nn.Sequential(ts.nn.ParallelLinear(4, 4, dim=1), ts.nn.ParallelLinear(4, 4, dim=0))
    ts.register_ddp_parameters_to_ignore(layers[0])  # not the one that is wrapped
    ddp = DistributedDataParallel(layers)
    for _ in range(2):
        with pytest.raises(ValueError, match='of one: 0.weight, 0.bias, 1.weight. Make'):
            ddp(torch.ones(1, 4))
    ts.register_ddp_parameters_to_ignore(layers)
    ddp = DistributedDataParallel(layers)
    ddp(torch.ones(1, 4))
    ddp.parameters_to_ignore = set()
    ddp(torch.ones(1, 4))  # It is looked at once.


def uneven():
    """Wrap shards of uneven size as if they were copies."""
    DistributedDataParallel(ts.nn.ParallelLinear(4, 11, dim=1))


def odd_gradients():
    """Have gradients that some replicas lack, or have in another form."""
    replica, count = replicas()
    sharded = Net(ts.nn.ParallelLinear, ts.nn.ParallelEmbedding)
    sharded.table = nn.Embedding(4, 2, sparse=True)
    conv, first, last = sharded.backbone[0], sharded.head[0], sharded.head[3]
    conv.weight.grad = torch.rand(2, 3, 2, 1).permute(1, 3, 0, 2).fill_(replica)  # another order
    expected = torch.arange(float(count)).mean()
    if replica == 0:
        first.weight.grad = torch.ones_like(first.weight)
        sharded.table(torch.tensor([1, 1])).sum().backward()
    last.weight.requires_grad_(False)
    last.weight.grad = torch.full_like(last.weight, replica)
    ts.average_gradients(sharded)
    assert conv.weight.grad.eq(expected).all() and first.weight.grad.eq(1 / count).all()
    assert sharded.table.weight.grad.to_dense()[1].eq(2 / count).all()
    assert first.bias.grad is None and last.weight.grad.eq(replica).all()


def zero():
    """Spread the optimizer over replicas, and collect its state where it was consolidated."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # takes its time

    plain, sharded = pair(Net)
    one = torch.optim.AdamW(plain.parameters(), 0.1)
    spread = ZeroRedundancyOptimizer(
        sharded.parameters(),
        torch.optim.AdamW,
        lr=0.1,
        process_group=ts.distributed.get_data_group(),
    )
    batch = samples(12)
    x, y = part(batch, *replicas())
    for _ in range(3):
        plain_gradients(plain, batch)
        sharded.zero_grad()
        F.cross_entropy(sharded(x), y).backward()
        ts.average_gradients(sharded)
        for model, optimizer in ((plain, one), (sharded, spread)):
            ts.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    close(whole(sharded), plain.state_dict(), 1e-9)
    spread.consolidate_state_dict(to=0)
    if ts.distributed.get_data_rank() == 0:
        state = ts.collect_optimizer_state_dict(spread, spread.state_dict())['state']
        for number, states in one.state_dict()['state'].items():
            close(state[number], states, 1e-9)


def refused():
    """Wrap with a group that has some ranks of the parallel group only."""
    _, sharded = pair(Net)
    ddp = DistributedDataParallel(sharded.backbone, process_group=ts.distributed.get_data_group())
    with pytest.raises(ValueError, match='over the whole group.*without process_group='):
        ts.register_ddp_gathered_features(ddp)


def other_seeds():
    """Make and convert layers after another seed on each rank."""
    torch.manual_seed(dist.get_rank())
    plain = nn.Sequential(nn.Embedding(6, 5), nn.Linear(5, 7))
    sharded = nn.Sequential(
        ts.nn.ParallelEmbedding(6, 5, dim=0),
        ts.nn.ParallelEmbedding(5, 3, dim=1),
        ts.nn.ParallelLinear(5, 7, dim=1),
        ts.nn.ParallelLinear(7, 5, dim=0),
        ts.nn.ParallelEmbedding.convert_parallel_embedding(plain[0], 1),
        ts.nn.ParallelLinear.convert_parallel_linear(plain[1], 0),
    )
    return whole(sharded)


def own_values():
    """Set parameters to values of one's own, in one of the shards, in one of the replicas."""
    rank = dist.get_rank()
    _, sharded = pair(Net)
    other, wrapped = copy.deepcopy(sharded), copy.deepcopy(sharded)
    for model in (sharded, wrapped):
        with torch.no_grad():
            model.head[0].weight.add_(rank == 3)
    x, y = samples(4)
    F.cross_entropy(sharded(x), y).backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r'other values of head.0.weight: .*Let all ranks'):
            ts.average_gradients(sharded)
    ts.average_gradients(other)
    other.head[0].weight.data.add_(rank)  # It is looked at once.
    ts.average_gradients(other)
    # The wrapped model gets the values of the first ones.
    ts.register_ddp_parameters_to_ignore(wrapped)
    ddp = DistributedDataParallel(wrapped)
    F.cross_entropy(ddp(x), y).backward()
    ts.average_gradients(ddp)
    close(whole(ddp.module), pair(Net)[0].state_dict())


@pytest.mark.slow
def test_replicas_have_the_same_shards_for_all_seeds():
    """In v0.8.0, ranks of a group agreed, and each group had values of its own."""
    first, *others = run(4, other_seeds, group=2)
    for found in others:
        for name, value in first.items():
            assert found[name].equal(value), name


@pytest.mark.slow
def test_replicas_with_values_of_their_own_are_refused_or_get_the_same():
    """In v0.8.0, their gradients were averaged, and the replicas stayed different."""
    run(4, own_values, group=2)


@pytest.mark.parametrize('world, group', [(4, 2), (2, 2), slow(4, 1)])
def test_gradients_have_their_scale_where_features_are_gathered_and_shards_are_averaged(
    world, group
):
    """In TorchShard 0.1.0, the gradient of the backbone was divided by the world size."""
    run(world, in_turn, gathered, nothing_gathered, over_the_data_axis, group=group)


def test_shards_that_ddp_takes_for_copies_are_refused():
    run(2, not_ignored, group=2)


def test_shards_of_uneven_size_are_refused_by_ddp_itself():
    _, failure = outcomes(2, uneven, group=2)
    assert re.search(
        r'RuntimeError: .*params\[0\] in this process with sizes \[5, 4\]', failure.text
    )


def test_ignored_names_missing_gradients_and_optimizers_over_the_data_group():
    run(4, in_turn, ignored_before, odd_gradients, zero, refused, group=2)


def registered_in_turn():
    """Return the averages of gradients whose layers each replica registers in another order."""
    names = ['a', 'b', 'c']
    rank = ts.distributed.get_data_rank()
    module = nn.Module()
    for name in names[rank:] + names[:rank]:
        module.register_parameter(name, nn.Parameter(torch.zeros(2)))
        module.get_parameter(name).grad = torch.full((2,), float(names.index(name) + rank))
    ts.average_gradients(module)
    return [module.get_parameter(name).grad.tolist() for name in names]


def test_replicas_may_register_parameters_in_different_orders():
    assert run(2, registered_in_turn, group=1) == [[[0.5] * 2, [1.5] * 2, [2.5] * 2]] * 2
