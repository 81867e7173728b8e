"""Samples of outputs: compared at once on the CPU, and later where a look would be a wait."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.devices import ACCELERATOR, devices
from tests.helpers import compare_all_pending, in_partitions
from torchgpipe import GPipe, is_recomputing
from torchgpipe.engine.checkpoint import samples


@devices
@pytest.mark.parametrize(
    'forward',
    [lambda self, x: x * next(self.random), lambda self, x: (x.data.mul_(2), x * 1)[1]],
    ids=['a state of its own', 'input behind the version'],
)
def test_changes_without_a_snapshot_are_detected_by_the_result(devices, forward):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer('ema', torch.ones(1))
            self.random = itertools.count(1)

        def forward(self, x):
            return forward(self, x)

    gpipe = in_partitions(devices, nn.Linear(4, 4), Layer(), chunks=2, checkpoint='always')
    output = gpipe(torch.rand(4, 4, device=devices.first))
    with pytest.raises(RuntimeError, match='its output has other values'):
        output.sum().backward()
        compare_all_pending(gpipe)


@devices
def test_rounding_and_nan_are_no_different_result(devices):
    for dtype in [torch.float64, torch.float32, torch.bfloat16]:

        class Noise(nn.Module):
            def forward(self, x):
                y = x * (1e6 if not is_recomputing() else 1e6 * (1 + 4 * torch.finfo(dtype).eps))
                return torch.cat([y, x * float('nan'), x * float('inf')], 1)

        gpipe = GPipe(
            nn.Sequential(nn.Linear(4, 4), Noise()).to(dtype),
            [1, 1],
            devices=devices(2),
            chunks=2,
            checkpoint='always',
        )
        gpipe(torch.rand(4, 4, dtype=dtype, device=devices.first)).sum().backward()
        compare_all_pending(gpipe)


class Layer(nn.Linear):
    """A layer whose output depends on the count of a closure, if that is switched on."""

    def __init__(self):
        super().__init__(4, 4)
        counter = itertools.count()
        self.on = True
        self.count = lambda: next(counter)

    def forward(self, x):
        return super().forward(x) + (self.count() if self.on else 0)


@pytest.fixture
def elsewhere(monkeypatch):
    """Take the CPU for a device that takes its time; give the events that are still to come."""
    events = []

    def event(device):
        events.append(False)
        k = len(events) - 1
        return lambda: events[k]

    monkeypatch.setattr(samples, '_is_readable', lambda x: False)
    monkeypatch.setattr(samples, '_to_host', torch.clone)
    monkeypatch.setattr(samples, '_event', event)
    return events


def make():
    """Return a pipeline of two partitions, the second of which does something else each time."""
    model = nn.Sequential(nn.Linear(4, 4), Layer())
    return GPipe(model, [1, 1], devices=['cpu'] * 2, chunks=2, checkpoint='always')


def step(gpipe):
    """Run forward and backward."""
    gpipe(torch.rand(4, 4)).sum().backward()


def test_as_soon_as_the_device_is_done(elsewhere):
    gpipe = make()
    step(gpipe)
    step(gpipe)  # Nothing has come yet.
    assert elsewhere == [False] * 8
    elsewhere[:] = [True] * 8
    with pytest.raises(RuntimeError, match='other values, in partition 1 and an earlier backward'):
        step(gpipe)
    gpipe[1].on = False
    step(gpipe)  # It is said once.
    elsewhere[:] = [True] * len(elsewhere)
    step(gpipe)


def test_compared_samples_are_freed(elsewhere):
    gpipe = make()
    gpipe[1].on = False
    step(gpipe)
    late = [partition.pending for partition in gpipe._engine.partitions]
    assert [len(each) for each in late] == [2, 2]
    elsewhere[:] = [True, True, True, False]
    with torch.no_grad():
        gpipe(torch.rand(4, 4))
    assert sum(len(each) for each in late) == 1


def test_samples_are_copies(elsewhere):
    gpipe = make()
    gpipe[1].on = False
    output = gpipe(torch.rand(4, 4))
    output.sum().backward()
    with torch.no_grad():
        output.zero_()
    elsewhere[:] = [True] * 4
    step(gpipe)


@pytest.mark.accelerator
def test_on_an_accelerator():
    gpipe = in_partitions([ACCELERATOR], Layer(), chunks=2, checkpoint='always')
    gpipe(torch.rand(4, 4, device=ACCELERATOR)).sum().backward()
    torch.accelerator.synchronize()
    with pytest.raises(RuntimeError, match='other values, in partition 0 and an earlier backward'):
        gpipe(torch.rand(4, 4, device=ACCELERATOR))


def test_a_mode_of_the_user_s_does_not_see_samples():
    seen = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.rand(200)
    with See():
        kept = samples.samples_of([x])
        assert samples.compare([x], kept) == [] and not seen
        x.sum()
    assert len(seen) == 1
