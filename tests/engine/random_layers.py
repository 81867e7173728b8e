"""Layers between two nestings, each of which may be another one."""

import torch
from torch import nn

from tests.engine.nestings import Several
from torchgpipe import Arguments
from torchgpipe.skip import pop, skippable, stash

#: The sizes of a leaf are (batch, LENGTH, WIDTH), or some of these.
LENGTH, WIDTH = 3, 4


class Layer(nn.Module):
    """A layer between two nestings. :meth:`change` has its computation."""

    def __init__(self, before):
        super().__init__()
        self.before, self.after = before, None
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *args, **kwargs):
        value = Arguments(*args, **kwargs) if isinstance(self.before, Several) else args[0]
        leaves = self.before.unpack(value)
        return self.after.pack(self.change(leaves))

    def change(self, leaves):
        return {**leaves, 'x': self.linear(leaves['x']).tanh()}

    def names(self, names):
        """Return the names of the leaves that it gives, from those that it gets."""
        return names


class InPlace(Layer):
    """Change its own output in place."""

    def change(self, leaves):
        x = self.linear(leaves['x'])
        x[:, :1].mul_(2)
        return {**leaves, 'x': x.tanh_()}


class Normal(Layer):
    """Normalise within samples, in two ways."""

    def change(self, leaves):
        x = nn.functional.layer_norm(leaves['x'], [WIDTH]) + leaves['x'].mean(1, keepdim=True)
        return {**leaves, 'x': self.linear(x)}


class Use(Layer):
    """Use one of the other leaves, whatever it is."""

    def __init__(self, before, name):
        super().__init__(before)
        self.name = name

    def change(self, leaves):
        x, other = self.linear(leaves['x']), leaves[self.name]
        if self.name == 'mask':
            x = x.masked_fill(other[:, :, None], 0.5)
        elif self.name == 'turned':
            x = x * other.transpose(0, 1)
        elif self.name in ('labels', 'places'):
            rows = self.linear.weight[other]
            x = x + (rows[:, None] if self.name == 'labels' else rows)
        elif self.name == 'extra':
            x = x * other[:, None]
        elif isinstance(other, (torch.Tensor, float, int)):  # a table, a scalar, a number
            x = x * other
        return {**leaves, 'x': x}


class Forget(Use):
    """Leave one of the other leaves out."""

    def change(self, leaves):
        return {name: leaf for name, leaf in super().change(leaves).items() if name != self.name}

    def names(self, names):
        """Leave it out."""
        return [name for name in names if name != self.name]


class Sum(Layer):
    """Return a scalar of the micro-batch: a mean or a sum over samples."""

    def __init__(self, before, name):
        super().__init__(before)
        self.name = name

    def change(self, leaves):
        x = leaves['x'].square().mean((1, 2))
        return {**leaves, self.name: x.mean() if self.name == 'mean' else x.sum()}

    def names(self, names):
        """Add it."""
        return [*names, self.name]


class Branch(Layer):
    """Return another leaf: of its own, or one that lies in the same memory as another one."""

    def __init__(self, before, name):
        super().__init__(before)
        self.name = name

    def change(self, leaves):
        x = leaves['x']
        other = {
            'extra': x.mean(1),
            'turned': x.transpose(0, 1),
            'again': x,
            'part': x[:, 1:],
            'constant': x.detach(),
        }[self.name]
        return {**leaves, 'x': self.linear(x), self.name: other}

    def names(self, names):
        """Add it."""
        return [*names, self.name]


class Drop(Layer):
    """Draw random numbers; the unwrapped layer is given those that were drawn."""

    def __init__(self, before):
        super().__init__(before)
        self.masks, self.given = [], None

    def change(self, leaves):
        x = leaves['x']
        mask = self.given
        if mask is None:
            mask = nn.functional.dropout(torch.ones_like(x))
            self.masks.append(mask)
        return {**leaves, 'x': self.linear(x) * mask}


@skippable(stash=['leaf'])
class Stash(Layer):
    """Stash a leaf, and leave it out or not."""

    def __init__(self, before, name, keep):
        super().__init__(before)
        self.name, self.keep = name, keep

    def forward(self, *args, **kwargs):
        value = Arguments(*args, **kwargs) if isinstance(self.before, Several) else args[0]
        leaves = self.before.unpack(value)
        leaf = leaves[self.name]
        yield stash('leaf', leaf if isinstance(leaf, torch.Tensor) else None)
        leaves = self.change(leaves)
        return self.after.pack({name: leaves[name] for name in self.names([*leaves])})

    def names(self, names):
        """Leave it out."""
        return [name for name in names if self.keep or name != self.name]


@skippable(pop=['leaf'])
class Pop(Layer):
    """Pop a leaf, and give it under another name."""

    def __init__(self, before, name):
        super().__init__(before)
        self.name = name

    def forward(self, value):
        leaf = yield pop('leaf')
        leaves = self.change(self.before.unpack(value))
        return self.after.pack({**leaves, self.name + "'": leaf})

    def names(self, names):
        """Add it."""
        return [*names, self.name + "'"]
