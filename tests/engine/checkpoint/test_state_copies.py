"""The state of layers kept for a recomputation: copies of small tensors and of written ones."""

import gc
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness.memory import LiveTensors
from tests.devices import DEVICES, devices
from tests.engine.checkpoint.layers import Layer, compare_modes, doubles
from tests.equivalence import Case, check
from tests.helpers import assert_same, in_partitions
from tests.zoo.stateful import STATEFUL
from torchgpipe import GPipe
from torchgpipe.engine.checkpoint import state


def resident():
    """Return the bytes that this process has in memory."""
    gc.collect()
    return int(Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')


@devices
def test_constant_buffers_cost_nothing(devices):
    """In v0.3.0, 90 MB of frozen weights in buffers took 96 MB more until backward."""

    class Frozen(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            for k in range(9):
                self.register_buffer(f'weight{k}', torch.rand(1250, 2000))

        def forward(self, x):
            for k in range(9):
                y = nn.functional.linear(x, self.get_buffer(f'weight{k}')[:, :8])
                x = x + nn.functional.linear(y, self.get_buffer(f'weight{k}')[:8, :1250])
            return super().forward(x)

    gpipe = in_partitions(devices, Frozen(), chunks=4, checkpoint='always')
    gpipe(torch.rand(4, 8, device=devices.first)).sum().backward()
    assert sum(buffer.nbytes for buffer in gpipe.buffers()) == 90_000_000
    before = resident()
    output = gpipe(torch.rand(4, 8, device=devices.first))
    assert resident() - before < 9_000_000  # not even one of the nine has been copied
    output.sum().backward()


class Quantized(nn.Module):
    """A layer whose frozen weights are integers in buffers."""

    def __init__(self, width, number=1):
        super().__init__()
        for k in range(number):
            weight = torch.ones(width, width, dtype=torch.int8)
            self.register_buffer(f'weight{k}', weight)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x + self.weight0[0] * self.scale


@pytest.mark.parametrize('width', [3000, 500, 250])
def test_integer_weights_in_buffers_are_not_copied_in_the_first_step(width):
    """90 MB of them, in buffers of any size, even if each of them is small enough for a copy."""
    number = 9_000_000 // width**2

    def pipeline(width):
        layers = nn.Sequential(*[Quantized(width, number) for _ in range(10)])
        return GPipe(layers, [5, 5], devices=['cpu'] * 2, chunks=2, checkpoint='always')

    small = pipeline(8)
    for _ in range(2):
        small(torch.ones(2, 8)).sum().backward()
    gpipe = pipeline(width)
    for parameter in gpipe.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = resident()
    gpipe(torch.ones(2, width)).sum().backward()
    assert resident() - before < 5_000_000


def test_small_buffers_beyond_the_limit_are_compared_by_version():
    """A change between forward and backward is refused; within the limit, there is a copy."""
    number = 4 * state.MOST_COPIED // 250**2

    for changed, is_copied in ((0, True), (number - 1, False)):
        layers = nn.Sequential(*[Quantized(250) for _ in range(number)])
        gpipe = GPipe(layers, [number], devices=['cpu'], checkpoint='always')
        for _ in range(2):
            output = gpipe(torch.ones(2, 250)).sum()
            expected = torch.autograd.grad(
                layers(torch.ones(2, 250)).sum(), [*layers.parameters()]
            )
            gpipe[changed].weight0.zero_()
            if not is_copied:
                with pytest.raises(RuntimeError, match='has been modified by an inplace operat'):
                    output.backward()
                break
            gpipe.zero_grad()
            output.backward()
            assert_same([x.grad for x in gpipe.parameters()], expected)
            gpipe[changed].weight0.fill_(1)


@devices
def test_a_large_buffer_is_not_copied(devices):
    class Mask(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer('mask', torch.ones(256, 1024))

    gpipe = in_partitions(devices, Mask(), chunks=8, checkpoint='always')
    with LiveTensors().watched() as live:
        output = gpipe(torch.rand(8, 4, device=devices.first))
    assert live.peak < 2 * gpipe[0].mask.nbytes
    assert output is not None


@devices
@pytest.mark.parametrize('memory', ['shared', 'numpy'])
def test_memory_without_copy_on_write(devices, memory):
    def make():
        if memory == 'shared':
            buffer = doubles(4).share_memory_()
        else:
            buffer = torch.frombuffer(bytearray(bytes(32)), dtype=torch.double)
            buffer += 1
        return nn.Sequential(
            nn.Linear(4, 4).double(),
            Layer(
                lambda layer, x: (layer.scale.mul_(0.9), x * layer.scale.clone())[1],
                {'scale': buffer},
            ),
        )

    compare_modes(make, devices)


#: Layers whose first write is not in the first pass, which is refused, resizes, or has no version.
LATE = {
    'buffer that grows from 1',
    'buffer_from_the_fifth_call_on',
    'skipped_norm',
    'tensor_in_place',
    'gradient_by_nested_tensors',
    'gradient_by_a_lazy_tensor',
    'nested_tensors_in_place',
}


def test_small_tensors_are_kept_as_large_ones_are(monkeypatch):
    """Tensors that were seen to change are copied, whatever their size."""
    monkeypatch.setattr(state, 'SMALL', 0)
    for name, entry in STATEFUL.items():
        if not entry.refused and name not in LATE:
            check(Case(name, None, 'two workers', 'always', 'plain'), DEVICES['a worker each'])


class Replaced(nn.Module):
    """A buffer that is another tensor after each forward."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer('state', torch.ones(size, dtype=torch.double))

    def forward(self, x):
        y = x.sin() * self.state[0]
        self.state = self.state * 0.5
        return y


@devices
@pytest.mark.parametrize('size', [1, 20_000])
def test_a_buffer_that_is_replaced(devices, size):
    """In v0.15.2, a recomputation on an accelerator used a large buffer of a later forward."""
    compare_modes(lambda: nn.Sequential(nn.Linear(4, 4).double(), Replaced(size)), devices)


class Late(nn.Linear):
    """A layer that registers a buffer when a sample says so."""

    def forward(self, x):
        if x.detach().eq(7).any():
            self.register_buffer('late', torch.ones(1, dtype=x.dtype, device=x.device))
        elif 'late' in self._buffers:
            self.late.mul_(0.9)
            x = x * self.late.clone()
        return super().forward(x)


class ReplacedLater(nn.Linear):
    """A layer that replaces a large buffer when a sample says so."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer('table', torch.ones(20_000, dtype=torch.double))

    def forward(self, x):
        y = super().forward(x) * self.table[:2]
        if x.detach().eq(7).any():
            self.table = self.table * 3
        return y


@devices
@pytest.mark.parametrize('make, name', [(lambda: Late(2, 2), 'late'), (ReplacedLater, 'table')])
def test_a_buffer_that_is_registered_or_replaced_in_a_later_cell(devices, make, name):
    results = []
    for mode in ('never', 'always'):
        torch.manual_seed(0)
        gpipe = in_partitions(devices, make().double(), chunks=4, checkpoint=mode)
        x = torch.tensor([[1.0, 2.0], [7.0, 1.0], [3.0, 4.0], [5.0, 6.0]], dtype=torch.double)
        for _ in range(2):
            gpipe(x.to(devices.first)).square().sum().backward()
        results.append([gpipe[0].weight.grad, gpipe[0].get_buffer(name)])
    assert_same(*results)


@devices
def test_a_mode_of_the_user_s_does_not_see_copies(devices):
    """In the first cell, in later cells and in their recomputations."""
    seen = set()

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    gpipe = GPipe(
        nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.BatchNorm1d(4)),
        [2],
        devices=devices(1),
        chunks=2,
        checkpoint='always',
    )
    for _ in range(2):
        with See():
            output = gpipe(torch.rand(6, 4, device=devices.first))
        output.sum().backward()
    assert 'addmm' in seen and seen.isdisjoint({'clone', 'copy_', 'equal'})
