"""Layers with state that several test files share, and a comparison of modes."""

import pytest
import torch
from torch import nn

from tests import accelerator
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
        """Call the function with this layer."""
        return self.function(self, x)


class Decay(nn.Module):
    """A layer whose output depends on a buffer that it changes."""

    def __init__(self, replace):
        super().__init__()
        self.replace = replace
        self.register_buffer('scale', torch.ones(1, dtype=torch.double))

    def forward(self, x):
        """Scale by a little less each time."""
        if self.replace:
            self.scale = self.scale * 0.9
        else:
            self.scale.mul_(0.9)
        return (x * self.scale.clone()).tanh()


def own_batch_norm(layer, x):
    """Normalise with running statistics of its own, without an nn.BatchNorm."""
    y = torch.nn.functional.batch_norm(x, layer.mean, layer.var, training=True, momentum=0.3)
    return y + layer.mean.detach().clone()


def count(layer, x):
    """Count in Python, and let the count matter."""
    layer.calls += 1
    return x * (1 + layer.calls)


def register(layer, x):
    """Register a buffer in the first forward."""
    if not hasattr(layer, 'late'):
        layer.register_buffer('late', x.new_ones(1))
    layer.late += 1
    return x * layer.late.clone()


def follow(layer, x):
    """Keep a tensor in an attribute, and use the one from before."""
    last, layer.last = layer.last, x.detach().mean(0)
    return x + last


def share(layer, x):
    """Change a buffer through a view of it."""
    layer.part += 1
    return x * layer.whole.sum()


def write(layer, x):
    """Write to a parameter."""
    with torch.no_grad():
        layer.weight.mul_(0.9)
    return x * layer.weight.clone()


def write_behind(layer, x):
    """Write to a parameter such that its version stays."""
    layer.weight.data.mul_(0.9)
    return x * layer.weight.clone()


def observe(layer, x):
    """Move statistics of quantization by a fused kernel, which does not count versions."""
    return torch.fused_moving_avg_obs_fake_quant(
        x.float(),
        layer.on,
        layer.on,
        layer.low,
        layer.high,
        layer.scale,
        layer.zero,
        0.01,
        0,
        255,
        -1,
    ).double()


ODD = {
    'own batch norm': lambda: Layer(own_batch_norm, {'mean': 0 * doubles(4), 'var': doubles(4)}),
    'frozen statistics': lambda: Layer(
        own_batch_norm, parameters={'mean': (0 * doubles(4), False), 'var': (doubles(4), False)}
    ),
    'behind the version': lambda: Layer(
        lambda layer, x: (layer.ema.data.mul_(0.9), x * layer.ema.clone())[1], {'ema': doubles(1)}
    ),
    'count': lambda: Layer(count, calls=0),
    'registered late': lambda: Layer(register),
    'attribute': lambda: Layer(follow, last=doubles(1)),
    'attribute in place': lambda: Layer(
        lambda layer, x: (layer.ema.mul_(0.9), x * layer.ema.clone())[1], ema=doubles(1)
    ),
    'frozen parameter': lambda: Layer(write, parameters={'weight': (doubles(4), False)}),
    'trainable parameter': lambda: Layer(write, parameters={'weight': (doubles(4), True)}),
    'trainable behind the version': lambda: Layer(
        write_behind, parameters={'weight': (doubles(4), True)}
    ),
    'view': lambda: (lambda whole: Layer(share, {'whole': whole, 'part': whole[1:3]}))(doubles(4)),
    'view as an attribute': lambda: (
        lambda whole: Layer(share, {'whole': whole}, part=whole[1:3])
    )(doubles(4)),
    'fake quantization': lambda: Layer(
        observe,
        {
            'on': torch.ones(1, dtype=torch.long),
            'low': torch.tensor(float('inf')),
            'high': torch.tensor(float('-inf')),
            'scale': torch.ones(1),
            'zero': torch.zeros(1, dtype=torch.int),
        },
    ),
    'sparse': lambda: Layer(
        lambda layer, x: (setattr(layer, 'eye', layer.eye * 0.9), (layer.eye @ x.T).T)[1],
        {'eye': torch.eye(4).double().to_sparse()},
    ),
    'dropout': lambda: nn.Dropout(0.4),
}


def skip_unless_movable(name, devices):
    """Skip a test of an odd layer that the simulated accelerator cannot have."""
    if accelerator.is_loaded() and devices.are_accelerators:
        if name == 'sparse':
            pytest.skip('the simulated accelerator has no sparse tensors')


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
