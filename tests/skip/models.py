"""Models with skips that several test files share."""

import torch
from torch import nn

from torchgpipe.skip import Namespace, pop, skippable, stash

WIDTH = 3

#: Functions of its input x that a layer may stash.
KINDS = {
    'input': lambda layer, x: x,
    'linear': lambda layer, x: layer.skip(x),
    'view': lambda layer, x: x[:, :1],
    'constant': lambda layer, x: x.detach() * 2,
    'none': lambda layer, x: None,
    'integers': lambda layer, x: x.detach().argmax(1)[:, None],
}


class Mixer(nn.Module):
    """Pop some skips and add them, compute, stash some."""

    def __init__(self, stashes, pops, kinds, compute, width=WIDTH):
        super().__init__()
        self.stashes, self.pops, self.kinds, self.compute = stashes, pops, kinds, compute
        self.skip = nn.Linear(width, width)
        self.main = nn.Linear(width, width)
        if compute == 'frozen':
            self.requires_grad_(False)

    def forward(self, x):
        for name in self.pops:
            popped = yield pop(name)
            if popped is not None:
                x = x + popped
        for name in self.stashes:
            yield stash(name, KINDS[self.kinds[name]](self, x))
        if self.compute == 'inplace':
            return self.main(x).tanh_()
        if self.compute == 'detach':
            return self.main(x.detach())
        return x if self.compute == 'nothing' else self.main(x).tanh()


def build(skips, kinds, computes):
    """Make the model of a drawing."""
    namespaces = [Namespace(), None]
    layers = []
    for index, compute in enumerate(computes):
        stashes = [f's{k}' for k, (a, _) in enumerate(skips) if a == index]
        pops = [f's{k}' for k, (_, b) in enumerate(skips) if b == index]
        layer = skippable(stashes, pops)(Mixer)(stashes, pops, kinds, compute)
        for k in range(len(skips)):
            layer.isolate(namespaces[k % 2], only=[f's{k}'])
        layers.append(layer)
    return nn.Sequential(*layers).double()


def crossing():
    """Return a model of six layers with skips that cross, nest and share a layer."""
    torch.manual_seed(1)
    return build(
        [(0, 3), (1, 5), (0, 4), (2, 5), (1, 2)],
        {
            f's{k}': kind
            for k, kind in enumerate(['linear', 'input', 'view', 'linear', 'constant'])
        },
        ['tanh'] * 6,
    )
