"""Threads that run the actions of a step concurrently, and the effects of a fault."""

import copy
import signal
import sys
import threading
import time
from contextlib import suppress

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.engine.steps import loss_of
from tests.helpers import Spy, WeakLog, assert_same, gradients, in_partitions, no_gc, on_first
from torchgpipe import GPipe
from torchgpipe.base.private import innermost_hooks
from torchgpipe.engine.workers import Workers, _Progress


@pytest.mark.parametrize('after', ['nothing', 'a plain call'])
@devices
def test_workers_work_at_the_same_time(devices, after):
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

    gpipe = in_partitions(devices.distinct, Meet(1, 0), Meet(0, 1), chunks=3, checkpoint='never')
    x = torch.randn(6, 4, device=devices.first)
    if after == 'a plain call':  # which tells that the layers draw nothing, and not of the loss
        gpipe(x)
    for meets in (False, True):
        Meet.meets = meets
        gpipe[0].calls = gpipe[1].calls = 0
        gpipe.step(x, x.to(gpipe.devices[-1]), loss_of, schedule='gpipe')


@pytest.mark.slow
def test_threads_may_take_steps_of_the_same_model():
    """None may come first on one worker and last on another."""
    gpipe = GPipe(
        nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]),
        [1] * 4,
        devices=[f'cpu:{j}' for j in range(4)],
        chunks=2,
        checkpoint='never',
    )
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


def test_hooks_that_a_fault_leaves_behind_are_taken_away():
    def fail(x):
        torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x).__enter__()
        raise ValueError

    gpipe = in_partitions(['cpu'] * 2, nn.Linear(4, 4), Spy(fail))
    with pytest.raises(ValueError):
        gpipe.step(torch.rand(4, 4), torch.rand(4, 4), loss_of)
    assert innermost_hooks() is None


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


@devices
def test_no_action_starts_after_a_fault(devices, monkeypatch):
    stopped, calls = threading.Event(), []
    note = _Progress.fail
    monkeypatch.setattr(_Progress, 'fail', lambda *args: (note(*args), stopped.set()))

    def wait(x):
        calls.append(x.detach())
        assert len(calls) < 2 or stopped.wait(20)

    def fail(x):
        raise ValueError

    gpipe = GPipe(
        nn.Sequential(nn.Linear(2, 2), Spy(wait), Spy(fail)),
        [2, 1],
        devices=devices.distinct(2),
        chunks=4,
    )
    x = torch.rand(4, 2, device=devices.first)
    # The first step goes one by one, as it is not known yet who draws.
    gpipe[2].see, fail = lambda x: None, gpipe[2].see
    stopped.set()
    gpipe.step(x, x.to(gpipe.devices[-1]), loss_of, schedule='gpipe')
    gpipe[2].see = fail
    stopped.clear(), calls.clear()
    alive, target = WeakLog(gpipe[0]), x.to(gpipe.devices[-1])
    with no_gc(), suppress(ValueError):
        gpipe.step(x, target, loss_of, schedule='gpipe')
    assert len(calls) == 2
    calls.clear()
    del x, target
    assert alive.alive() == 0


@devices
def test_keyboard_interrupt_of_the_caller(devices, ctrl_c, monkeypatch):
    """Actions in flight finish. No further action starts, and nothing is added or kept."""
    stopping, calls, ended = threading.Event(), [], []
    stop = Workers.stop
    monkeypatch.setattr(Workers, 'stop', lambda workers: (stopping.set(), stop(workers)))

    def interrupt(x):
        calls.append(len(x))
        if len(calls) == 2:
            # Python does not see a signal that comes between its last look and a wait for a lock.
            for _ in range(10):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                if stopping.wait(2):
                    break
            ended.append(stopping.is_set())

    gpipe = in_partitions(devices.distinct, nn.Linear(2, 2), Spy(interrupt), chunks=4)
    x = torch.rand(4, 2, device=devices.first)
    alive, target = WeakLog(gpipe[0]), x.clone().to(gpipe.devices[-1])
    with no_gc():
        with suppress(KeyboardInterrupt):
            gpipe.step(x, target, loss_of, schedule='gpipe')
        y = x.clone()
        del x
        assert alive.alive() == 0
    assert len(calls) == 2 and ended == [True] and gpipe[0].weight.grad is None
    gpipe.step(y, target, loss_of)


def test_the_first_failure_of_the_schedule_counts_whichever_was_first_in_time():
    shared, errors = _Progress({}, []), [ValueError(), KeyError(), KeyboardInterrupt()]
    shared.fail(5, errors[0])
    assert [shared.stops(number) for number in (4, 5, 6)] == [False, False, True]
    shared.fail(3, errors[1])
    assert shared.first_failure() == (3, errors[1])
    shared.fail(7, errors[2])  # It stops all.
    assert shared.first_failure()[1] is errors[2] and shared.stops(0)
