"""Sharded layers in a pipeline: each process of a group has a GPipe of its own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchgpipe.shard as ts
from tests.marks import slow
from tests.shard.processes import Failure, outcomes, run
from torchgpipe import GPipe

CLASSES, WIDTH, HIDDEN, BATCH = 7, 6, 10, 6

#: Partitions on one device, and on a worker each.
ONE, EACH = ['cpu', 'cpu'], ['cpu:0', 'cpu:1']


def layers(parallel):
    """Return the layers of a model, sharded or not, with the same initial values."""
    torch.manual_seed(1)
    if parallel:
        embed = ts.nn.ParallelEmbedding(CLASSES, WIDTH, dim=0, dtype=torch.double)
        up = ts.nn.ParallelLinear(WIDTH, HIDDEN, dim=1, dtype=torch.double)
        down = ts.nn.ParallelLinear(HIDDEN, WIDTH, dim=0, dtype=torch.double)
        head = ts.nn.ParallelLinear(WIDTH, CLASSES, dim=1, dtype=torch.double)
    else:
        embed = nn.Embedding(CLASSES, WIDTH, dtype=torch.double)
        up, down = (
            nn.Linear(*sizes, dtype=torch.double) for sizes in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))
        )
        head = nn.Linear(WIDTH, CLASSES, dtype=torch.double)
    split = ts.nn.RegisterParallelDim(-1) if parallel else nn.Identity()
    return nn.Sequential(embed, nn.Tanh(), up, nn.ReLU(), split, down, nn.Tanh(), head)


def data():
    """Return tokens, and the class of each."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(CLASSES, (BATCH,), generator=generator) for _ in range(2)]


def expected(steps=3):
    """Train in one process; give the losses, and the parameters afterwards."""
    model, (x, y) = layers(False), data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [x.detach() for x in model.parameters()]


def loss_fn(logits, y):
    """Compute the loss of a part of the logits."""
    return ts.nn.functional.parallel_cross_entropy(ts.nn.RegisterParallelDim(-1)(logits), y)


def check(model, train, steps=3):
    """Train in each process; compare with one process."""
    losses, parameters = expected(steps)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for expected_loss in losses:
        optimizer.zero_grad()
        loss = train(model, *data())
        optimizer.step()
        assert abs(loss.item() - expected_loss) < 1e-12
        if torch.distributed.get_rank() == 1:  # It numbers nodes as others do not.
            sum(torch.ones(1, requires_grad=True) for _ in range(50))
    for own, whole in zip(model.parameters(), parameters):
        assert (ts.dtensor(own).full_tensor() - whole).abs().max() < 1e-12


def by_the_plain_call(model, x, y):
    """Take a step by the plain call."""
    loss = loss_fn(model(x), y)
    loss.backward()
    return loss


def by_step(schedule, model, x, y):
    """Take a step by a schedule."""
    return model.step(x, y, loss_fn, schedule=schedule)


def plain_call(devices, mode, balance, steps=3):
    """Train by the plain call."""
    check(
        GPipe(layers(True), balance, devices=devices, chunks=4, checkpoint=mode),
        by_the_plain_call,
        steps,
    )


def plain_calls():
    """Train by the plain call, on one worker and on several, in all modes."""
    for mode in ('never', 'except_last', 'always'):
        plain_call(ONE, mode, [4, 4])
        for balance in ([4, 4], [1, 7]):
            plain_call(EACH, mode, balance)


@pytest.mark.slow
@pytest.mark.parametrize('world', [2, slow(4)])
def test_the_plain_call(world):
    run(world, plain_calls, group=world)


@pytest.mark.slow
def test_ranks_always_meet():
    run(2, plain_call, EACH, 'always', [4, 4], 60, group=2)


def steps():
    """Train by schedules on one worker."""
    for schedule in ('gpipe', '1f1b', 'zb-h1'):
        for mode in ('never', 'always'):
            check(
                GPipe(layers(True), [4, 4], devices=ONE, chunks=4, checkpoint=mode),
                lambda *args: by_step(schedule, *args),
            )
    # Only the last worker communicates.
    model = GPipe(nn.Sequential(nn.Flatten(0), *layers(True)), [1, 8], devices=EACH, chunks=4)
    check(model, lambda *args: by_step('1f1b', *args))
    # No partition does, but the loss, on the last worker.
    plain = GPipe(layers(False), [4, 4], devices=EACH, chunks=4)
    check(plain, lambda model, x, y: model.step(x, y, mean_over_ranks, schedule='1f1b'))


def mean_over_ranks(logits, y):
    """Compute the loss of the mean over ranks, whose logits are equal."""
    size = ts.distributed.get_group_size()
    return F.cross_entropy(ts.distributed.reduce(ts.distributed.copy(logits)) / size, y)


@pytest.mark.slow
def test_steps():
    run(2, steps, group=2)


def refusals():
    """Try calls in which ranks would wait for each other."""
    model = GPipe(layers(True), [4, 4], devices=EACH, chunks=4)
    with pytest.raises(
        RuntimeError,
        match='partitions 0 on cpu:0, 1 on cpu:1 communicate .* '
        'Put these partitions on one device; or use the plain call',
    ):
        by_step('1f1b', model, *data())
    # The loss communicates on the last worker, beside the first one.
    first = GPipe(nn.Sequential(*layers(True), nn.Identity()), [8, 1], devices=EACH, chunks=4)
    with pytest.raises(
        RuntimeError, match='partition 1 communicates with other processes, or the loss does'
    ):
        by_step('1f1b', first, *data())


def test_steps_whose_ranks_might_not_meet_are_refused():
    found = outcomes(2, refusals, group=2)
    assert not any(isinstance(each, Failure) for each in found), found


class Undeclared(nn.Module):
    """A layer that communicates and does not say so."""

    def forward(self, x):
        return ts.distributed.reduce(x)


class Declared(Undeclared):
    """One that does."""

    communicates = True


def layers_of_users():
    """Use a layer that says that it communicates, and one that does not."""
    x = torch.rand(4, 2, dtype=torch.double)

    def model(layer):
        return GPipe(nn.Sequential(nn.Identity(), layer), [1, 1], devices=EACH, chunks=4)

    output = model(Declared())(x)
    assert torch.equal(output, 2 * x)
    with pytest.raises(
        RuntimeError,
        match='a layer of partition 1 communicates with other '
        'processes, while other partitions run.*communicates = True',
    ):
        model(Undeclared())(x)
    on_one = GPipe(nn.Sequential(nn.Identity(), Undeclared()), [1, 1], devices=ONE, chunks=4)
    assert torch.equal(on_one(x), 2 * x)


def test_a_layer_that_communicates_says_so():
    run(2, layers_of_users, group=2)


def dropout():
    """See that a recomputation has the mask of the first pass, and ranks have the same one."""
    torch.manual_seed(3)
    up = ts.nn.ParallelLinear(WIDTH, HIDDEN, dim=1, dtype=torch.double)
    down = ts.nn.ParallelLinear(HIDDEN, WIDTH, dim=0, dtype=torch.double)
    model = nn.Sequential(
        ts.nn.ParallelDropout(0.5, dim=None), up, ts.nn.ParallelDropout(0.5), down
    )
    x = torch.rand(BATCH, WIDTH, dtype=torch.double)
    found = []
    for mode in ('never', 'always'):
        gpipe = GPipe(model, [1, 3], devices=EACH, chunks=3, checkpoint=mode)
        torch.manual_seed(4)
        gpipe.zero_grad()
        output = gpipe(x)
        output.square().sum().backward()
        found.append([output.detach(), *(x.grad.clone() for x in model.parameters())])
    for one, other in zip(*found):
        assert torch.equal(one, other)
    return found[0][0]


def test_dropout_in_a_recomputation():
    one, other = run(2, dropout, group=2)
    assert torch.equal(one, other)
