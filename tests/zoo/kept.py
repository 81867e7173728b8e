"""Layers with a part that is kept out of recomputation, and uses of its inputs and outputs."""

import dataclasses
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.computing import CPU_ONLY, NO_HOOKS, SEVERAL_SAMPLES
from tests.zoo.entry import Entry
from tests.zoo.nested import FROZEN
from torchgpipe import no_recompute


class Block(nn.Module):
    """A residual block around a part, whose inputs and outputs depend on the case."""

    def __init__(self, inner, use):
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.inner = no_recompute(Inner(inner))
        self.use = use

    def forward(self, x):
        y = self.before(x).tanh()
        return self.after(self.use(self.inner, y)).tanh() + x


class Inner(nn.Module):
    """The part."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class Named(NamedTuple):
    """A result with names."""

    y: torch.Tensor
    n: int
    none: None


@dataclasses.dataclass
class Data:
    """A result with attributes."""

    y: torch.Tensor
    more: dict


def use(function=lambda y: y):
    """Call a part with a tensor, and a function with the part's output."""
    return lambda inner, y: function(inner(y))


def no_grad(inner, y):
    """Call the part without a graph."""
    with torch.no_grad():
        return inner(y)


def own_gradient(layer, y):
    """Ask for a gradient within the part."""
    with torch.enable_grad():
        z = layer.linear(y)
        start = y if y.requires_grad else z
    if not z.requires_grad:
        return z
    return z * torch.autograd.grad(z.square().sum(), start, create_graph=True)[0]


def offloaded(inner, y):
    """Call the part under hooks of the user."""
    with torch.autograd.graph.save_on_cpu():
        return inner(y)


def in_checkpoint(use_reentrant):
    """Call the part within a checkpoint of PyTorch."""
    return lambda inner, y: checkpoint(
        lambda y: inner(y).tanh() * 2, y, use_reentrant=use_reentrant
    )


def scale_input(inner, y):
    """Change the part's input after its call."""
    x = y * 1
    z = inner(x)
    return x.mul_(0.5).add_(z)


#: The computation of a part, and the use of its output.
PARTS = {
    'tensor': (lambda self, y: self.norm(self.linear(y)), use()),
    'in place within': (lambda self, y: self.linear(y).relu_(), use()),
    'in place afterwards': (lambda self, y: self.linear(y), use(lambda y: y.relu_())),
    'in place twice': (lambda self, y: self.linear(y), use(lambda y: y.mul_(2).sigmoid_() * y)),
    'a view, in place afterwards': (
        lambda self, y: self.linear(y).T,
        use(lambda y: y.add_(1).relu_().T),
    ),
    'in place behind the version': (
        lambda self, y: self.linear(y),
        use(lambda y: (y.data.add_(1), y)[1]),
    ),
    'tuple': (
        lambda self, y: (self.linear(y), y.detach().argmax(1)),
        use(lambda ys: ys[0] * ys[1][:, None]),
    ),
    'one in place': (
        lambda self, y: (self.linear(y), y * 2),
        use(lambda ys: ys[0].tanh_() * ys[1]),
    ),
    'chunks of one memory': (
        lambda self, y: self.linear(y).chunk(2, 1),
        use(lambda ys: torch.cat([ys[1].tanh(), ys[0]], 1)),
    ),
    'the same twice': (lambda self, y: [self.linear(y)] * 2, use(lambda ys: ys[0] * ys[1])),
    'dict': (
        lambda self, y: {'a': self.linear(y), 'b': [None, y.detach()], 'n': 3},
        use(lambda ys: ys['a'] * ys['n'] + ys['b'][1]),
    ),
    'named': (lambda self, y: Named(self.linear(y), 2, None), use(lambda ys: ys.y * ys.n)),
    'dataclass': (
        lambda self, y: Data(self.linear(y), {'k': y * 2}),
        use(lambda ys: ys.y * ys.more['k']),
    ),
    'its input': (lambda self, y: y, use()),
    'a view of its input': (lambda self, y: y[:, :2], use(lambda y: torch.cat([y, y], 1))),
    'nothing': (lambda self, y: None, lambda inner, y: y if inner(y) is None else None),
    'integers': (lambda self, y: y.detach().argmax(1), lambda inner, y: y * inner(y)[:, None]),
    'needs no gradient': (lambda self, y: self.linear(y.detach()).detach(), use()),
    'keywords': (
        lambda self, y, *, scale, more: self.linear(y) * scale['s'] + more[0],
        lambda inner, y: inner(y, scale={'s': 2}, more=(y,)),
    ),
    'dataclass as input': (lambda self, y: self.linear(y.y), lambda inner, y: inner(Data(y, {}))),
    'called twice': (lambda self, y: self.linear(y), lambda inner, y: inner(inner(y).tanh())),
    'without grad': (lambda self, y: self.linear(y), lambda inner, y: y * no_grad(inner, y)),
    'asks for gradients': (own_gradient, use()),
    'transforms': (
        lambda self, y: self.linear(y) * torch.func.grad(lambda y: y.square().sum())(y.detach()),
        use(),
    ),
    'checkpoint around': (lambda self, y: self.linear(y).tanh(), in_checkpoint(False)),
    'reentrant checkpoint around': (lambda self, y: self.linear(y).tanh(), in_checkpoint(True)),
    'checkpoint within': (
        lambda self, y: checkpoint(lambda y: self.linear(y).tanh(), y, use_reentrant=False),
        use(),
    ),
    'hooks around': (lambda self, y: self.linear(y).tanh(), offloaded),
    'input changes later': (lambda self, y: y + 1, scale_input),
}


def kept(name):
    """Return a block around a part by its name."""
    return Block(*PARTS[name])


def model_of(name):
    """Return a model of two such blocks and a linear layer."""
    return nn.Sequential(kept(name), kept(name), nn.Linear(4, 4)).double()


LACKS = {
    'transforms': CPU_ONLY | NO_HOOKS,
    'tensor': SEVERAL_SAMPLES,
    'reentrant checkpoint around': FROZEN,
}

KEPT = {
    f'kept: {name}': Entry(lambda name=name: kept(name), lacks=LACKS.get(name, frozenset()))
    for name in PARTS
}
