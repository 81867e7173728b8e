"""Messages: only the bytes that have to cross."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.distributed.models import batch, perceptron, unet
from tests.shard.processes import run
from torchgpipe.distributed import DistributedGPipe, init_mesh, steps
from torchgpipe.distributed.transport import Messages, outline_of
from torchgpipe.schedule import make
from torchgpipe.schedule.messages import AHEAD, receiving_early, with_messages


def sent():
    """Count the bytes that a rank sends in a first step, in a second one and in one of others."""
    put, found = Messages._put, []

    def count(self, x, rank):
        found[-1] += x.numel() * x.element_size()
        put(self, x, rank)

    Messages._put = count
    with torch.device('meta'):
        module = unet()
    model = DistributedGPipe(module, [2] * 4, mesh=init_mesh(pipe=4), chunks=4)
    for step, size in enumerate((8, 8, 6, 6, 8)):
        found.append(0)
        model.step(*batch(step, size), F.mse_loss)
    return found


def test_a_u_net_over_four_stages_sends_only_tensors_that_cross():
    """Three batches and two skips; and gradients of all but the one that is made of the input."""
    first, second, other, same, back = (sum(each) for each in zip(*run(4, sent)))
    assert second == back == 9 * 8 * 6 * 8 and same == 9 * 6 * 6 * 8
    assert first > second and other > same  # Headers tell of a step that is new.


def lifetimes():
    """Count the sent tensors that a rank still keeps: the maximum, and the number at the end."""
    send, finish, most, there, left = Messages.send, Messages.finish, [0], [], []

    def watch(self, message, header, tensors):
        there.extend(map(weakref.ref, tensors))
        send(self, message, header, tensors)
        most.append(max(map(len, self._sent.values())))

    def end(self):
        left.append(sum(each() is not None for each in there))
        finish(self)

    Messages.send, Messages.finish = watch, end
    model = DistributedGPipe(
        perceptron(), [4, 4], mesh=init_mesh(pipe=2), chunks=16, checkpoint='never'
    )
    model.step(*batch(0, 16), F.mse_loss)
    return max(most), left


def test_sent_tensors_die_soon():
    for most, left in run(2, lifetimes):
        assert most <= AHEAD  # of 16
        assert left[0] <= 1  # the last one


class Late(torch.nn.Module):
    """A layer that waits until the other rank has started to send all that it has."""

    def forward(self, x):
        torch.distributed.group.WORLD.get_group_store().wait(['sent'])
        return x


def unfinished():
    """Count the messages of a call that are not through when it returns."""
    works, send = [], torch.distributed.isend
    model = DistributedGPipe([torch.nn.Identity, Late], [1, 1], mesh=init_mesh(pipe=2), chunks=4)

    def count(*args):
        works.append(send(*args))
        if len(works) == 4 * 3:  # A header is sent in two parts.
            torch.distributed.group.WORLD.get_group_store().set('sent', '')
        return works[-1]

    torch.distributed.isend = count
    model(torch.ones(4, 1 << 21))
    return [work.is_completed() for work in works]


def test_a_call_returns_when_all_has_left():
    assert run(2, unfinished) == [[True] * 12, []]


class Own(torch.Tensor):
    """A class of tensors that messages know nothing of."""


def test_only_plain_dense_tensors_travel():
    for x in (torch.eye(2).to_sparse(), torch.ones(2).as_subclass(Own)):
        with pytest.raises(TypeError, match='only plain dense tensors travel'):
            outline_of(0, x)


def linear():
    """Return layers whose output has the dtype of autocast."""
    return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))


def kinds():
    """Take steps of more kinds than are remembered. Return losses, and how many are remembered."""
    steps._KINDS = 2
    model = DistributedGPipe(linear(), [1, 1], mesh=init_mesh(pipe=2), chunks=2)
    found = []
    for step, size in enumerate((8, 6, 4, 8, 6)):
        x, target = batch(step, size)
        found.append(model.step(x.float(), target.float(), F.mse_loss).item())
        with torch.autocast('cpu', enabled=size == 6):
            found.append(model.step(x.float(), target.float(), F.mse_loss).item())
    return found, len(model._steps._kinds)


def test_steps_of_many_kinds():
    """Forgotten headers are sent again. Autocast makes another kind of equal inputs."""
    torch.manual_seed(0)
    module, expected = linear(), []
    for step, size in enumerate((8, 6, 4, 8, 6)):
        x, target = (each.float() for each in batch(step, size))
        expected.append(F.mse_loss(module(x), target).item())
        with torch.autocast('cpu', enabled=size == 6):
            expected.append(F.mse_loss(module(x), target).item())
    assert run(2, kinds) == [(pytest.approx(expected, rel=1e-3), 2)] * 2


def changing():
    """Take steps in which the first stage learns, does not, and does again."""
    model = DistributedGPipe(perceptron(2), [1, 1], mesh=init_mesh(pipe=2), chunks=2)
    found = []
    for learns in (True, False, True):
        model.zero_grad()
        model.requires_grad_(learns or torch.distributed.get_rank() == 1)
        model.step(*batch(0, 4), F.mse_loss)
        found.append(any(x.grad is not None for x in model.parameters()))
    return found


def test_a_stage_may_be_frozen_and_learn_again():
    assert run(2, changing) == [[True, False, True], [True, True, True]]


def orders():
    """Return the items of this rank's row in three steps, and in one with another batch."""
    model = DistributedGPipe(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        [1, 1],
        mesh=init_mesh(pipe=2),
        chunks=3,
        checkpoint='never',
    )
    found = []
    for size in (6, 6, 6, 3):
        found.append([])
        model._steps._at = found[-1].append
        model.step(torch.ones(size, 4), torch.ones(size, 4), F.mse_loss)
    return [' '.join(map(str, items[:-1])) for items in found]


def test_receives_are_early_when_their_headers_are_known():
    rows = with_messages(make('1f1b', 2, 3))
    for row, (first, second, third, other) in zip(rows, run(2, orders)):
        assert first == other == ' '.join(map(str, row))
        assert second == third == ' '.join(map(str, receiving_early(row))) != first


def labels():
    """Return the labels of a profile of a step."""
    model = DistributedGPipe(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        [1, 1],
        mesh=init_mesh(pipe=2),
        chunks=2,
        checkpoint='never',
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model.step(torch.ones(2, 4), torch.ones(2, 4), F.mse_loss)
    return [event.name for event in profile.events()]


def test_a_profile_has_a_label_for_each_item():
    for row, names in zip(with_messages(make('1f1b', 2, 2)), run(2, labels)):
        assert {f'{type(each).__name__} {each}' for each in row} <= {*names}


def test_strides_of_dimensions_of_size_1_do_not_change_an_outline():
    x = torch.ones(3, 1, 4)
    other = x.as_strided((3, 1, 4), (4, 1, 1))
    assert outline_of(0, x) == outline_of(0, other)
    assert outline_of(0, x) != outline_of(0, x.permute(2, 1, 0).contiguous().permute(2, 1, 0))
