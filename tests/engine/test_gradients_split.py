"""A backward in two halves: weights of linear layers and convolutions come in the second one."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.engine.steps import placed
from tests.equivalence import loss_of
from tests.helpers import Spy, assert_same, gradients, in_partitions, no_gc, on_first
from tests.zoo.computing import COMPUTING
from torchgpipe import GPipe, is_recomputing
from torchgpipe.engine import gradients as engine_gradients
from torchgpipe.engine.scheduled import Step
from torchgpipe.schedule import Schedule
from torchgpipe.schedule.generators import SPLIT


@pytest.fixture
def log(monkeypatch):
    """Note the actions, and how many gradients each one adds up that were put off."""
    entries, act, add = [], Step._act, engine_gradients._add

    def note(step, action):
        entries.append([str(action), 0])
        act(step, action)

    def count(leaf, grad):
        entries[-1][1] += 1
        add(leaf, grad)

    monkeypatch.setattr(Step, '_act', note)
    monkeypatch.setattr(engine_gradients, '_add', count)
    return entries


class First(nn.Module):
    """The first one of several."""

    def forward(self, values):
        return values[0] * 2


def test_second_halves_add_the_gradients_of_linear_layers_and_convolutions(log):
    for name, entry in COMPUTING.items():
        if entry.deferred is None:
            continue
        layer = entry.make().double()
        gpipe = GPipe(nn.Sequential(nn.PReLU(), layer).double(), [2], devices=['cpu'], chunks=3)
        x = torch.randn(7, *entry.shape, dtype=torch.double)
        log.clear()
        gpipe.step(x, x, loss_of, schedule='zb-h1')
        assert sum(count for _, count in log) == 3 * entry.deferred, name
        assert {action[1] for action, count in log if count} <= {'W'}, name


@devices
@pytest.mark.parametrize('schedule', SPLIT)
def test_weights_come_with_w(devices, schedule, log):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double()
    model[3].weight = model[0].weight
    places = placed(devices(4), schedule)
    gpipe = GPipe(
        copy.deepcopy(model), [1] * 4, devices=places, chunks=3, checkpoint='except_last'
    )
    x = torch.randn(7, 4, dtype=torch.double)
    loss_of(model(x), x).backward()
    gpipe.step(on_first(gpipe, x), x.to(gpipe.devices[-1]), loss_of, schedule=schedule)
    assert_same(gradients(gpipe), gradients(model))
    if len({*gpipe.devices}) == 1:  # Then no other action comes between.
        assert {(action[1], count) for action, count in log if count} == {('W', 2)}


@devices
def test_an_unused_parameter_has_no_gradient(devices):
    """Not zeros, by which an optimizer with momentum or weight decay would change it."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x), self.b(x)

    gpipe = GPipe(
        nn.Sequential(Two(), Spy(lambda x: None), First()),
        [1, 2],
        devices=devices(2),
        chunks=2,
        checkpoint='except_last',
    )
    x = torch.randn(4, 4)
    gpipe.step(on_first(gpipe, x), x.to(gpipe.devices[-1]), loss_of, schedule='zb-h1')
    assert gpipe[0].b.weight.grad is None and gpipe[0].a.weight.grad is not None


def test_the_backward_of_compiled_layers_is_not_split(log):
    gpipe = in_partitions(['cpu', 'cpu'], nn.Linear(4, 4), nn.Linear(4, 4), chunks=2)
    expected = copy.deepcopy(gpipe)
    gpipe.partitions[0].compile(backend='eager')
    x = torch.randn(4, 4)
    for model in (gpipe, expected):
        log.clear()
        model.step(x, x, loss_of, schedule='zb-h1')
        counts = {action: count for action, count in log}
        assert counts['1W0'] == 2 and counts['0W0'] == (0 if model is gpipe else 2)
    assert_same(gradients(gpipe), gradients(expected), 1e-6)


@devices
def test_the_input_s_gradient_does_not_wait_for_the_weight_gradient(devices, monkeypatch):
    """Partition 0 goes back while partition 1 is held before its first W."""
    sent, add = threading.Event(), engine_gradients._add
    gpipe = in_partitions(
        devices.distinct, nn.Linear(4, 4), nn.Linear(4, 4), chunks=2, checkpoint='never'
    )
    x = torch.randn(4, 4, device=devices.first)
    target = x.to(gpipe.devices[-1])
    gpipe.step(x, target, loss_of, schedule='zb-h1')

    def wait(leaf, grad):
        if leaf.deferred is places[1]:
            assert sent.wait(20)
        add(leaf, grad)

    places, act = {}, Step._act

    def note(step, action):
        places.update(step._deferred)
        act(step, action)
        if str(action) == '0I0':
            sent.set()

    monkeypatch.setattr(engine_gradients, '_add', wait)
    monkeypatch.setattr(Step, '_act', note)
    gpipe.step(x, target, loss_of, schedule='zb-h1')
    assert sent.is_set()


@pytest.mark.slow
@devices
@pytest.mark.parametrize('mode', ['always', 'never'])
def test_a_fault_in_a_second_half(devices, mode, monkeypatch):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]).double()
    gpipe = GPipe(copy.deepcopy(model), [1] * 3, devices=devices(3), chunks=3, checkpoint=mode)
    x = torch.randn(6, 4, dtype=torch.double)
    loss_of(model(x), x).backward()
    y, target = on_first(gpipe, x), x.to(gpipe.devices[-1])
    add, kept = engine_gradients._add, weakref.WeakSet()
    for number in (1, 5, 18):
        left = [number]

        def fail(leaf, grad, left=left):
            left[0] -= 1
            kept.add(grad)
            if left[0] == 0:
                raise ValueError
            add(leaf, grad)

        monkeypatch.setattr(engine_gradients, '_add', fail)
        gc.collect()
        with no_gc():
            with pytest.raises(ValueError) as caught:
                gpipe.step(y, target, loss_of, schedule='zb-h1')
            assert 'in backward of partition' in ''.join(caught.value.__notes__)
            del caught
            assert all(parameter.grad is None for parameter in gpipe.parameters())
        monkeypatch.setattr(engine_gradients, '_add', add)
        gpipe.step(y, target, loss_of, schedule='zb-h1')
        assert_same(gradients(gpipe), gradients(model))
        gpipe.zero_grad()


@pytest.mark.parametrize('fails', [False, True])
def test_nothing_is_left_behind(fails, monkeypatch):
    """No cycle through nodes of the graph, which Python's garbage collector would not see."""
    gpipe = GPipe(
        nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]),
        [2, 2],
        devices=['cpu:0', 'cpu:1'],
        chunks=2,
        checkpoint='never',
    )
    x, alive = torch.randn(4, 4), weakref.WeakSet()
    for layer in gpipe:
        layer.register_forward_hook(lambda layer, args, output: alive.add(output))
    if fails:

        def fail(*args):
            raise ValueError

        monkeypatch.setattr(engine_gradients, '_add', fail)
    with no_gc():
        try:
            gpipe.step(x, x, loss_of, schedule='zb-h1')
        except ValueError:
            assert fails
        assert not alive


def test_a_weight_is_a_parameter_for_all_that_look_at_it():
    weight = engine_gradients.Weight(torch.ones(2, 2))
    weight.deferred = engine_gradients.DeferredWork()
    assert isinstance(weight, nn.Parameter) and weight.shape == (2, 2)
    assert type(weight * 2) is torch.Tensor and type(weight.detach()) is torch.Tensor
    assert type(weight.t()) is torch.Tensor


# --- recomputations
# ----------------------------------------------------------------------------------


@devices
def test_a_recomputation_starts_before_its_gradient_is_there(devices):
    again, calls = threading.Event(), []

    def see(x):
        calls.append(len(calls))
        if len(calls) == 5:  # of 4 first passes and as many recomputations
            again.set()

    class Hold(nn.Module):
        holds = False

        def forward(self, x):
            x = x * 1
            if Hold.holds:
                x.register_hook(lambda grad: (again.wait(20), None)[1])
            return x

    gpipe = GPipe(
        nn.Sequential(Spy(see), nn.Linear(4, 4), Hold()),
        [2, 1],
        devices=devices.distinct(2),
        chunks=4,
        checkpoint=['always', 'never'],
    )
    x = torch.randn(4, 4, device=devices.first)
    for Hold.holds in (False, True):
        calls.clear(), again.clear()
        gpipe.step(x, x.to(gpipe.devices[-1]), loss_of, schedule='gpipe')
        assert len(calls) == 8
    assert again.is_set()


@devices
def test_a_recomputation_where_the_schedule_has_it(devices):
    """It may stand anywhere before its backward, and is in addition to the mode."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4)).double()
    calls = []
    model[2].register_forward_hook(lambda *_: calls.append(is_recomputing()))
    gpipe = GPipe(
        copy.deepcopy(model), [2, 1], devices=devices(2), chunks=2, checkpoint=['always', 'never']
    )
    x = torch.randn(4, 4, dtype=torch.double)
    loss_of(model(x), x).backward()
    schedule = Schedule.parse('0F0,0F1,0R1,0R0,0B1,0B0\n1F0,1R0,1F1,1B1,1B0')
    if len({*gpipe.devices}) == 1:
        schedule = Schedule.parse('0F0,0F1,0R1,0R0,1F0,1F1,1R0,1B1,1B0,0B1,0B0')
    calls.clear()
    gpipe.step(on_first(gpipe, x), x.to(gpipe.devices[-1]), loss_of, schedule=schedule)
    assert_same(gradients(gpipe), gradients(model))
    assert sorted(calls) == [False, False, True]
