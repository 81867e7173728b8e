"""A step by a schedule has the numbers of the unwrapped model, whatever the schedule."""
import copy
import gc
import signal
import sys
import threading
import time
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.devices import cpu_only, cpus, devices, workers
from tests.helpers import (MODES, Spy, WeakLog, assert_same, by_partitions, gradients, modes,
                           on_first)
from torchgpipe import Arguments, GPipe, NoChunk
from torchgpipe.engine.interpreter import _Shared
from torchgpipe.engine.worker import Workers
from torchgpipe.private import innermost_hooks
from torchgpipe.schedule import NAMES, Schedule, make
from torchgpipe.skip import pop, skippable, stash

schedules = pytest.mark.parametrize('schedule', NAMES)


def loss_of(output, target):
    """Give a mean over samples; the simulated accelerator has no kernel for that of PyTorch."""
    return (output - target).square().mean()


@skippable(stash=['skip'])
class Stash(nn.Module):
    """Stash the input, or nothing at all."""

    def __init__(self, nothing=False):
        super().__init__()
        self.nothing = nothing

    def forward(self, x):
        """Do so."""
        yield stash('skip', None if self.nothing else x)
        return x * 2


@skippable(pop=['skip'])
class Pop(nn.Module):
    """Add what was stashed."""

    def forward(self, x):
        """Do so."""
        skip = yield pop('skip')
        return x if skip is None else x + skip


class Branch(nn.Module):
    """From a tensor to a dict, some of which needs no gradient, or is no tensor."""

    def forward(self, x):
        """Do so."""
        return {'a': x * 2, 'index': x.detach().argmax(1), 'b': x.tanh(), 'n': 3, 'none': None}


class Merge(nn.Module):
    """And back."""

    def forward(self, value):
        """Do so."""
        assert value['none'] is None
        return value['a'] * value['n'] + value['b'] + value['index'][:, None]


def layers(width=4):
    """Give a model of eight layers with whatever goes between partitions."""
    return nn.Sequential(
        nn.Linear(width, width), Stash(), nn.Linear(width, width).requires_grad_(False), Branch(),
        Merge(), nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)), Pop(),
        nn.Linear(width, 3)).double()


def train(model, gpipe, size, *, steps=2, loss_fn=loss_of, expected_loss=loss_of, **options):
    """Train both, and compare losses, outputs, gradients and buffers."""
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in (model, gpipe)]
    for k in range(steps):
        x = torch.randn(size, 4, dtype=torch.double, requires_grad=k % 2 == 0)
        target = torch.randn(size, 3, dtype=torch.double)
        y = on_first(gpipe, x).requires_grad_(x.requires_grad)
        output = model(x)
        loss = expected_loss(output, target)
        loss.backward()
        found, result = gpipe.step(y, target.to(gpipe.devices[-1]), loss_fn, return_output=True,
                                   **options)
        assert not found.requires_grad and not result.requires_grad and found.shape == ()
        assert_same([found, result, y.grad], [loss.detach(), output.detach(), x.grad])
        assert_same(gradients(gpipe), gradients(model))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(gpipe.state_dict().values(), model.state_dict().values())


@schedules
@modes
@devices
def test_numbers_are_those_of_the_unwrapped_model(devices, mode, schedule):
    model = layers()
    places = devices(4)
    if schedule == 'zb-v':
        places = [*places[:2], *reversed(places[:2])]
    gpipe = GPipe(copy.deepcopy(model), [2, 2, 2, 2], devices=places, chunks=3, checkpoint=mode)
    train(model, gpipe, 7, schedule=schedule)


@st.composite
def cases(draw):
    """Draw numbers of partitions, devices and micro-batches, and everything else."""
    v = draw(st.integers(1, 2))
    schedule = draw(st.sampled_from([name for name in NAMES if v == 2 or name != 'zb-v']))
    n = draw(st.integers(1, 4 // v))
    if v == 1 or schedule not in ('interleaved', 'looped-bfs', 'zb-v'):
        order = [*range(n * v)]
    else:
        order = [*range(n), *(reversed(range(n)) if schedule == 'zb-v' else range(n))]
    cuts = sorted(draw(st.lists(st.integers(1, 7), min_size=n * v - 1, max_size=n * v - 1,
                                unique=True)))
    balance = [b - a for a, b in zip([0, *cuts], [*cuts, 8])]
    return schedule, balance, order, draw(st.integers(1, 9)), draw(st.sampled_from(MODES))


@devices
@settings(max_examples=100, deadline=None, derandomize=True)
@given(case=cases(), size=st.integers(1, 9))
def test_any_schedule_of_any_size(devices, case, size):
    schedule, balance, order, chunks, mode = case
    torch.manual_seed(size)
    model = layers()
    places = devices(4)
    gpipe = GPipe(copy.deepcopy(model), balance, devices=[places[k] for k in order],
                  chunks=chunks, checkpoint=mode)
    train(model, gpipe, size, steps=1, schedule=schedule)


@devices
@schedules
def test_dropout_is_that_of_micro_batches_in_order(devices, schedule):
    """In all steps, though only the first one does not know yet who draws."""
    model = nn.Sequential(*[layer for _ in range(4) for layer in (
        nn.Linear(4, 4), nn.Dropout(0.5))]).double()
    places = devices(4)
    if schedule == 'zb-v':
        places = [*places[:2], *reversed(places[:2])]
    gpipe = GPipe(model, [2] * 4, devices=places, chunks=3, checkpoint='always')
    # With two stages on a device, the second one may have to wait for more than that.
    same_order = schedule not in ('looped-bfs', 'zb-v') or (
        schedule == 'looped-bfs' and len(set(places)) == 4)
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
        expected = by_partitions(gpipe, x, 3) if devices.are_accelerators else torch.cat(
            [nn.Sequential(*gpipe)(part) for part in x.tensor_split(3)])
        loss_of(expected, target).backward()
        if same_order:
            assert_same([output, *grads], [expected.detach(), *gradients(gpipe)])
        torch.manual_seed(step)
        assert_same([gpipe.step(x, target, loss_of, schedule=schedule)], [loss])
        found.append(output)
    assert not torch.equal(found[0], found[1])


@cpu_only('accelerators have generators of their own')
def test_dropout_where_a_schedule_does_not_admit_that_order():
    """It is that of the schedule then, and the same in each run."""
    model = nn.Sequential(*[layer for _ in range(4) for layer in (
        nn.Linear(4, 4), nn.Dropout(0.5))])
    gpipe = GPipe(model, [2] * 4, devices=['cpu:0', 'cpu:1'] * 2, chunks=4)
    x = torch.randn(8, 4)
    outputs = []
    for _ in range(4):
        torch.manual_seed(0)
        _, output = gpipe.step(x, x, loss_of, schedule='looped-bfs', return_output=True)
        outputs.append(output)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@cpu_only('accelerators have generators of their own')
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


@workers
def test_workers_work_at_the_same_time(devices):
    """In forward and, where its threads are the workers, in backward."""
    barriers = {'forward': threading.Barrier(2), 'backward': threading.Barrier(2)}

    class Meet(nn.Module):
        meets = False

        def __init__(self, i, j):
            super().__init__()
            self.linear, self.i, self.j, self.calls = nn.Linear(4, 4), i, j, 0

        def forward(self, x):
            self.calls += 1
            x = self.linear(x)
            if Meet.meets and self.calls == self.i + 1:
                barriers['forward'].wait(20)
                if not devices.are_accelerators:
                    # The second one of partition 1 is beside the first one of partition 0.
                    x.register_hook(lambda grad: (barriers['backward'].wait(20), None)[1])
            return x

    gpipe = GPipe(nn.Sequential(Meet(1, 0), Meet(0, 1)), [1, 1], devices=devices.distinct(2),
                  chunks=3, checkpoint='never')
    x = torch.randn(6, 4, device=devices.first)
    for meets in (False, True):
        Meet.meets = meets
        gpipe[0].calls = gpipe[1].calls = 0
        gpipe.step(x, x.to(gpipe.devices[-1]), loss_of, schedule='gpipe')


@cpu_only('it is about threads of the host')
def test_threads_may_take_steps_of_the_same_model():
    """None may come first on one worker and last on another."""
    gpipe = GPipe(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]), [1] * 4,
                  devices=[f'cpu:{j}' for j in range(4)], chunks=2, checkpoint='never')
    x, taken = torch.randn(4, 4), []
    interval = sys.getswitchinterval()

    def take():
        for _ in range(50):
            taken.append(gpipe.step(x, x, loss_of))

    threads = [threading.Thread(target=take, daemon=True) for _ in range(6)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + 40
        for thread in threads:
            thread.join(max(0, end - time.monotonic()))
    finally:
        sys.setswitchinterval(interval)
    assert len(taken) == 300


@workers
def test_a_layer_can_not_take_a_step_of_the_model_that_runs_it(devices):
    models = []
    model = nn.Sequential(nn.Linear(4, 4), Spy(
        lambda x: models[0].step(x.detach(), x.detach(), loss_of)))
    models.append(GPipe(model, [1, 1], devices=devices.distinct(2)))
    x = torch.randn(6, 4, device=devices.first)
    with pytest.raises(RuntimeError, match='called the GPipe that runs it'):
        models[0].step(x, x.to(models[0].devices[-1]), loss_of)
    models.clear()


@devices
@pytest.mark.parametrize('view', [False, True])
def test_a_change_in_place_that_another_tensor_should_see(devices, view):
    """Two tensors of one memory have graphs of their own in the next cell."""
    class Two(nn.Module):
        def forward(self, x):
            return x, x[:, 1:] if view else x[:, :]

    class Change(nn.Module):
        def forward(self, pair):
            return pair[0].mul_(2)[:, 1:] + pair[1][:, -3:]

    gpipe = GPipe(nn.Sequential(nn.Linear(4, 4), Two(), Change()), [2, 1], devices=devices(2),
                  chunks=2, checkpoint='never')
    x = torch.randn(4, 4, device=devices.first)
    with pytest.raises(RuntimeError, match='another one lay in its memory'):
        gpipe.step(x, x[:, 1:].to(gpipe.devices[-1]), loss_of)


@devices
def test_a_change_in_place_of_what_is_recomputed_from(devices):
    class Through(nn.Linear):
        def forward(self, x):
            return x, super().forward(x).tanh()

    class Change(nn.Module):
        def forward(self, pair):
            return pair[0].mul_(2) + pair[1]

    gpipe = GPipe(nn.Sequential(nn.Linear(4, 4), Through(4, 4), Change()), [1, 1, 1],
                  devices=[devices(1)[0]] * 3, chunks=2, checkpoint=['never', 'always', 'never'])
    x = torch.randn(4, 4, device=devices.first)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        gpipe.step(x, x, loss_of)


@cpus
@cpu_only('on accelerators it is copied before')
def test_a_change_in_place_of_a_batch_beside_a_skip(devices):
    gpipe = GPipe(nn.Sequential(nn.Linear(4, 4), Stash(), nn.ReLU(inplace=True), Pop()), [2, 2],
                  devices=devices(2), chunks=2, checkpoint='always')
    x = torch.randn(4, 4)
    with pytest.raises(RuntimeError, match='or a skip tensor that it popped, was changed'):
        gpipe.step(x, x, loss_of)


@cpus
@cpu_only('it is about what layers do')
def test_a_skip_that_is_not_stashed(devices):
    @skippable(stash=['skip'])
    class Forgets(nn.Module):
        def forward(self, x):
            return x

    gpipe = GPipe(nn.Sequential(nn.Linear(4, 4), Forgets(), Pop()), [2, 1], devices=devices(2))
    x = torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="'skip' must be stashed but have not"):
        gpipe.step(x, x, loss_of)


@cpu_only('it is about hooks of the calling thread')
def test_hooks_that_a_fault_leaves_behind_are_taken_away():
    def fail(x):
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x).__enter__()
        raise ValueError

    gpipe = GPipe(nn.Sequential(nn.Linear(4, 4), Spy(fail)), [1, 1], devices=['cpu'] * 2)
    with pytest.raises(ValueError):
        gpipe.step(torch.rand(4, 4), torch.rand(4, 4), loss_of)
    assert innermost_hooks() is None


@devices
def test_gradients_are_added(devices):
    model = nn.Linear(4, 3).double()
    gpipe = GPipe(nn.Sequential(copy.deepcopy(model)), [1], devices=devices(1), chunks=2)
    for _ in range(3):
        x, y = torch.randn(5, 4, dtype=torch.double), torch.randn(5, 3, dtype=torch.double)
        loss_of(model(x), y).backward()
        gpipe.step(on_first(gpipe, x), on_first(gpipe, y), loss_of)
    assert_same(gradients(gpipe), gradients(model))


@devices
def test_hooks_of_parameters_see_the_whole_gradient_once(devices):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    gpipe = GPipe(copy.deepcopy(model), [2, 1], devices=devices(2), chunks=4)
    calls = []
    for net in (model, gpipe):
        for parameter in net.parameters():
            parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
            parameter.register_post_accumulate_grad_hook(calls.append)
    train(model, gpipe, 8, steps=1)
    assert len(calls) == 8


@devices
def test_a_gradient_is_not_copied_into_its_parameter(devices):
    gpipe = GPipe(nn.Sequential(nn.Linear(4, 3)), [1], devices=devices(1), chunks=2)
    seen = []
    gpipe[0].weight.register_hook(lambda grad: seen.append(grad.data_ptr()))
    gpipe.step(torch.rand(4, 4, device=devices.first), torch.rand(4, 3, device=devices.first),
               loss_of)
    assert seen == [gpipe[0].weight.grad.data_ptr()]


@devices
def test_layers_find_their_parameters_as_they_are(devices):
    """With what was set on them; what a layer puts in their place stays; lazy ones are as ever."""
    class Layer(nn.Linear):
        def forward(self, x):
            if isinstance(self.bias, nn.Parameter) and self.weight.is_known:
                self.bias = None
            return super().forward(x)

    layer = Layer(4, 4)
    last = nn.Linear(4, 3) if devices.are_accelerators else nn.LazyLinear(3)
    gpipe = GPipe(nn.Sequential(layer, last), [2], devices=devices(1), chunks=2)
    layer.weight.is_known = True
    for _ in range(2):
        gpipe.step(torch.rand(4, 4, device=devices.first), torch.rand(4, 3, device=devices.first),
                   loss_of)
    assert layer.bias is None and layer.weight.grad is not None
    assert gpipe[1].weight.grad.shape == (3, 4)


@devices
def test_hooks_of_layers(devices):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    gpipe = GPipe(copy.deepcopy(model), [2, 1], devices=devices(2), chunks=4)
    for net in (model, gpipe):
        net[1].register_full_backward_hook(lambda layer, input, output: (input[0] * 2,))
    train(model, gpipe, 8)


@devices
@pytest.mark.parametrize('deferred', [False, True])
def test_batch_norm(devices, deferred):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    plain, gpipe = [GPipe(copy.deepcopy(model), [1, 3], devices=devices(2), chunks=3,
                          checkpoint='always', deferred_batch_norm=deferred) for _ in range(2)]
    for _ in range(3):
        x = on_first(gpipe, torch.randn(8, 4, dtype=torch.double))
        target = torch.randn(8, 3, dtype=torch.double).to(gpipe.devices[-1])
        loss_of(plain(x), target).backward()
        gpipe.step(x, target, loss_of)
    assert_same(gradients(gpipe), gradients(plain))
    assert_same(gpipe.state_dict().values(), plain.state_dict().values())


@cpu_only('autocast of the CPU')
@cpus
def test_autocast(devices):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    plain, gpipe = [GPipe(copy.deepcopy(model), [1, 2], devices=devices(2), chunks=2,
                          checkpoint='always') for _ in range(2)]
    seen = []
    for net in (plain, gpipe):
        net[1].register_full_backward_hook(
            lambda layer, input, output: seen.append(torch.is_autocast_enabled('cpu')))
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
        {'y': y.to(gpipe.devices[-1])}, loss_fn, return_output=True)
    assert output['n'] == 2 and output['y'].shape == (7, 4)
    assert_same([found, own.grad, *gradients(gpipe)],
                [loss.detach(), table.grad, *gradients(model)])


@devices
@modes
@pytest.mark.parametrize('schedule', ['1f1b', 'interleaved'])
def test_shared_parameters_and_layers(devices, mode, schedule):
    """A weight of two layers, one layer in two places, and a frozen weight."""
    def make():
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        frozen = nn.Linear(4, 4).requires_grad_(False)
        return nn.Sequential(*model, model[0], frozen, nn.Tanh(), frozen,
                             nn.Linear(4, 3)).double()

    places = devices(4) if schedule == '1f1b' else devices(2) * 2
    gpipe = GPipe(make(), [2, 2, 2, 3], devices=places, chunks=3, checkpoint=mode)
    train(make(), gpipe, 7, schedule=schedule)


@devices
def test_a_skip_may_be_none(devices):
    model = nn.Sequential(nn.Linear(4, 4), Stash(nothing=True), nn.Tanh(), Pop(),
                          nn.Linear(4, 3)).double()
    train(model, GPipe(copy.deepcopy(model), [2, 1, 2], devices=devices(3), chunks=2), 5)


@devices
def test_all_frozen_but_the_last_partition(devices):
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Tanh(),
                          nn.Linear(4, 3)).double()
    gpipe = GPipe(copy.deepcopy(model), [1, 1, 1], devices=devices(3), chunks=2)
    x, y = torch.randn(5, 4, dtype=torch.double), torch.randn(5, 3, dtype=torch.double)
    loss_of(model(x), y).backward()
    gpipe.step(on_first(gpipe, x), y.to(gpipe.devices[-1]), loss_of)
    assert_same(gradients(gpipe), gradients(model))


# --- losses
# ----------------------------------------------------------------------------------------


@cpu_only('it is about losses, not where they are')
@cpus
def test_a_sum(devices):
    def loss_fn(output, target):
        return (output - target).square().sum() / 16
    model = layers()
    gpipe = GPipe(copy.deepcopy(model), [4, 4], devices=devices(2), chunks=3)
    train(model, gpipe, 7, steps=1, loss_fn=loss_fn, expected_loss=loss_fn, normalizer=1)
    train(model, gpipe, 7, steps=1, loss_fn=loss_fn, normalizer=21 / 16)


@cpu_only('it is about losses, not where they are')
@cpus
def test_a_scalar_may_have_dimensions(devices):
    model = layers()
    gpipe = GPipe(copy.deepcopy(model), [4, 4], devices=devices(2), chunks=3)
    train(model, gpipe, 7, steps=1, loss_fn=lambda *args: loss_of(*args).reshape(1, 1))


@cpu_only('it is refused before')
def test_partitions_that_do_not_go_by_devices():
    gpipe = GPipe(layers(), [4, 2, 2], devices=['cpu:0', 'cpu:1', 'cpu:0'])
    x = torch.randn(4, 4, dtype=torch.double)
    with pytest.raises(ValueError, match="'zb-v' takes 2 partitions on each device, but there"):
        gpipe.step(x, x[:, :3], loss_of, schedule='zb-v')


@cpu_only('it is about losses, not where they are')
@cpus
def test_a_mean_over_what_is_counted_in_targets(devices):
    """Of one micro-batch nothing is counted at all."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    weight = torch.rand(5, dtype=torch.double)
    gpipe = GPipe(copy.deepcopy(model), [1, 2], devices=devices(2), chunks=3)
    x, target = torch.randn(7, 4, dtype=torch.double), torch.tensor([1, -100, 3, -100, -100, 2, 0])
    for given_weight in (None, weight):
        def count(target):
            kept = target[target != -100]
            return len(kept) if given_weight is None else given_weight[kept].sum()

        loss_fn = nn.CrossEntropyLoss(given_weight)
        loss = loss_fn(model(x), target)
        loss.backward()
        found = gpipe.step(x, target, loss_fn, normalizer=count)
        assert_same([found, *gradients(gpipe)], [loss.detach(), *gradients(model)])


@cpu_only('it is about losses, not where they are')
@cpus
def test_a_loss_with_parameters(devices):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.double))

        def forward(self, output, target):
            return loss_of(output, target) * self.scale.square()

    model, loss_fn = layers(), Loss()
    own = copy.deepcopy(loss_fn)
    calls = []
    own.scale.register_post_accumulate_grad_hook(calls.append)
    gpipe = GPipe(copy.deepcopy(model), [4, 4], devices=devices(2), chunks=3)
    train(model, gpipe, 7, steps=1, loss_fn=own, expected_loss=loss_fn)
    assert_same([own.scale.grad], [loss_fn.scale.grad])
    assert len(calls) == 1


@cpu_only('it is about losses, not where they are')
@cpus
def test_a_loss_scale(devices):
    model = layers()
    gpipe = GPipe(copy.deepcopy(model), [4, 4], devices=devices(2), chunks=3)
    scaler = torch.amp.GradScaler('cpu', init_scale=256.0)
    optimizer = torch.optim.SGD(gpipe.parameters(), 0.1)
    x, y = torch.randn(7, 4, dtype=torch.double), torch.randn(7, 3, dtype=torch.double)
    loss = loss_of(model(x), y)
    loss.backward()
    found = gpipe.step(x, y, loss_of, scale=scaler.scale)
    scaler.unscale_(optimizer)
    assert_same([found, *gradients(gpipe)], [loss.detach(), *gradients(model)])
    scaler.step(optimizer)
    scaler.update()


@cpu_only('it is about losses, not where they are')
@cpus
@pytest.mark.parametrize('leaf', [False, True])
def test_a_target_with_a_gradient(devices, leaf):
    model, teacher = layers(), nn.Linear(4, 3).double()
    gpipe, own = GPipe(copy.deepcopy(model), [4, 4], devices=devices(2), chunks=3), None
    x = torch.randn(7, 4, dtype=torch.double)
    grads = []
    for net in (model, gpipe):
        teacher.zero_grad()
        own = torch.ones(7, 3, dtype=torch.double, requires_grad=True)
        target = own if leaf else own * teacher(x)
        if net is model:
            loss_of(net(x), target).backward()
        else:
            net.step(x, target, loss_of)
        grads.append([own.grad, *gradients(teacher), *gradients(net)])
    assert_same(*grads)


@cpu_only('it is about losses, not where they are')
@cpus
def test_the_batch_of_a_target_is_where_it_is(devices):
    def loss_fn(output, target):
        return nn.functional.cross_entropy(output.mean(0), target)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    gpipe = GPipe(copy.deepcopy(model), [2, 1], devices=devices(2), chunks=3, batch_dim=1)
    x, target = torch.randn(5, 7, 4, dtype=torch.double), torch.randint(3, (7,))
    loss_fn(model(x), target).backward()
    with pytest.raises(ValueError, match='target has no dimension 1'):
        gpipe.step(x, target, loss_fn)
    gpipe.step(x, target, loss_fn, target_dim=0)
    assert_same(gradients(gpipe), gradients(model))


# --- memory
# ----------------------------------------------------------------------------------------


def saved(x, alive, most):
    """Give a number behind a node that keeps a tensor as long as its graph lives."""

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
    """What a node keeps."""


class Keep(nn.Module):
    """Count graphs of this layer that are alive."""

    def __init__(self):
        super().__init__()
        self.alive, self.most = weakref.WeakSet(), []

    def forward(self, x):
        """Do so."""
        return saved(x, self.alive, self.most)


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


@cpu_only('it counts objects of the host')
def test_nothing_is_left_behind():
    gpipe = GPipe(layers(), [2, 2, 2, 2], devices=[f'cpu:{j}' for j in range(4)], chunks=4,
                  checkpoint='always')
    x = torch.randn(8, 4, dtype=torch.double)
    seen = weakref.WeakSet()
    gpipe[5].register_forward_hook(lambda layer, args, output: seen.add(output))
    gc.disable()
    try:
        gpipe.step(x, x[:, :3], loss_of)
        assert not seen
    finally:
        gc.enable()


# --- failures
# ----------------------------------------------------------------------------------------


class Fault:
    """Raise in the n-th call; it belongs to no layer, as a recomputation puts these back."""

    layer = where = error = None
    left = 0

    @classmethod
    def arm(cls, layer, where, left, error):
        """Be ready to raise."""
        cls.layer, cls.where, cls.left, cls.error = layer, where, left, error

    @classmethod
    def count(cls, layer, where):
        """Raise, if it is time to."""
        if (layer, where) == (cls.layer, cls.where):
            cls.left -= 1
            if cls.left == 0:
                cls.layer = None
                raise cls.error('so')


class Faulty(nn.Module):
    """Raise when it is told to, in forward or in backward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        """Do so."""
        Fault.count(self, 'forward')
        x = self.linear(x)
        x.register_hook(lambda grad: Fault.count(self, 'backward'))
        return x


@devices
@pytest.mark.parametrize('schedule', ['gpipe', '1f1b', 'interleaved', 'zb-h1'])
@pytest.mark.parametrize('mode', ['always', 'never'])
@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt])
def test_a_fault_at_each_action(devices, schedule, mode, error):
    if devices.are_accelerators and error is KeyboardInterrupt:
        pytest.skip("PyTorch's threads of devices end the process on anything but an Exception")
    model = nn.Sequential(*[Faulty() for _ in range(3)])
    reference = copy.deepcopy(model)
    gpipe = GPipe(model, [1] * 3, devices=devices(3), chunks=3, checkpoint=mode)
    x = torch.randn(6, 4)
    loss_of(reference(x), x).backward()
    y, target = on_first(gpipe, x), x.to(gpipe.devices[-1])
    for j in range(3):
        for where, number in (('forward', 1), ('forward', 3), ('backward', 1), ('backward', 2)):
            Fault.arm(model[j], where, number, error)
            with pytest.raises(error) as caught:
                gpipe.step(y, target, loss_of, schedule=schedule)
            if error is ValueError:
                assert f'partition {j}' in ''.join(caught.value.__notes__)
            del caught
            assert all(parameter.grad is None for parameter in gpipe.parameters())
            gpipe.step(y, target, loss_of, schedule=schedule)
            assert_same(gradients(gpipe), gradients(reference), 1e-6)
            gpipe.zero_grad()


@workers
def test_no_action_starts_after_a_fault(devices, monkeypatch):
    stopped, calls = threading.Event(), []
    note = _Shared.fail
    monkeypatch.setattr(_Shared, 'fail', lambda *args: (note(*args), stopped.set()))

    def wait(x):
        calls.append(x.detach())
        assert len(calls) < 2 or stopped.wait(20)

    def fail(x):
        raise ValueError

    gpipe = GPipe(nn.Sequential(nn.Linear(2, 2), Spy(wait), Spy(fail)), [2, 1],
                  devices=devices.distinct(2), chunks=4)
    x = torch.rand(4, 2, device=devices.first)
    # The first step goes one by one, as it is not known yet who draws.
    gpipe[2].see, fail = lambda x: None, gpipe[2].see
    stopped.set()
    gpipe.step(x, x.to(gpipe.devices[-1]), loss_of, schedule='gpipe')
    gpipe[2].see = fail
    stopped.clear(), calls.clear()
    alive, target = WeakLog(gpipe[0]), x.to(gpipe.devices[-1])
    gc.disable()
    try:
        gpipe.step(x, target, loss_of, schedule='gpipe')
    except ValueError:
        pass
    finally:
        gc.enable()
    assert len(calls) == 2
    calls.clear()
    del x, target
    assert alive.alive() == 0


@workers
def test_keyboard_interrupt_of_the_caller(devices, ctrl_c, monkeypatch):
    """What is under way ends; nothing starts after it, and nothing is added or kept."""
    stopping, calls, ended = threading.Event(), [], []
    stop = Workers.stop
    monkeypatch.setattr(Workers, 'stop', lambda workers: (stopping.set(), stop(workers)))

    def interrupt(x):
        calls.append(len(x))
        if len(calls) == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            ended.append(stopping.wait(20))

    gpipe = GPipe(nn.Sequential(nn.Linear(2, 2), Spy(interrupt)), [1, 1],
                  devices=devices.distinct(2), chunks=4)
    x = torch.rand(4, 2, device=devices.first)
    alive, target = WeakLog(gpipe[0]), x.clone().to(gpipe.devices[-1])
    gc.disable()
    try:
        gpipe.step(x, target, loss_of, schedule='gpipe')
    except KeyboardInterrupt:
        pass
    y = x.clone()
    del x
    try:
        assert alive.alive() == 0
    finally:
        gc.enable()
    assert len(calls) == 2 and ended == [True] and gpipe[0].weight.grad is None
    gpipe.step(y, target, loss_of)


@cpu_only('it is about losses, not where they are')
@cpus
def test_a_fault_in_the_loss(devices):
    def loss_fn(output, target):
        raise ValueError('so')
    gpipe = GPipe(layers(), [4, 4], devices=devices(2), chunks=3)
    x = torch.randn(7, 4, dtype=torch.double)
    with pytest.raises(ValueError, match='so') as caught:
        gpipe.step(x, x[:, :3], loss_fn)
    assert 'in the loss of micro-batch 0 of 3' in caught.value.__notes__


@devices
def test_skips_that_were_changed_in_place_behind_their_stash(devices):
    class Change(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    @skippable(stash=['skip'])
    class StashSame(nn.Module):
        def forward(self, x):
            x = x * 1
            yield stash('skip', x)
            return x

    model = nn.Sequential(nn.Linear(4, 4), StashSame(), Change(), Pop())
    gpipe = GPipe(model, [2, 1, 1], devices=devices(3), chunks=2, checkpoint='never')
    x = torch.randn(4, 4, device=devices.first)
    with pytest.raises(RuntimeError, match="the skip tensor 'skip', was changed in place"):
        gpipe.step(x, x.to(gpipe.devices[-1]), loss_of)


@cpu_only('it is refused before')
@pytest.mark.parametrize('how', ['eval', 'no_grad', 'inference'])
def test_a_step_is_for_training(how):
    gpipe = GPipe(layers(), [4, 4], devices=['cpu'] * 2).train(how != 'eval')
    x = torch.randn(4, 4, dtype=torch.double)
    context = {'eval': torch.enable_grad, 'no_grad': torch.no_grad,
               'inference': torch.inference_mode}[how]
    with context(), pytest.raises(RuntimeError, match='a step computes gradients'):
        gpipe.step(x, x[:, :3], loss_of)


BAD = [(dict(schedule='2f2b'), "there is no schedule '2f2b'"),
       (dict(schedule=make('1f1b', 3, 4)), 'for 3 stages and 4 micro-batches'),
       (dict(schedule=make('1f1b', 2, 3)), 'for 2 stages and 3 micro-batches'),
       (dict(schedule=Schedule.parse('0F0,0F1,0F2,0F3\n1F0,1F1,1F2,1F3')), 'no backward'),
       (dict(schedule=Schedule.parse('0F0,0B0\n1B0,1F0')), 'for which it waits'),
       (dict(schedule=make('interleaved', 1, 4, 2)), r'stages \[0, 1\] on one device'),
       (dict(target=torch.zeros(5, 3).double()), 'the target has 5 samples'),
       (dict(loss_fn=lambda output, target: output), r'of shape \(2, 3\)'),
       (dict(loss_fn=lambda output, target: 1.0), 'but gave float'),
       (dict(loss_fn=nn.MSELoss(reduction='sum')), 'normalizer=1')]


@cpu_only('it is refused before')
@pytest.mark.parametrize('options, message', BAD)
def test_bad_input(options, message):
    gpipe = GPipe(layers(), [4, 4], devices=['cpu:0', 'cpu:1'], chunks=4)
    x = torch.randn(8, 4, dtype=torch.double)
    given = {'target': x[:, :3], 'loss_fn': loss_of, **options}
    with pytest.raises(ValueError, match=message):
        gpipe.step(x, **given)


@cpu_only('it is refused before')
def test_nothing_is_counted():
    gpipe = GPipe(layers(), [4, 4], devices=['cpu'] * 2)
    x = torch.randn(4, 4, dtype=torch.double)
    with pytest.raises(ValueError, match='counts nothing in the whole target'):
        gpipe.step(x, x[:, :3], loss_of, normalizer=lambda target: 0)


@cpu_only('it is refused before')
@pytest.mark.parametrize('register', [
    'register_forward_hook', 'register_forward_pre_hook', 'register_full_backward_hook',
    'register_full_backward_pre_hook'])
def test_hooks_of_the_model_itself(register):
    gpipe = GPipe(layers(), [4, 4], devices=['cpu'] * 2)
    handle = getattr(gpipe, register)(lambda *args: None)
    x = torch.randn(4, 4, dtype=torch.double)
    with pytest.raises(RuntimeError, match='register them on its layers'):
        gpipe.step(x, x[:, :3], loss_of)
    handle.remove()
    gpipe.step(x, x[:, :3], loss_of)


@cpu_only('it is refused before')
def test_a_way_out_of_devices_in_another_order():
    gpipe = GPipe(layers(), [2, 2, 2, 2], devices=['cpu:0', 'cpu:1'] * 2, chunks=3)
    x = torch.randn(6, 4, dtype=torch.double)
    with pytest.raises(ValueError, match=r'devices=\[0, 1, 1, 0\]'):
        gpipe.step(x, x[:, :3], loss_of, schedule='zb-v')


@cpu_only('it is refused before')
def test_nothing_to_train():
    gpipe = GPipe(layers().requires_grad_(False), [4, 4], devices=['cpu'] * 2)
    x = torch.randn(4, 4, dtype=torch.double)
    with pytest.raises(RuntimeError, match='there is nothing to train'):
        gpipe.step(x, x[:, :3], loss_of)


@cpu_only('it is about files')
def test_a_schedule_from_a_file(tmp_path):
    path = tmp_path / 'schedule.csv'
    path.write_text(make('1f1b', 2, 3).to_csv())
    model = layers()
    gpipe = GPipe(copy.deepcopy(model), [4, 4], devices=['cpu:0', 'cpu:1'], chunks=3)
    train(model, gpipe, 7, schedule=path)
    train(model, gpipe, 7, schedule=str(path))
    path.write_text('0F0,zero\n')
    with pytest.raises(ValueError, match='row 1, column 2'):
        gpipe.step(torch.zeros(3, 4).double(), torch.zeros(3, 3).double(), loss_of, schedule=path)


@cpu_only('it is about files')
def test_a_schedule_from_a_file_with_a_mark_of_its_encoding(tmp_path):
    """In v0.8.0, the mark was taken for a part of the first action."""
    path = tmp_path / 'schedule.csv'
    path.write_text(make('1f1b', 2, 3).to_csv(), 'utf-8-sig')
    model = layers()
    gpipe = GPipe(copy.deepcopy(model), [4, 4], devices=['cpu:0', 'cpu:1'], chunks=3)
    train(model, gpipe, 7, schedule=path)
