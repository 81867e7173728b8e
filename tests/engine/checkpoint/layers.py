"""Layers with state that several test files share, and a comparison of modes."""

from collections import Counter

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import assert_same, call, compare_all_pending, gradients
from torchgpipe import GPipe


def doubles(*shape):
    """Return ones in float64."""
    return torch.ones(shape, dtype=torch.double)


class Layer(nn.Module):
    """A layer with parts, whose forward is a function."""

    def __init__(self, forward, buffers=(), parameters=(), **attributes):
        super().__init__()
        for name, value in dict(buffers).items():
            self.register_buffer(name, value)
        for name, (value, requires_grad) in dict(parameters).items():
            self.register_parameter(name, nn.Parameter(value, requires_grad))
        for name, value in attributes.items():
            setattr(self, name, value)
        self.function = forward

    def forward(self, x):
        return self.function(self, x)


class Decay(nn.Module):
    """A layer whose output depends on a buffer that it changes."""

    def __init__(self, replace):
        super().__init__()
        self.replace = replace
        self.register_buffer('scale', torch.ones(1, dtype=torch.double))

    def forward(self, x):
        if self.replace:
            self.scale = self.scale * 0.9
        else:
            self.scale.mul_(0.9)
        return (x * self.scale.clone()).tanh()


def count(layer, x):
    """Count in Python, and let the count matter."""
    layer.calls += 1
    return x * (1 + layer.calls)


def move_attributes(gpipe):
    """Put tensors that are neither parameters nor buffers where these are."""
    for partition, device in zip(gpipe.partitions, gpipe.devices):
        for layer in partition.modules():
            for name, value in vars(layer).items():
                if isinstance(value, torch.Tensor):
                    setattr(layer, name, value.to(device))


def compare_modes(make, devices, chunks=3, size=9, steps=3):
    """Compare gradients, buffers and parameters with and without checkpoints, after some steps."""
    results = []
    for mode in ('never', 'always'):
        torch.manual_seed(0)
        model = make()
        gpipe = GPipe(
            model, [1, len(model) - 1], devices=devices(2), chunks=chunks, checkpoint=mode
        )
        move_attributes(gpipe)
        torch.manual_seed(1)
        for _ in range(steps):
            call(gpipe, torch.randn(size, 4, dtype=torch.double)).square().sum().backward()
        compare_all_pending(gpipe)
        buffers = [x.to_dense() if x.is_sparse else x for x in gpipe.buffers()]
        results.append([*gradients(gpipe), *buffers, *gpipe.parameters()])
    assert_same(results[1], results[0])


class Executed(TorchDispatchMode):
    """A mode that counts operations."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
