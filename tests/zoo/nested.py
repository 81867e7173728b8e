"""Layers that run backward themselves, in forward or in backward, and parameters of odd shapes."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.computing import CPU_ONLY, ONE_TYPE, UNSHARDED, Wrapped
from tests.zoo.entry import Entry

#: The unwrapped layer warns of an input that needs no gradient.
FROZEN = frozenset({'frozen partitions'})

#: A recomputation refuses the layer.
RECOMPUTED = frozenset({'always', 'except_last'})


class Adjoint(torch.autograd.Function):
    """Call a function; backward runs it again, and scales the gradients of an inner pass."""

    @staticmethod
    def forward(ctx, function, scale, x, *weights):
        ctx.function, ctx.scale, ctx.weights = function, scale, weights
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x) * scale

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        weights = [weight for weight in ctx.weights if weight.requires_grad]
        grads = torch.autograd.grad(y, (x, *weights), grad, allow_unused=ctx.scale != 1)
        scaled = iter([ctx.scale * grad for grad in grads])
        of_input = next(scaled)
        return (
            None,
            None,
            of_input,
            *[next(scaled) if weight.requires_grad else None for weight in ctx.weights],
        )


class Inner(nn.Module):
    """A layer whose backward contains a backward: an adjoint, or its own kind of checkpoint."""

    def __init__(self, layer, scale):
        super().__init__()
        self.layer = layer
        self.scale = scale

    def forward(self, x):
        return Adjoint.apply(self.layer, self.scale, x, *self.layer.parameters())


def adjoint():
    """Return an adjoint of a small network."""
    return Inner(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), 0.3)


class Equilibrium(nn.Module):
    """Solve z = tanh(W z + x); a hook solves the linear equation of the gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        nn.init.normal_(self.linear.weight, std=0.1)

    def iterate(self, z, x):
        """Run one step of the iteration."""
        return torch.tanh(self.linear(z) + x)

    def forward(self, x):
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(40):
                z = self.iterate(z, x)
        z = self.iterate(z, x)
        start = z.detach().requires_grad_()
        end = self.iterate(start, x)

        def solve(grad):
            solution = grad
            for _ in range(40):
                (product,) = torch.autograd.grad(end, start, solution, retain_graph=True)
                solution = product + grad
            return solution

        if z.requires_grad:
            z.register_hook(solve)
        return z


class Probed(nn.Linear):
    """A layer that runs backward through itself as soon as its output has a gradient."""

    probes = False

    def forward(self, x):
        x = x * 1
        y = super().forward(x)

        def probe(grad):
            if not self.probes and x.requires_grad:
                self.probes = True
                torch.autograd.grad(y, x, grad, retain_graph=True)
                self.probes = False

        if y.requires_grad:
            y.register_hook(probe)
        return y


class Force(nn.Module):
    """The gradient of an energy, or of a part of it that is detached."""

    def __init__(self, *layers, create_graph=True):
        super().__init__()
        self.energy, self.create_graph = nn.Sequential(*layers), create_graph

    def forward(self, x):
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.energy(y).sum()
            (force,) = torch.autograd.grad(energy, y, create_graph=self.create_graph)
        return force + x


def force(create_graph):
    """Return such a layer of linear layers."""
    return Force(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1), create_graph=create_graph)


class Learner(nn.Linear):
    """A layer that takes a step of gradient descent for its own weight in each forward."""

    def forward(self, x):
        if not self.weight.requires_grad:
            return super().forward(x)
        with torch.enable_grad():
            loss = F.linear(x, self.weight, self.bias).square().mean()
            (grad,) = torch.autograd.grad(loss, self.weight, create_graph=True)
        return F.linear(x, self.weight - 0.1 * grad, self.bias)


class GradientOfEnergy(Wrapped):
    """A layer that uses the gradient of an energy for a detached input."""

    def forward(self, x):
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            energy = self.layer(z).tanh().sum()
            (grad,) = torch.autograd.grad(energy, z, create_graph=True)
        return x - 0.1 * grad


class ReentrantCheckpoint(Wrapped):
    """PyTorch's checkpoint in its older form."""

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=True)


class Broadcast(nn.Module):
    """A linear function whose parameters have unusual shapes."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(weight))
        self.bias = None if bias is None else nn.Parameter(torch.rand(bias))

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        return y if y.dim() == x.dim() else x * y[:, None]


NESTED = {
    'adjoint': Entry(adjoint, lacks=ONE_TYPE),
    'own checkpoint': Entry(lambda: Inner(nn.Linear(4, 4), 1), lacks=ONE_TYPE),
    'equilibrium': Entry(Equilibrium),
    'probed': Entry(lambda: Probed(4, 4)),
    'force': Entry(lambda: force(True), refused=RECOMPUTED),
    'detached force': Entry(lambda: force(False), refused=RECOMPUTED),
    'force of convolutions': Entry(
        lambda: Force(nn.Conv2d(4, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 1)),
        (4, 5, 5),
        refused=RECOMPUTED,
        lacks=CPU_ONLY,
    ),
    'learner': Entry(lambda: Learner(4, 4), refused=RECOMPUTED),
    'gradient of an energy': Entry(lambda: GradientOfEnergy(nn.Linear(4, 4)), refused=RECOMPUTED),
    'reentrant checkpoint': Entry(lambda: ReentrantCheckpoint(nn.Linear(4, 4)), lacks=FROZEN),
    'bias of shape (1,)': Entry(lambda: Broadcast((4, 4), (1,))),
    'bias of shape (1, 4)': Entry(lambda: Broadcast((4, 4), (1, 4))),
    'bias of shape ()': Entry(lambda: Broadcast((4, 4), ()), lacks=UNSHARDED),
    'weight of shape (4,)': Entry(lambda: Broadcast((4,), None)),
}
