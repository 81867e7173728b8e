"""What is kept of layers for a recomputation is copied when it is written to, and only then."""
import gc
import os
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.harness.live import LiveTensors
from tests.devices import cpu_only, one_worker
from tests.engine.checkpoint.layers import ODD, Layer, compare_modes, doubles, skip_unless_movable
from torchgpipe import GPipe
from torchgpipe.engine.checkpoint import layer_state, snapshot
from torchgpipe.engine.checkpoint.snapshot import copy_of
from torchgpipe.private import data_address


def resident():
    """Return the bytes that this process has in memory."""
    gc.collect()
    return int(Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')


@one_worker
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

    gpipe = GPipe(nn.Sequential(Frozen()), [1], devices=devices(1), chunks=4, checkpoint='always')
    gpipe(torch.rand(4, 8, device=devices.first)).sum().backward()
    addresses = [data_address(buffer) for buffer in gpipe.buffers()]
    assert sum(buffer.nbytes for buffer in gpipe.buffers()) == 90_000_000
    before = resident()
    output = gpipe(torch.rand(4, 8, device=devices.first))
    assert resident() - before < 9_000_000  # not even one of the nine has been copied
    output.sum().backward()
    assert [data_address(buffer) for buffer in gpipe.buffers()] == addresses


@one_worker
def test_a_large_buffer_is_copied_once_per_forward_not_per_cell(devices):
    class Mask(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer('mask', torch.ones(256, 1024))

    gpipe = GPipe(nn.Sequential(Mask()), [1], devices=devices(1), chunks=8, checkpoint='always')
    with LiveTensors().watched() as live:
        output = gpipe(torch.rand(8, 4, device=devices.first))
    assert live.peak < 2 * gpipe[0].mask.nbytes
    assert output is not None


@cpu_only('where a look is a wait, what is small and may be written to is copied for each cell')
def test_what_a_kernel_only_reads_is_not_copied_for_each_cell():
    """Attention asks for the right to write to its mask."""
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer('mask', torch.zeros(64, 64))
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(
                x * self.weight, x, x, attn_mask=self.mask)

    gpipe = GPipe(nn.Sequential(Attention()), [1], devices=['cpu'], chunks=8, checkpoint='always')
    x = torch.rand(8, 2, 64, 8)
    gpipe(x).sum().backward()
    gpipe(x).sum().backward()
    layers = []
    real = layer_state.Layers.__init__

    def note(self, *args):
        real(self, *args)
        layers.append(self)

    copies = []
    with mock.patch.object(layer_state.Layers, '__init__', note), \
            mock.patch.object(layer_state, 'copy_of', lambda x, *args: (
                copies.append(x), copy_of(x, *args))[1]):
        gpipe(x).sum().backward()
    assert len(layers) == 1 and len(copies) == 1


@one_worker
@pytest.mark.parametrize('memory', ['shared', 'numpy'])
def test_memory_that_can_not_be_copied_on_write(devices, memory):
    def make():
        if memory == 'shared':
            buffer = doubles(4).share_memory_()
        else:
            buffer = torch.frombuffer(bytearray(bytes(32)), dtype=torch.double)
            buffer += 1
        return nn.Sequential(nn.Linear(4, 4).double(), Layer(
            lambda layer, x: (layer.scale.mul_(0.9), x * layer.scale.clone())[1],
            {'scale': buffer}))
    compare_modes(make, devices)


@one_worker
@pytest.mark.parametrize('name', ODD)
@pytest.mark.parametrize('large', [False, True], ids=['small', 'large'])
def test_where_nothing_can_be_copied_on_write(devices, name, large, monkeypatch):
    """As on a GPU: what was seen to change is copied, and so is what is small."""
    skip_unless_movable(name, devices)
    if not devices.are_accelerators:
        monkeypatch.setattr(snapshot, '_on_write', lambda x: None)
        monkeypatch.setattr(snapshot.Snapshot, 'is_still', lambda self, now: False)
        monkeypatch.setattr(snapshot.Snapshot, 'was_written', lambda self, now: (
            self._tensor() is not now or not torch.equal(self._value, now)))
    if large:
        monkeypatch.setattr(layer_state, 'SMALL', 0)
    # A kernel that writes to a large frozen parameter and does not say so cannot be noticed
    # there.
    unseen = pytest.raises(RuntimeError, match='its output has other values')
    with unseen if large and name == 'frozen statistics' else nullcontext():
        compare_modes(lambda: nn.Sequential(
            nn.Linear(4, 4).double(), ODD[name](), ODD[name]()), devices)
