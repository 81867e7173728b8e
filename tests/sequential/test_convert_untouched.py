"""Conversions leave a model untouched whose forward writes to its own weights."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from torchgpipe import GPipe
from torchgpipe.sequential import ConversionError, from_stages, to_sequential


class Normalized(nn.Linear):
    """A layer that normalizes its weight in forward."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.copy_(F.normalize(self.weight, dim=1))
        return super().forward(x)


class Decaying(nn.Linear):
    """A layer whose weight decays with each forward."""

    def forward(self, x):
        self.weight.data.mul_(0.5)
        return super().forward(x)


class Codebook(nn.Module):
    """A frozen codebook that follows its input."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.randn(8, 4), requires_grad=False)

    def forward(self, x):
        index = torch.cdist(x, self.codes).argmin(1)
        codes = self.codes[index]
        with torch.no_grad():
            self.codes[index] = 0.9 * codes + 0.1 * x
        return x + (codes - x).detach()


class Net(nn.Module):
    """A model with such a layer."""

    def __init__(self, layer):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layer = layer
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.layer(self.first(x)).tanh())


LAYERS = {
    'normalized': lambda: Normalized(4, 4),
    'decaying': lambda: Decaying(4, 4),
    'codebook': Codebook,
}


def convert(net, x, how, check_sample):
    """Convert a model."""
    if how == 'stages':
        return from_stages(
            net,
            [net.first, net.layer, lambda net, x: net.last(x.tanh())],
            x,
            check_sample=check_sample,
        )
    return to_sequential(net, x, leaves=['layer'], check_sample=check_sample)


def test_weights_are_untouched():
    """In v0.21, they were overwritten, and a codebook was refused even as a leaf."""
    for check_sample in [True, False]:
        for how in ['leaf', 'stages']:
            for name in LAYERS:
                torch.manual_seed(0)
                net, x = Net(LAYERS[name]()).double(), torch.randn(6, 4, dtype=torch.double)
                reference = copy.deepcopy(net)
                layers = convert(net, x, how, check_sample)
                for key, value in reference.state_dict().items():
                    assert torch.equal(net.state_dict()[key], value), (check_sample, how, name)
                gpipe = GPipe(layers, [2, 1], devices=['cpu', 'cpu'], chunks=1)
                assert torch.equal(gpipe(x), reference(x)), (check_sample, how, name)


def test_weights_are_untouched_by_a_refused_conversion():
    for name in LAYERS:
        net, x = Net(LAYERS[name]()).double(), torch.randn(6, 4, dtype=torch.double)
        before = copy.deepcopy(net.state_dict())
        try:
            to_sequential(net, x)
        except ConversionError:
            pass
        assert all(torch.equal(net.state_dict()[key], value) for key, value in before.items())
