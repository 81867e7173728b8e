"""Lifetimes: no tensor of a step outlives it, and no step needs more memory than necessary."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from benchmarks.harness.memory import LiveTensors
from tests.devices import devices
from tests.helpers import STEPS, WeakLog, drop_failed_backward
from tests.marks import MODES
from torchgpipe import GPipe


def make(devices, mode):
    """Return a pipeline, and weak references to all that passes its layers."""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 4), nn.Tanh()
    )
    gpipe = GPipe(
        model, [2, 2, 2], devices=devices(3), chunks=4, checkpoint=mode, deferred_batch_norm=True
    )
    return gpipe, WeakLog(*gpipe)


@devices
def test_nothing_is_alive_after_a_step(devices):
    for step in list(STEPS.values()):
        gpipe, log = make(devices, 'except_last')
        for _ in range(10):
            step(gpipe)
            assert log.alive() == 0
            log.refs.clear()


@devices
def test_checkpointed_activations_are_not_alive_after_forward(devices):
    """Only the boundary tensors of the first partition, Linear and BatchNorm1d, are alive."""
    alive = {}
    for mode in MODES:
        gpipe, _ = make(devices, mode)
        log = WeakLog(gpipe[0])
        x = torch.rand(8, 4, device=devices.first)
        output = gpipe(x)
        del x
        alive[mode] = log.alive()
        del output
    # Per micro-batch, the Linear's input (part of the mini-batch) and its output.
    assert alive == {'never': 8, 'except_last': 5, 'always': 4}


@devices
def test_gradients_of_a_failed_backward_hold_nothing(devices):
    gpipe, log = make(devices, 'always')

    def fail(grad):
        raise ZeroDivisionError

    output = gpipe(torch.rand(8, 4, device=devices.first))
    output.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    del output
    if devices.are_accelerators:
        drop_failed_backward(gpipe)
    assert log.alive() == 0


@devices
def test_the_peak_of_a_training_step(devices):
    """The peak has the inputs of all cells, the output, and the memory of one cell."""
    for n in [1, 2, 4]:
        m, size, width, depth = 16, 32, 64, 6
        torch.manual_seed(0)
        model = nn.Sequential(
            *[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(n * depth)]
        )
        gpipe = GPipe(model, [depth] * n, devices=devices(n), chunks=m, checkpoint='always')
        partition = gpipe.partitions[0]
        parameters = sum(p.numel() * p.element_size() for p in gpipe.parameters())
        boundary = size * width * 4

        def step(module, x):
            output = module(x)
            output.backward(torch.ones_like(output))
            return output

        x = torch.rand(m * size, width, device=devices.first)
        step(gpipe, x)  # starts workers and learns which partitions draw random numbers
        with LiveTensors().watched() as cell:  # while the parameters have their gradients
            step(partition, x[:size].clone().requires_grad_())
        gpipe.zero_grad()
        with LiveTensors().watched() as live:
            step(gpipe, x)
        inputs = (n - 1) * m * boundary  # inputs of the first partition are the caller's
        output_and_gradient = 2 * m * boundary  # including the one cell's
        expected = inputs + output_and_gradient + cell.peak - boundary + parameters
        # One thread runs backward on all CPUs. Accelerators may be in a cell at the same time.
        beside = (n - 1) * cell.peak if devices.are_accelerators else 0
        assert 0.8 * expected <= live.peak <= 1.1 * expected + beside
        assert live.now == parameters  # and nothing is left but gradients

        # The counterpart: without checkpointing it takes far more.
        gpipe.zero_grad()
        gpipe.checkpoint = 'never'
        with LiveTensors().watched() as live:
            step(gpipe, x)
        assert live.peak > 1.5 * expected


@devices
def test_a_buffer_that_carries_a_graph_keeps_nothing_alive(devices):
    class Carry(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.register_buffer('last', torch.zeros(4))

        def forward(self, x):
            y = super().forward(x)
            self.last = y.sum(0)
            return y

    gpipe = GPipe(
        nn.Sequential(Carry(), nn.Tanh()), [2], devices=devices(1), chunks=2, checkpoint='always'
    )
    log = WeakLog(*gpipe)
    output = gpipe(torch.rand(4, 4, device=devices.first))
    gpipe[0].last = torch.zeros(4, device=devices.first)
    del output
    assert log.alive() == 0


#: In a new process, and without the garbage collector.
FIRST = """
import gc, weakref
import torch
from torch import nn
from torchgpipe import GPipe

gc.collect()
gc.disable()
layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
gpipe = GPipe(layers, [1, 1], devices=['cpu:0', 'cpu:1'], chunks=2, checkpoint='never')
seen = weakref.WeakSet()
layers[0].register_forward_hook(lambda layer, args, output: seen.add(output))
x = torch.ones(4, 4)
gpipe.step(x, x, nn.functional.mse_loss)
assert not seen, len(seen)
"""


@pytest.mark.slow
def test_in_v080_the_first_step_of_a_process_kept_its_outputs():
    """PyTorch imports its compiler at the first call of a mode, and leaves a cycle of frames."""
    subprocess.run([sys.executable, '-c', FIRST], check=True)
