"""Models and mini-batches for several processes, and the training that is compared."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from torchgpipe.skip import pop, skippable, stash

DOUBLE = torch.float64


class Block(nn.Module):
    """A layer of a perceptron."""

    def __init__(self, width=6):
        super().__init__()
        self.up = nn.Linear(width, 2 * width, dtype=DOUBLE)
        self.down = nn.Linear(2 * width, width, dtype=DOUBLE)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


def perceptron(layers=8):
    """Blocks, one like the other."""
    return nn.Sequential(*(Block() for _ in range(layers)))


@skippable(stash=['a', 'none'])
class Down(Block):
    def forward(self, x):
        yield stash('a', x * 2)
        yield stash('none', None)
        return super().forward(x)


@skippable(stash=['b'])
class Middle(Block):
    def forward(self, x):
        y = super().forward(x)
        yield stash('b', y)
        return y


@skippable(pop=['b'])
class Up(Block):
    def forward(self, x):
        b = yield pop('b')
        return super().forward(x + b)


@skippable(pop=['a', 'none'])
class Out(Block):
    def forward(self, x):
        a, none = (yield pop('a')), (yield pop('none'))
        assert none is None
        return super().forward(x * a)


def unet():
    """Skips over one, two and several stages, and one that is None."""
    return nn.Sequential(Down(), Block(), Middle(), Block(), Block(), Up(), Block(), Out())


class Images(nn.Module):
    """Make a batch of rows images, and back."""

    def __init__(self, *shape):
        super().__init__()
        self.shape = shape

    def forward(self, x):
        return x.reshape(len(x), *self.shape)


def resnet():
    """Convolutions and batch normalization."""

    def conv(a, b):
        return nn.Conv2d(a, b, 3, padding=1, dtype=DOUBLE)

    return nn.Sequential(
        Images(1, 2, 3),
        conv(1, 3),
        nn.BatchNorm2d(3, dtype=DOUBLE),
        nn.ReLU(),
        conv(3, 3),
        nn.BatchNorm2d(3, dtype=DOUBLE),
        nn.Tanh(),
        nn.Sequential(conv(3, 1), Images(6)),
    )


class Fork(Block):
    def forward(self, x):
        return {'x': super().forward(x), 'none': None, 'pair': (x, 'text'), 'number': 3}


class Pass(Block):
    def forward(self, value):
        return {**value, 'x': super().forward(value['x'])}


class Join(Block):
    def forward(self, value):
        assert value['none'] is None and value['pair'][1] == 'text'
        return super().forward(value['x'] + value['pair'][0] * value['number'])


def dictionaries():
    """Values of some nesting between stages."""
    return nn.Sequential(Block(), Fork(), Pass(), Pass(), Pass(), Join(), Block(), Block())


class Head(nn.Module):
    """A linear layer with the weight of another one."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return F.linear(x, self.weight)


def tied():
    """Return layers in which the first, the last and a middle one share a weight."""
    first = nn.Linear(6, 6, bias=False, dtype=DOUBLE)
    return nn.Sequential(
        first,
        *(Block() for _ in range(3)),
        Head(first.weight),
        Block(),
        nn.Tanh(),
        Head(first.weight),
    )


def frozen():
    """Nothing to train in the first layers, and in one later."""
    model = perceptron()
    for k in (0, 1, 2, 5):
        model[k].requires_grad_(False)
    return model


MODELS = {each.__name__: each for each in (perceptron, unet, resnet, dictionaries, tied, frozen)}


class Behind(nn.Module):
    """A loss with a layer of the model."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, output, target):
        return F.mse_loss(self.layer(output), target)


def batch(step, size, width=6):
    """A mini-batch, other ones in each step."""
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, size, width, dtype=DOUBLE, generator=generator)
    return x, target


def full(x):
    """The whole of a tensor."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def train(model, share, sizes=(8, 7, 3, 8), **options):
    """Take steps, with clipping; return losses, norms, gradients and parameters.

    Args:
        model: A model with `step` and `clip_grad_norm_`.
        share: Returns this replica's part of a tensor. sizes: Sizes of mini-batches. options:
        Options of `step`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    found = []
    for step, size in enumerate(sizes):
        x, target = batch(step, size)
        optimizer.zero_grad()
        loss = model.step(share(x), share(target), F.mse_loss, **options)
        grads = {
            name: full(x.grad)
            for name, x in model.named_parameters(remove_duplicate=False)
            if x.grad is not None
        }
        found.append((loss.item(), model.clip_grad_norm_(0.5).item(), grads))
        optimizer.step()
    buffers = {name: full(x) for name, x in model.named_buffers()}
    return (
        found,
        {name: full(x) for name, x in model.named_parameters(remove_duplicate=False)},
        buffers,
    )
