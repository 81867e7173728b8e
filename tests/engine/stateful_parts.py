"""Parts of layers that nest backwards, keep state, register hooks, or write in place.

Each maps a tensor of shape ``(batch, 4)`` to another one. Any of them may follow one another.
"""

import math
from collections import deque
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.engine.test_gradients_nested import Clipped, Equilibrium, Inner, Probed, Renormed

PARTS = {}


def part(function):
    """Add a part: a module, or a function of the layer and a tensor, whose state is ``layer``."""
    PARTS[function.__name__] = (
        function if isinstance(function, type) else (lambda: OfFunction(function))
    )
    return function


class OfFunction(nn.Module):
    """A part that is a function; its state is in attributes of this module."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)
        self.register_buffer('memory', torch.zeros(4))
        self.calls = 0

    def forward(self, x):
        """Call it."""
        self.calls += 1
        return self.function(self, x)


# Nested backwards.


part(Equilibrium)


@part
class Adjoint(Inner):
    """An adjoint of a small network."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), 0.3)


@part
class OwnCheckpoint(Inner):
    """Its own kind of checkpoint."""

    def __init__(self):
        super().__init__(nn.Linear(4, 4), 1)


@part
class Probing(Probed):
    """A backward within backward whose result is not used."""

    def __init__(self):
        super().__init__(4, 4)


@part
def reentrant_checkpoint(layer, x):
    """PyTorch's checkpoint, in its older form."""
    return checkpoint(layer.linear, x, use_reentrant=True)


@part
def other_checkpoint(layer, x):
    """PyTorch's checkpoint."""
    return checkpoint(layer.linear, x, use_reentrant=False)


@part
def gradient_within_forward(layer, x):
    """A layer that uses the gradient of an energy."""
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        energy = layer.linear(z).tanh().sum()
        (grad,) = torch.autograd.grad(energy, z, create_graph=True)
    return x - 0.1 * grad


# Buffers.


@part
def moving_average(layer, x):
    """A buffer that moves in place, and is read."""
    with torch.no_grad():
        layer.memory.lerp_(x.mean(0), 0.5)
    return x + layer.memory * layer.linear(x)


@part
def buffer_of_a_linear_layer(layer, x):
    """A buffer that moves in place, as the input of a layer."""
    with torch.no_grad():
        layer.memory.lerp_(x.mean(0), 0.5)
    return x * layer.linear(layer.memory)


@part
def rebound_buffer(layer, x):
    """A new buffer in each call."""
    layer.memory = layer.memory * 0.5 + x.detach().mean(0)
    return layer.linear(x * layer.memory.tanh())


@part
def written_rows(layer, x):
    """A codebook: rows of a buffer are written by an index."""
    if not hasattr(layer, 'codes'):
        layer.register_buffer('codes', torch.zeros(3, 4, dtype=x.dtype, device=x.device))
    with torch.no_grad():
        layer.codes[layer.calls % 3] = x[0]
        near = torch.cdist(x, layer.codes).argmin(1)
    return layer.linear(x) + layer.codes[near]


@part
class BatchNorm(nn.BatchNorm1d):
    """A batch normalization, whose kernel writes to its buffers."""

    def __init__(self):
        super().__init__(4)


@part
class SpectralNorm(nn.Module):
    """A parametrization that moves a buffer in forward."""

    def __init__(self):
        super().__init__()
        self.linear = parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, x):
        """Use it twice."""
        return self.linear(x) + self.linear(x * 2)


# Attributes.


@part
def every_other_call(layer, x):
    """Another path in every other call."""
    return layer.linear(x) if layer.calls % 2 else x * 1.5


@part
def pair(layer, x):
    """A tuple of tensors, as the state of a recurrent layer."""
    h, c = getattr(layer, 'state', (x.detach().mean(0) * 0, 1))
    y = layer.linear(x) + h
    layer.state = y.detach().mean(0), c + 1
    return y * (1 + 1 / c)


@part
def number_of_gradient(layer, x):
    """A number that only the gradient depends on."""
    layer.factor = getattr(layer, 'factor', 1.0) * 1.25
    return x + (layer.linear(x) - layer.linear(x).detach()) * layer.factor


@part
def kept_tensor(layer, x):
    """A tensor as an attribute, kept from the first call."""
    if not hasattr(layer, 'first'):
        layer.first = x.detach()[:1].clone()
    return layer.linear(x * layer.first)


@part
def namespace(layer, x):
    """An attribute of an object."""
    if not hasattr(layer, 'config'):
        layer.config = SimpleNamespace(scale=1.0)
    layer.config = SimpleNamespace(scale=layer.config.scale + 0.5)
    return layer.linear(x) * layer.config.scale


@part
def attribute_of_a_child(layer, x):
    """An attribute of another module."""
    layer.linear.scale = getattr(layer.linear, 'scale', 0) + 1
    return layer.linear(x) / layer.linear.scale


@part
def attribute_of_a_tensor(layer, x):
    """An attribute of the tensor that is passed on."""
    y = layer.linear(x) * getattr(x, 'scale', 1.0)
    y.scale = 1 + layer.calls / 4
    return y


# Containers.


@part
def nested_tensors_in_place(layer, x):
    """Tensors in nested containers that are changed in place."""
    if not hasattr(layer, 'tracker'):
        layer.tracker = {'load': {'values': x.detach().mean(0) * 0}, 'list': [x.detach()[0] * 0]}
    layer.tracker['load']['values'] += x.detach().mean(0)
    layer.tracker['list'][0] += 1
    return layer.linear(x) * layer.tracker['load']['values'].tanh() + layer.tracker['list'][0]


@part
def gradient_of_a_container(layer, x):
    """A container that only the gradient depends on."""
    layer.sums = getattr(layer, 'sums', None) or {'n': [0]}
    layer.sums['n'][0] += 1
    return x + (layer.linear(x) - layer.linear(x).detach()) / layer.sums['n'][0]


@part
def queue(layer, x):
    """A queue of the last means."""
    layer.last = getattr(layer, 'last', None) or deque(maxlen=2)
    layer.last.append(x.detach().mean(0))
    return layer.linear(x) + sum(layer.last)


@part
def growing_list(layer, x):
    """A list that grows."""
    layer.seen = getattr(layer, 'seen', [])
    layer.seen.append(float(x.detach().mean()))
    return layer.linear(x) * (1 + math.tanh(sum(layer.seen)))


@part
def cache(layer, x):
    """A table that is made once for each size."""
    layer.tables = getattr(layer, 'tables', {})
    if len(x) not in layer.tables:
        layer.tables[len(x)] = torch.linspace(0, 1, len(x), dtype=x.dtype, device=x.device)
    return layer.linear(x) + layer.tables[len(x)][:, None]


# Hooks.


@part
def hook_of_an_output(layer, x):
    """A hook that scales a gradient."""
    y = layer.linear(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 1.5)
    return y


@part
def hook_of_a_weight(layer, x):
    """A hook that is registered once, and scales the gradient of a weight."""
    if layer.calls == 1:
        layer.linear.weight.register_hook(lambda grad: grad * 0.5)
    return layer.linear(x)


@part
class ForwardHook(nn.Module):
    """A hook that changes the output of a layer, and counts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.count = 0
        self.linear.register_forward_hook(Hook(self))

    def forward(self, x):
        """Run the layer."""
        return self.linear(x)


class Hook:
    """A forward hook, which can be copied with its module."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, module, args, output):
        self.layer.count += 1
        return output * self.layer.count


@part
class BackwardHook(nn.Module):
    """A hook that changes the gradient of an input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.register_full_backward_hook(double_input)

    def forward(self, x):
        """Run the layer."""
        return self.linear(x)


def double_input(module, grad_input, grad_output):
    """Double the gradient of the input."""
    return tuple(None if grad is None else grad * 2 for grad in grad_input)


# Writes in place.


@part
class ClippedWeight(Clipped):
    """A layer that clips its weight in forward."""

    def __init__(self):
        super().__init__(4, 4)


part(Renormed)


@part
def output_in_place(layer, x):
    """Change an output in place."""
    y = layer.linear(x)
    y[:, :2].mul_(0.5)
    return y.tanh_()


@part
def weight_through_data(layer, x):
    """Scale a weight through ``data``, which PyTorch does not count."""
    layer.linear.weight.data = layer.linear.weight.data * 0.9
    return layer.linear(x)


@part
def normalized_weight(layer, x):
    """Write a normalized weight."""
    with torch.no_grad():
        layer.linear.weight.copy_(F.normalize(layer.linear.weight, dim=1))
    return layer.linear(x)


@part
def weight_and_bias_of_other_shapes(layer, x):
    """A linear map with a bias of one row and a weight of one dimension."""
    y = F.linear(x, layer.linear.weight, layer.linear.bias[None])
    return y + F.linear(x, layer.linear.weight[0])[:, None]


# Random numbers.


@part
def own_generator(layer, x):
    """Draw from a generator of its own."""
    if not hasattr(layer, 'generator'):
        layer.generator = torch.Generator(x.device).manual_seed(3)
    mask = torch.rand(x.shape, generator=layer.generator, dtype=x.dtype, device=x.device)
    return layer.linear(x) * mask


class RandomLayer(nn.Module):
    """A layer of some parts, one after the other, each beside its input."""

    def __init__(self, names):
        super().__init__()
        self.parts = nn.ModuleList([PARTS[name]() for name in names])

    def forward(self, x):
        """Add the parts' outputs, so that all of them matter."""
        for each in self.parts:
            x = x + each(x).tanh()
        return x
