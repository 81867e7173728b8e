"""Objects that are alive in a step and after it."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.engine.steps import layers, loss_of
from tests.helpers import in_partitions, memory_of, no_gc, on_first
from torchgpipe import GPipe
from torchgpipe.engine import cell
from torchgpipe.engine.scheduled import Step
from torchgpipe.schedule import make


def saved(x, alive, most):
    """Return a number behind a node that keeps a tensor as long as its graph lives."""

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.token = Token()
            alive.add(ctx.token)
            most.append(len(alive))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            del ctx.token
            return grad * 2

    return Node.apply(x)


class Token:
    """An object kept by a node."""


class Keep(nn.Module):
    """Count graphs of this layer that are alive."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = weakref.WeakSet(), []

    def forward(self, x):
        return saved(x, self.alive, self.most)


@devices
def test_a_micro_batch_that_the_schedule_recomputes_is_not_kept(devices):
    """1, 3 and 4 of six, which is in addition to the mode."""
    refs, alive = [], []

    def count(layer, args, output):
        alive.append(sum(not ref.expired() for ref in refs))
        refs.append(memory_of(output))

    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4))
    model[1].register_forward_hook(count)
    gpipe = GPipe(model, [3], devices=devices(1), chunks=6, checkpoint='never')
    x = on_first(gpipe, torch.randn(6, 4))
    gpipe.step(x, x, loss_of, schedule=make('gpipe', 1, 6).recomputing([{1, 3, 4}]))
    assert alive == [0, 1, 1, 2, 2, 2, *(2, 2, 1)]


def most_alive(schedule, places, m):
    """Return for each worker the most micro-batches of stages that it holds at a time."""
    alive, most = {place: [] for place in places}, dict.fromkeys(places, 0)

    class Activation(nn.Module):
        def __init__(self, place):
            super().__init__()
            self.place = place

        def forward(self, x):
            x = x.sigmoid()
            refs = alive[self.place]
            refs[:] = [ref for ref in refs if not ref.expired()] + [memory_of(x)]
            most[self.place] = max(most[self.place], len(refs))
            return x

    model = nn.Sequential(
        *[
            layer
            for place in places
            for layer in (nn.Linear(4, 4), Activation(place), nn.Linear(4, 4))
        ]
    )
    gpipe = GPipe(
        model,
        [3] * len(places),
        devices=[f'cpu:{place}' for place in places],
        chunks=m,
        checkpoint='never',
    )
    x = torch.randn(m, 4)
    gpipe.step(x, x, loss_of, schedule=schedule)
    return [*most.values()]


def test_fewer_activations_than_in_1f1b():
    """The last layer of a stage keeps the activation until ``W``."""
    for n, of_half, of_least in [(4, 0.875, 0.5), (7, 4 / 7, 3 / 7)]:
        for times in [2, 4]:
            m, there = times * n, [*range(n)]
            # A stage of 1F1B is two of the others.
            whole = 2 * max(most_alive('1f1b', there, m))
            half, least = (
                max(most_alive(name, there + there[::-1], m)) for name in ('v-half', 'v-min')
            )
            assert whole == 2 * n
            assert half == of_half * whole
            assert least == of_least * whole


@devices
@pytest.mark.parametrize('schedule, expected', [('gpipe', [8] * 4), ('1f1b', [4, 3, 2, 1])])
def test_so_many_micro_batches_are_alive(devices, schedule, expected):
    counts = [Keep() for _ in range(4)]
    model = nn.Sequential(*[layer for keep in counts for layer in (nn.Linear(4, 4), keep)])
    gpipe = GPipe(model, [2] * 4, devices=devices(4), chunks=8, checkpoint='never')
    x = on_first(gpipe, torch.randn(8, 4))
    for _ in range(2):
        gpipe.step(x, x.to(gpipe.devices[-1]), loss_of, schedule=schedule)
        assert [max(keep.most) for keep in counts] == expected
        assert not any(keep.alive for keep in counts)


@devices
@pytest.mark.parametrize('returns, expected', [(False, [1] * 4), (True, [1, 2, 3, 4])])
def test_outputs_are_kept_only_to_be_returned(devices, returns, expected):
    outputs, alive = [], []

    def loss(y, target):
        outputs.append(memory_of(y))
        alive.append(sum(not x.expired() for x in outputs))
        return loss_of(y, target)

    gpipe = in_partitions(devices, nn.Linear(4, 4), nn.Linear(4, 4), chunks=4)
    x = on_first(gpipe, torch.randn(8, 4))
    gpipe.step(x, x.to(gpipe.devices[-1]), loss, schedule='1f1b', return_output=returns)
    assert alive == expected


def test_nothing_is_left_behind():
    gpipe = GPipe(
        layers(),
        [2, 2, 2, 2],
        devices=[f'cpu:{j}' for j in range(4)],
        chunks=4,
        checkpoint='always',
    )
    x = torch.randn(8, 4, dtype=torch.double)
    seen = weakref.WeakSet()
    gpipe[5].register_forward_hook(lambda layer, args, output: seen.add(output))
    with no_gc():
        gpipe.step(x, x[:, :3], loss_of)
        assert not seen


class Look(torch.autograd.Function):
    """Call a function in backward."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.function()
        return grad * 2, None


@devices
def test_inputs_of_a_cell_are_freed_by_its_backward(devices):
    given, alive = [], []

    class Seen(nn.Module):
        def forward(self, x):
            given.append(memory_of(x))
            return Look.apply(x, lambda: alive.append(sum(not x.expired() for x in given)))

    gpipe = in_partitions(
        devices, nn.Linear(4, 4), Seen(), nn.Linear(4, 4), chunks=4, checkpoint='never'
    )
    x = on_first(gpipe, torch.randn(8, 4))
    gpipe.step(x, x.to(gpipe.devices[-1]), loss_of, schedule='gpipe')
    assert alive == [4, 3, 2, 1]


@devices
def test_gradients_of_micro_batches_are_freed_as_they_are_gathered(devices):
    given, alive = [], []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            grad = grad * 2
            given.append(memory_of(grad))
            return grad

    class Seen(nn.Linear):
        def forward(self, x):
            return super().forward(Twice.apply(x))

    gpipe = in_partitions(devices, Seen(4, 4), chunks=4)
    x = on_first(gpipe, torch.randn(8, 4)).requires_grad_()
    x.register_hook(lambda grad: alive.append(sum(not grad.expired() for grad in given)))
    gpipe.step(x, x.detach(), loss_of)
    assert len(given) == 4 and alive[0] <= 1


@devices
def test_a_recomputation_goes_with_its_backward(devices, monkeypatch):
    alive, seen = weakref.WeakSet(), []

    class Counted(cell.Recomputation):
        def __init__(self, *args):
            super().__init__(*args)
            alive.add(self)

    class Seen(nn.Linear):
        def forward(self, x):
            return Look.apply(super().forward(x), lambda: seen.append(len(alive)))

    monkeypatch.setattr(cell, 'Recomputation', Counted)
    gpipe = in_partitions(devices, Seen(4, 4), chunks=4, checkpoint='always')
    x = on_first(gpipe, torch.randn(8, 4))
    gpipe.step(x, x, loss_of, schedule='gpipe')
    assert seen == [4, 3, 2, 1]


def test_deferred_work_is_freed_when_it_is_done():
    """Nor does a graph of it keep it."""
    alive, seen = weakref.WeakSet(), []

    def put_off():
        token = Token()
        alive.add(token)
        return lambda token=token: seen.append((len(alive), torch.is_grad_enabled()))

    step = SimpleNamespace(_work={(0, 0): [put_off() for _ in range(3)]})
    Step._finish(step, 0, 0)
    assert seen == [(3, False), (2, False), (1, False)] and not step._work
