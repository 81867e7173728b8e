"""Layers that keep no state: kinds of products, of values within, and of calls of a layer."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.zoo.entry import Entry

#: The simulated accelerator has no such operations.
CPU_ONLY = frozenset({'accelerators'})

#: The unwrapped layer raises with a mixture of types.
ONE_TYPE = frozenset({'autocast'})

#: FSDP does not shard parameters of several types, or without dimensions.
UNSHARDED = frozenset({'shard'})

#: PyTorch has no saved-tensor hooks within a transform, and calls them too early for noise.
NO_HOOKS = frozenset({'hooks of saved tensors'})

#: The unwrapped layer raises with one sample.
SEVERAL_SAMPLES = frozenset({'one sample'})


class Wrapped(nn.Module):
    """A layer that calls another one in some way."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer


class Checkpointed(Wrapped):
    """Run the layer again in backward."""

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


class Twice(Wrapped):
    """Use the layer twice."""

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


class OneSample(Wrapped):
    """Call the layer without a batch."""

    def forward(self, x):
        return torch.stack([self.layer(sample) for sample in x])


class Halved(Wrapped):
    """Compute in a smaller type."""

    def forward(self, x):
        with torch.autocast('cpu', torch.bfloat16):
            return self.layer(x).to(x.dtype)


class Doubled(Wrapped):
    """Double all gradients of the layer by a hook on the node."""

    def forward(self, x):
        y = self.layer(x)
        if y.grad_fn is not None:
            y.grad_fn.register_hook(double_gradients)
        return y


def double_gradients(grads, _):
    """Double each gradient of a node."""
    return tuple(None if grad is None else 2 * grad for grad in grads)


class OfSparse(Wrapped):
    """Give the layer a sparse tensor."""

    def forward(self, x):
        return self.layer(x.detach().to_sparse()) + x


class Marked(torch.Tensor):
    """A subclass of tensor."""


class OfMarked(Wrapped):
    """Give the layer a tensor of a subclass."""

    def forward(self, x):
        return self.layer(x.as_subclass(Marked)).as_subclass(torch.Tensor)


class Mapped(Wrapped):
    """Call the layer by ``vmap``."""

    def forward(self, x):
        return torch.func.vmap(self.layer)(x)


class Both(Wrapped):
    """Give a layer of two inputs the same for both."""

    def forward(self, x):
        return self.layer(x, x)


class Output(Wrapped):
    """The output of a recurrent layer, without its state."""

    def forward(self, x):
        return self.layer(x)[0]


class Complex(nn.Module):
    """A linear layer of complex numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.cdouble)

    def forward(self, x):
        return self.linear(x.to(self.linear.weight.dtype) * (1 + 2j)).abs().to(x.dtype)


class Pair(nn.Module):
    """From a tensor to a tuple, with integers and a tensor that needs no gradient."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.a(x), x.detach().argmax(1), self.b(x).tanh(), x.detach() * 2


class Unpair(nn.Module):
    """From the tuple of a Pair to a tensor."""

    def forward(self, values):
        a, index, b, constant = values
        return (a * b + constant + index[:, None]).tanh()


class Branch(nn.Module):
    """From a tensor to a dict, with integers, a number and None."""

    def forward(self, x):
        return {'a': x * 2, 'index': x.detach().argmax(1), 'b': x.tanh(), 'n': 3, 'none': None}


class Merge(nn.Module):
    """From the dict of a Branch to a tensor."""

    def forward(self, value):
        assert value['none'] is None
        return value['a'] * value['n'] + value['b'] + value['index'][:, None]


class Centred(nn.Linear):
    """Subtract a mean that is computed without a graph."""

    def forward(self, x):
        with torch.no_grad():
            mean = super().forward(x).mean()
        return super().forward(x) - mean


class Special(torch.Tensor):
    """A subclass of tensor that a layer asks for."""


class AsksForSpecial(nn.Module):
    """A layer whose second part asks for the subclass of the first part's output."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.second(self.first(x).as_subclass(Special))
        if isinstance(y, Special):
            y = y * 2
        return y.as_subclass(torch.Tensor)


class Unused(nn.Module):
    """A layer with a part whose output is not used: its parameters have no gradient."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        self.unused(x)
        return self.used(x)


class Rounded(nn.Module):
    """A softmax whose output is rounded, with the gradient of the softmax."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        soft = self.linear(x).softmax(-1)
        hard = (soft == soft.max(1, keepdim=True).values).to(x)
        return hard - soft.detach() + soft


def frozen(layer, *names):
    """Freeze parameters of a layer."""
    for name in names:
        getattr(layer, name).requires_grad_(False)
    return layer


def linear(**options):
    """Return two linear layers around a Tanh."""
    return nn.Sequential(nn.Linear(4, 6, **options), nn.Tanh(), nn.Linear(6, 4, **options))


def convolution(kind, **options):
    """Return a function that makes two convolutions around a Tanh."""
    return lambda: nn.Sequential(kind(4, 8, 3, **options), nn.Tanh(), kind(8, 4, 1))


def with_linear(make):
    """Return a function that makes a layer, followed by a linear layer."""
    return lambda: nn.Sequential(make(), nn.Linear(4, 4))


def attention():
    """Return a layer of a transformer without dropout."""
    return nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)


def norms():
    """Return a sequence of layers with few weights."""
    bilinear = Both(nn.Bilinear(4, 4, 2))
    return nn.Sequential(nn.LayerNorm(4), nn.PReLU(), nn.Linear(4, 4), bilinear, nn.Linear(2, 4))


def on_cpu(make, shape=(4,), deferred=None, lacks=frozenset()):
    """Return an entry for the CPU only."""
    return Entry(make, shape, deferred, lacks=CPU_ONLY | lacks)


COMPUTING = {
    'linear': Entry(linear, deferred=4),
    'linear of sequences': Entry(linear, (3, 4), deferred=4),
    'linear without bias': Entry(lambda: linear(bias=False), deferred=2),
    'conv1d': on_cpu(convolution(nn.Conv1d, padding=1), (4, 9), 4),
    'conv2d': on_cpu(convolution(nn.Conv2d, padding=2, dilation=2), (4, 9, 9), 4),
    'conv3d': on_cpu(convolution(nn.Conv3d, padding=1, groups=2, bias=False), (4, 9, 9, 9), 3),
    'circular': on_cpu(convolution(nn.Conv2d, padding=1, padding_mode='circular'), (4, 9, 9), 4),
    'same': on_cpu(convolution(nn.Conv2d, padding='same'), (4, 9, 9), 2),
    'convolution without a batch': on_cpu(
        lambda: OneSample(nn.Conv2d(4, 4, 3, padding=1)), (4, 5, 5), 0
    ),
    'one sample at a time': Entry(lambda: OneSample(nn.Linear(4, 4))),
    'frozen weight': Entry(lambda: frozen(nn.Linear(4, 4), 'weight'), deferred=0),
    'frozen bias': Entry(
        lambda: nn.Sequential(nn.Linear(4, 4), frozen(nn.Linear(4, 4), 'bias')), deferred=2
    ),
    'frozen layer': Entry(lambda: nn.Linear(4, 4).requires_grad_(False), deferred=0),
    'twice': Entry(lambda: Twice(nn.Linear(4, 4)), deferred=4),
    'checkpointed within': Entry(with_linear(lambda: Checkpointed(nn.Linear(4, 4))), deferred=2),
    'weight norm': on_cpu(lambda: weight_norm(nn.Linear(4, 4)), deferred=0),
    'attention': on_cpu(attention, (3, 4), 4),
    'norms': on_cpu(norms, (4,), 4, ONE_TYPE),
    'hook of the node': Entry(with_linear(lambda: Doubled(nn.Linear(4, 4))), deferred=2),
    'complex': on_cpu(with_linear(Complex), (4,), 2, ONE_TYPE | UNSHARDED),
    'sparse input': on_cpu(with_linear(lambda: OfSparse(nn.Linear(4, 4, bias=False))), deferred=2),
    'subclass of tensor': Entry(with_linear(lambda: OfMarked(nn.Linear(4, 4))), deferred=2),
    'vmap': on_cpu(with_linear(lambda: Mapped(nn.Linear(4, 4))), deferred=2),
    'autocast within': on_cpu(with_linear(lambda: Halved(nn.Linear(4, 4))), deferred=2),
    'recurrent': on_cpu(lambda: Output(nn.LSTM(4, 4, batch_first=True)), (3, 4)),
    'activation in place': Entry(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(inplace=True))
    ),
    'in place of a sequence': Entry(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), (3, 4)
    ),
    'identity': Entry(nn.Identity),
    'tuple within': Entry(lambda: nn.Sequential(Pair(4), Unpair())),
    'dict within': Entry(lambda: nn.Sequential(Branch(), nn.Identity(), Merge())),
    'without grad within': Entry(lambda: Centred(4, 4)),
    'asks for a subclass': Entry(AsksForSpecial),
    'unused part': Entry(Unused),
    'rounded': Entry(Rounded),
}
