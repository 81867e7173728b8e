"""Streams of operations, and waits between them: with streams that only record calls."""

import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tests.helpers import Spy, in_partitions
from torchgpipe import GPipe, is_recomputing
from torchgpipe.engine import backward_order, plain_call, run, workers
from torchgpipe.engine import streams as streams_module
from torchgpipe.engine.checkpoint import recomputation
from torchgpipe.engine.partition import Engine


class Streams:
    """Stands where :mod:`torchgpipe.engine.streams` stands, and takes notes.

    Streams are names that end in the index of their device.
    """

    def __init__(self):
        self.log = []
        self._here = threading.local()

    @contextmanager
    def _enter(self, name, value):
        stack = self._here.__dict__.setdefault(name, [])
        stack.append(value)
        try:
            yield
        finally:
            stack.pop()

    def use_stream(self, stream):
        """Make a stream current."""
        return self._enter('streams', stream)

    def use_device(self, device):
        """Make a device current."""
        return self._enter('devices', str(device))

    def here(self, number=1, name='streams'):
        """Return the names of the current streams."""
        return ', '.join(self._here.__dict__.get(name, [])[-number:])

    def current_stream(self, device):
        """Return the compute stream."""
        return f'compute {device.index}'

    def new_stream(self, device):
        """Return a copy stream."""
        return f'copy {device.index}'

    def get_device(self, stream):
        """Return the device of a stream."""
        return torch.device('cpu', int(stream[-1]))

    def wait_stream(self, source, target):
        """Note that one waits for another, and on which stream this is asked for."""
        self.log.append(f'{source} waits for {target}, on {self.here()}')

    def record_stream(self, tensor, stream):
        """Note who uses which tensor."""
        self.log.append(f'{stream} uses {tensor.tolist()}')


@pytest.fixture
def streams(monkeypatch):
    """Return the notes of all that the engine does with streams."""
    streams = Streams()
    for module in (backward_order, streams_module, plain_call, recomputation, run, workers):
        for name in dir(Streams):
            if hasattr(module, name) and not name.startswith('_'):
                monkeypatch.setattr(module, name, getattr(streams, name))
    monkeypatch.setattr(Engine, 'apart', lambda self, j, k: j != k)
    return streams


def test_a_batch_goes_to_another_device_on_copy_streams(streams, monkeypatch):
    def to(tensor, device):
        streams.log.append(f'copy on {streams.here(2)}')
        return tensor + 1  # another tensor

    monkeypatch.setattr(torch.Tensor, 'to', to)
    model = nn.Sequential(nn.Identity(), nn.Identity())
    gpipe = GPipe(model, [1, 1], devices=['cpu:0', 'cpu:1'], checkpoint='never')
    x = torch.zeros(1, requires_grad=True)
    output = gpipe(x)
    assert streams.log == [
        'copy 0 waits for compute 0, on copy 0',
        'copy on copy 0, copy 1',
        'copy 0 uses [0.0]',
        'compute 1 uses [1.0]',
        'compute 1 waits for copy 1, on compute 1',
    ]
    streams.log.clear()
    output.backward(torch.full((1,), 5.0))
    assert streams.log == [
        'copy 1 waits for compute 1, on ',
        'copy on copy 1, copy 0',
        'copy 1 uses [5.0]',
        'compute 0 uses [6.0]',
        'compute 0 waits for copy 0, on ',
    ]
    assert (output.tolist(), x.grad.tolist()) == ([1], [6])


@pytest.mark.parametrize('devices', [['cpu:0', 'cpu:1'], ['cpu:1', 'cpu:1']])
def test_layers_and_recomputations_run_on_the_compute_stream_of_their_device(
    devices, streams, monkeypatch
):
    seen = []

    def see(_):
        stream = streams.here()
        assert stream == 'compute 1'
        seen.append(is_recomputing())

    real = recomputation.compare

    def compare(*args):
        seen.append(streams.here())
        return real(*args)

    monkeypatch.setattr(recomputation, 'compare', compare)
    gpipe = in_partitions(
        devices, nn.Identity(), nn.Sequential(Spy(see), nn.Linear(2, 2)), checkpoint='always'
    )
    gpipe(torch.rand(2, 2)).sum().backward()
    assert seen == [False, True, 'compute 1']
