"""Skippable layers that several test files share."""

import torch
from torch import nn

from torchgpipe.skip import pop, skippable, stash


@skippable(stash=['skip'])
class Stash(nn.Module):
    """Stash the input and pass it on, or stash and return the two results of a function."""

    def __init__(self, function=None):
        super().__init__()
        self.function = function

    def forward(self, input):
        skip, output = (input, input) if self.function is None else self.function(input)
        yield stash('skip', skip)
        return output


@skippable(pop=['skip'])
class Pop(nn.Module):
    """Add the skip tensor, if there is one; or call another function with both."""

    def __init__(self, function=torch.add):
        super().__init__()
        self.function = function

    def forward(self, input):
        skip = yield pop('skip')
        return input if skip is None else self.function(input, skip)


@skippable(stash=['skip'])
class StashLinear(nn.Module):
    """Stash a linear layer's output for the input."""

    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, input):
        yield stash('skip', self.fc(input))
        return input


def stashing(*names):
    """Return a class that stashes its input under some names."""

    @skippable(stash=names)
    class StashNames(nn.Module):
        def forward(self, input):
            for name in names:
                yield stash(name, input)
            return input

    return StashNames


def popping(*names):
    """Return a class that pops some names."""

    @skippable(pop=names)
    class PopNames(nn.Module):
        def forward(self, input):
            for name in names:
                input = input + (yield pop(name))
            return input

    return PopNames
