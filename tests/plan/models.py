"""Models to profile, with a sample for each."""

import torch
from torch import nn

from tests.helpers import Call
from tests.skip.layers import Pop, Stash
from torchgpipe.skip import Namespace, pop, skippable


class Embed(nn.Module):
    """Tokens to vectors, with positions."""

    def __init__(self, width):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, width), nn.Embedding(16, width)

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )


class Two(nn.Module):
    """Tensor to tuple, of which one part needs no gradient."""

    def forward(self, x):
        return x, x.detach().argmax(1)


class One(nn.Module):
    """Tuple to tensor, with a parameter that gets no gradient."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.rand(3))

    def forward(self, input):
        return input[0] * input[1][:, None]


def resnet():
    """Flat, with in-place layers after the stashed tensors."""

    def block():
        namespace = Namespace()
        return [
            Stash().isolate(namespace),
            nn.Conv2d(4, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            Pop().isolate(namespace),
            nn.ReLU(inplace=True),
        ]

    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        *block(),
        *block(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 2),
    ), torch.rand(8, 3, 8, 8)


def unet():
    """Skips that nest, are concatenated, and cross most of the model."""

    @skippable(pop=['skip'])
    class Concatenate(nn.Module):
        def forward(self, x):
            return torch.cat([x, (yield pop('skip'))], 1)

    one, two = Namespace(), Namespace()
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.LeakyReLU(inplace=True),
        Stash().isolate(one),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1),
        nn.Dropout2d(0.1),
        nn.InstanceNorm2d(8),
        Stash().isolate(two),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Upsample(scale_factor=2),
        Concatenate().isolate(two),
        nn.Conv2d(16, 4, 3, padding=1),
        nn.Upsample(scale_factor=2),
        Concatenate().isolate(one),
        nn.Conv2d(8, 1, 1),
    ), torch.rand(4, 3, 8, 8)


def transformer():
    """Integers in."""
    layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(2)]
    return nn.Sequential(Embed(8), *layers, nn.LayerNorm(8), nn.Linear(8, 11)), torch.randint(
        11, (6, 5)
    )


def frozen():
    """The first half does not train."""
    model = nn.Sequential(
        nn.Linear(4, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 8),
        nn.Sigmoid(),
        nn.Linear(8, 2),
    )
    model[:3].requires_grad_(False)
    return model, torch.rand(8, 4)


def inplace():
    """Layers that change their input, even the first one."""
    return nn.Sequential(
        nn.Linear(4, 4),
        Call(lambda x: x.mul_(2)),
        nn.ReLU(inplace=True),
        nn.Linear(4, 4),
        nn.Hardtanh(inplace=True),
        nn.Linear(4, 2),
    ), torch.rand(8, 4)


def tuples():
    """Tuples between layers, and parameters without gradients."""
    return nn.Sequential(nn.Linear(4, 4), Two(), One(), nn.Linear(4, 2)), torch.rand(8, 4)


MODELS = [resnet, unet, transformer, frozen, inplace, tuples]
