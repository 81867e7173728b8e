"""A step by a schedule has the numbers of the unwrapped model, whatever the schedule."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.devices import cpus, devices
from tests.engine.steps import layers, loss_of, placed, schedules, train
from tests.helpers import assert_same, by_partitions, gradients, on_first
from tests.marks import MODES
from tests.skip.layers import Pop, Stash
from torchgpipe import Arguments, GPipe, NoChunk
from torchgpipe.schedule import NAMES, make
from torchgpipe.schedule.generators import V_SHAPED


@devices
def test_each_schedule_trains_as_the_unwrapped_model(devices):
    for schedule in NAMES:
        model = layers()
        places = placed(devices(4), schedule)
        gpipe = GPipe(
            copy.deepcopy(model), [2, 2, 2, 2], devices=places, chunks=3, checkpoint='except_last'
        )
        train(model, gpipe, 7, schedule=schedule)


@st.composite
def cases(draw):
    """Draw numbers of partitions, devices and micro-batches, and everything else."""
    v = draw(st.integers(1, 2))
    schedule = draw(st.sampled_from([name for name in NAMES if v == 2 or name not in V_SHAPED]))
    n = draw(st.integers(1, 4 // v))
    if v == 1 or schedule not in ('interleaved', 'looped-bfs', *V_SHAPED):
        order = [*range(n * v)]
    else:
        order = [*range(n), *(reversed(range(n)) if schedule in V_SHAPED else range(n))]
    cuts = sorted(
        draw(st.lists(st.integers(1, 7), min_size=n * v - 1, max_size=n * v - 1, unique=True))
    )
    balance = [b - a for a, b in zip([0, *cuts], [*cuts, 8])]
    return schedule, balance, order, draw(st.integers(1, 9)), draw(st.sampled_from(MODES))


@pytest.mark.slow
@devices
@settings(max_examples=100, deadline=None, derandomize=True)
@given(case=cases(), size=st.integers(1, 9), chance=st.randoms(use_true_random=False))
def test_any_micro_batches_are_recomputed(devices, case, size, chance):
    """In each partition others, in addition to the mode."""
    name, balance, order, chunks, mode = case
    torch.manual_seed(size)
    model = layers()
    places, m = devices(4), min(size, chunks)
    v = len(balance) // len({*order})
    schedule = make(name, len(balance) // v, m, v).recomputing(
        [{i for i in range(m) if chance.random() < 0.5} for _ in balance]
    )
    gpipe = GPipe(
        copy.deepcopy(model),
        balance,
        devices=[places[k] for k in order],
        chunks=chunks,
        checkpoint=mode,
    )
    train(model, gpipe, size, schedule=schedule)


@devices
@schedules
def test_dropout_is_drawn_in_the_order_of_micro_batches(devices, schedule):
    """In all steps, though only the first one does not know yet who draws."""
    model = nn.Sequential(
        *[layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Dropout(0.5))]
    ).double()
    # Those that draw from the generator of one of several accelerators take no turns.
    places = placed(devices.distinct(4) if devices.are_apart else devices(4), schedule)
    gpipe = GPipe(model, [2] * 4, devices=places, chunks=3, checkpoint='always')
    # With two stages on a device, the second one may have to wait for more than that.
    same_order = schedule not in ('looped-bfs', *V_SHAPED) or (
        schedule == 'looped-bfs' and len(set(places)) == 4
    )
    found = []
    for step in range(3):
        x = on_first(gpipe, torch.randn(6, 4, dtype=torch.double))
        target = torch.zeros(6, 4, dtype=torch.double, device=gpipe.devices[-1])
        gpipe.zero_grad()
        torch.manual_seed(step)
        loss, output = gpipe.step(x, target, loss_of, schedule=schedule, return_output=True)
        grads = gradients(gpipe)
        gpipe.zero_grad()
        torch.manual_seed(step)
        expected = torch.cat([by_partitions(gpipe, part) for part in x.tensor_split(3)])
        loss_of(expected, target).backward()
        if same_order:
            assert_same([output, *grads], [expected.detach(), *gradients(gpipe)])
        torch.manual_seed(step)
        assert_same([gpipe.step(x, target, loss_of, schedule=schedule)], [loss])
        found.append(output)
    assert not torch.equal(found[0], found[1])


def test_dropout_where_a_schedule_does_not_admit_that_order():
    """The order is then the schedule's, and the same in each run."""
    model = nn.Sequential(
        *[layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.Dropout(0.5))]
    )
    gpipe = GPipe(model, [2] * 4, devices=['cpu:0', 'cpu:1'] * 2, chunks=4)
    x = torch.randn(8, 4)
    outputs = []
    for _ in range(4):
        torch.manual_seed(0)
        _, output = gpipe.step(x, x, loss_of, schedule='looped-bfs', return_output=True)
        outputs.append(output)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_who_begins_to_draw_is_noticed():
    """Not in that step, but it has its turn in the next one."""

    class Late(nn.Module):
        draws = False

        def forward(self, x):
            return torch.nn.functional.dropout(x) if self.draws else x

    model = nn.Sequential(nn.Linear(4, 4), Late(), nn.Linear(4, 4), Late()).double()
    gpipe = GPipe(model, [2, 2], devices=['cpu:0', 'cpu:1'], chunks=4, checkpoint='never')
    x = torch.randn(8, 4, dtype=torch.double)
    for k in range(4):
        Late.draws = k > 1
        torch.manual_seed(k)
        _, output = gpipe.step(x, x, loss_of, return_output=True)
    torch.manual_seed(3)
    expected = torch.cat([nn.Sequential(*gpipe)(part) for part in x.tensor_split(4)])
    assert_same([output], [expected.detach()])


@devices
@pytest.mark.parametrize('deferred', [False, True])
def test_batch_norm(devices, deferred):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    plain, gpipe = [
        GPipe(
            copy.deepcopy(model),
            [1, 3],
            devices=devices(2),
            chunks=3,
            checkpoint='always',
            deferred_batch_norm=deferred,
        )
        for _ in range(2)
    ]
    for _ in range(3):
        x = on_first(gpipe, torch.randn(8, 4, dtype=torch.double))
        target = torch.randn(8, 3, dtype=torch.double).to(gpipe.devices[-1])
        loss_of(plain(x), target).backward()
        gpipe.step(x, target, loss_of)
    assert_same(gradients(gpipe), gradients(plain))
    assert_same(gpipe.state_dict().values(), plain.state_dict().values())


@cpus
def test_autocast(devices):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    plain, gpipe = [
        GPipe(copy.deepcopy(model), [1, 2], devices=devices(2), chunks=2, checkpoint='always')
        for _ in range(2)
    ]
    seen = []
    for net in (plain, gpipe):
        net[1].register_full_backward_hook(
            lambda layer, input, output: seen.append(torch.is_autocast_enabled('cpu'))
        )
    x, target = torch.randn(8, 8), torch.randn(8, 3)
    with torch.autocast('cpu', torch.bfloat16):
        loss = loss_of(plain(x), target)
    loss.backward()
    with torch.autocast('cpu', torch.bfloat16):
        found = gpipe.step(x, target, loss_of)
        assert torch.is_autocast_enabled('cpu')
    assert torch.allclose(found, loss, atol=1e-6) and seen and not any(seen)
    assert_same(gradients(gpipe), gradients(plain), 1e-2)


@devices
def test_structures_and_several_arguments(devices):
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, *, table, mask=None):
            return {'x': self.linear(x) + table, 'mask': mask}

    class Last(nn.Module):
        def forward(self, value):
            return {'y': value['x'] * value['mask'], 'n': 2}

    def loss_fn(output, target):
        return loss_of(output['y'], target['y']) * output['n']

    model = nn.Sequential(First(), Last()).double()
    gpipe = GPipe(copy.deepcopy(model), [1, 1], devices=devices(2), chunks=3)
    table = torch.randn(4, dtype=torch.double, requires_grad=True)
    own = on_first(gpipe, table).requires_grad_()
    x, y = torch.randn(7, 4, dtype=torch.double), torch.randn(7, 4, dtype=torch.double)
    mask = torch.rand(7, 1, dtype=torch.double)
    loss = loss_fn(model[1](model[0](x, table=table, mask=mask)), {'y': y})
    loss.backward()
    found, output = gpipe.step(
        Arguments(on_first(gpipe, x), table=NoChunk(own), mask=on_first(gpipe, mask)),
        {'y': y.to(gpipe.devices[-1])},
        loss_fn,
        return_output=True,
    )
    assert output['n'] == 2 and output['y'].shape == (7, 4)
    assert_same(
        [found, own.grad, *gradients(gpipe)], [loss.detach(), table.grad, *gradients(model)]
    )


@devices
def test_a_skip_may_be_none(devices):
    model = nn.Sequential(
        nn.Linear(4, 4), Stash(lambda x: (None, x * 2)), nn.Tanh(), Pop(), nn.Linear(4, 3)
    ).double()
    train(model, GPipe(copy.deepcopy(model), [2, 1, 2], devices=devices(3), chunks=2), 5)
