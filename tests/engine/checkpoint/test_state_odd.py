"""Layers with odd state, put together at random: the numbers of the unwrapped micro-batches.

Every case has a seed, which names it when it fails: ``run_case(seed, devices)`` runs it by itself.
"""

import copy
import random
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm

from tests.devices import DEVICES
from tests.helpers import assert_same, call, compare_all_pending, gradients
from tests.marks import MODES
from torchgpipe import GPipe

#: Allowed errors, by kind of layer. Nothing else is an error, and nothing is wrong.
REFUSED = {
    'InPlace': 'changed the input of the partition in place|in-place operation|'
    'modified inplace|modified by an inplace operation'
}


class Odd(nn.Module):
    """A layer with a weight, for inputs of shape (N, 3, 4)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4) + 0.5)


class HandNorm(Odd):
    """A batch norm whose statistics move without a new version."""

    def __init__(self):
        super().__init__()
        self.register_buffer('mean', torch.zeros(3))
        self.register_buffer('var', torch.ones(3))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, training=True) * self.weight


class MovesFirst(HandNorm):
    """One that uses the statistics that it has moved."""

    def forward(self, x):
        super().forward(x)
        # A copy, because PyTorch itself does not detect that a saved buffer changes.
        return F.batch_norm(x, self.mean.clone(), self.var.clone()) * self.weight


class Counts(Odd):
    """A number among the attributes."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.weight * (1 + self.calls / 8)


class CountsInPlace(Odd):
    """A buffer that is changed in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer('calls', torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.weight / self.calls.clone()


class CountsAnew(CountsInPlace):
    """A buffer that is another tensor each time, and one of plain attributes."""

    def __init__(self):
        super().__init__()
        self.tensor = torch.ones(())

    def forward(self, x):
        self.calls, self.tensor = self.calls + 1, self.tensor.to(x.device) * 0.9
        return x * self.weight / self.calls * self.tensor


class Late(Odd):
    """A buffer that is registered in the first forward."""

    def forward(self, x):
        mean = x.detach().mean((0, 2))
        if not hasattr(self, 'seen'):
            self.register_buffer('seen', mean)
        else:
            self.seen.data.lerp_(mean, 0.1)
        return x * self.weight + self.seen[:, None]


class Frozen(Odd):
    """A frozen parameter that forward changes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        self.scale.data.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return x * self.weight * self.scale.clone()


class Shared(Odd):
    """Two layers that share a buffer."""

    def __init__(self):
        super().__init__()
        self.a, self.b = CountsInPlace(), CountsInPlace()
        self.b.calls = self.a.calls

    def forward(self, x):
        return self.b(self.a(x)) * self.weight


class Viewed(Odd):
    """A buffer that is a view of another one."""

    def __init__(self):
        super().__init__()
        self.register_buffer('all', torch.ones(8))
        self.register_buffer('some', self.all[2:6])

    def forward(self, x):
        self.some.add_(0.1)
        self.all.mul_(0.9)
        return x * self.weight * self.some.clone() + self.all.sum()


class Skips(Odd):
    """A block that some micro-batches skip."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=None)

    def forward(self, x):
        self.calls += 1
        return x + 1 if self.calls % 3 == 0 else self.norm(x) * self.weight


class OwnGenerator(Odd):
    """Random numbers of a generator of its own."""

    def forward(self, x):
        if not hasattr(self, 'generator'):
            self.generator = torch.Generator().manual_seed(1)
        return x * self.weight * torch.rand(x.shape, generator=self.generator).to(x.device)


class Drops(Odd):
    """Random numbers of the process's generator; the unwrapped layer is given the masks."""

    def __init__(self):
        super().__init__()
        self.masks, self.given = [], None

    def forward(self, x):
        if self.given is None:
            mask = F.dropout(torch.ones_like(x))
            self.masks.append(mask)
        else:
            mask = self.given.pop(0).to(x.device)
        return x * self.weight * mask


class History(Odd):
    """A list that grows."""

    def __init__(self):
        super().__init__()
        self.means = []

    def forward(self, x):
        self.means.append(x.mean().item())
        return x * self.weight / len(self.means)


class Caches(Odd):
    """A dictionary whose values change."""

    def __init__(self):
        super().__init__()
        self.cache = {}

    def forward(self, x):
        before = self.cache.get('mean', 0.0)
        self.cache['mean'] = x.detach().mean()
        return x * self.weight + before


class InPlace(Odd):
    """A layer that works in place."""

    def forward(self, x):
        return F.relu(x, inplace=True) * self.weight


class Spectral(Odd):
    """A parametrization that moves buffers."""

    def __init__(self):
        super().__init__()
        self.linear = spectral_norm(nn.Linear(4, 4))

    def forward(self, x):
        return self.linear(x) * self.weight


KINDS = [
    HandNorm,
    MovesFirst,
    Counts,
    CountsInPlace,
    CountsAnew,
    Late,
    Frozen,
    Shared,
    Viewed,
    Skips,
    OwnGenerator,
    Drops,
    History,
    Caches,
    InPlace,
    Spectral,
    lambda: nn.Linear(4, 4),
    lambda: nn.BatchNorm1d(3),
    lambda: nn.Sequential(nn.Tanh(), nn.Linear(4, 4)),
]


def state_of(net):
    """Return all tensors of a model, and the numbers among its attributes."""
    return [
        *gradients(net),
        *net.state_dict().values(),
        *(
            torch.tensor(module.calls)
            for module in net.modules()
            if isinstance(getattr(module, 'calls', None), int)
        ),
    ]


class Case:
    """A model, the options of its pipeline, and its steps."""

    def __init__(self, seed, devices):
        choose = random.Random(seed)
        torch.manual_seed(seed)
        self.plain = nn.Sequential(
            *(choose.choice(KINDS)() for _ in range(choose.randint(2, 6)))
        ).double()
        layers = len(self.plain)
        cuts = sorted(choose.sample(range(1, layers), choose.randint(0, min(3, layers - 1))))
        balance = [b - a for a, b in zip([0, *cuts], [*cuts, layers])]
        self.chunks = choose.randint(1, 5)
        self.mode = choose.choice(MODES)
        self.two_forwards = choose.random() < 0.3
        self.input_grad = choose.random() < 0.3
        self.sizes = [choose.randint(1, 7) for _ in range(3)]
        self.gpipe = GPipe(
            copy.deepcopy(self.plain),
            balance,
            devices=devices(len(balance)),
            chunks=self.chunks,
            checkpoint=self.mode,
        )
        # A module that was moved has no buffers any more that share a memory.
        self.plain.to(devices.first).cpu()
        self.optimizers = [
            torch.optim.SGD(net.parameters(), 0.01) for net in (self.plain, self.gpipe)
        ]

    def run(self):
        """Train both for some steps, and compare all after each."""
        for size in self.sizes:
            inputs = [
                torch.rand(size, 3, 4, dtype=torch.double) + 0.1
                for _ in range(1 + self.two_forwards)
            ]
            actual = self.step(self.gpipe, inputs)
            expected = self.step(self.plain, inputs)
            assert_same(actual, expected, 1e-9)
            for optimizer in self.optimizers:
                optimizer.step()

    def step(self, net, inputs):
        """Run forward and backward."""
        net.zero_grad()
        inputs = [x.clone().requires_grad_(self.input_grad) for x in inputs]
        if net is self.plain:
            self.give_masks()
            outputs = [
                torch.cat([net(chunk) for chunk in x.tensor_split(min(self.chunks, len(x)))])
                for x in inputs
            ]
        else:
            outputs = [call(net, x) for x in inputs]
            self.masks = [list(layer.masks) for layer in net if isinstance(layer, Drops)]
        loss = sum(output.sigmoid().sum() for output in outputs)
        if loss.requires_grad:
            loss.backward()
        if net is self.gpipe:
            compare_all_pending(net)
        for layer in net:
            if isinstance(layer, Drops):
                layer.masks.clear()
        return [*outputs, *(x.grad for x in inputs), *state_of(net)]

    def give_masks(self):
        """Give the unwrapped layers the masks of the wrapped ones in their first pass."""
        drops = [layer for layer in self.plain if isinstance(layer, Drops)]
        for layer, masks in zip(drops, self.masks):
            layer.given = masks

    def refused(self):
        """Return the allowed errors in this case."""
        kinds = {type(layer).__name__ for layer in self.plain}
        return [pattern for kind, pattern in REFUSED.items() if kind in kinds]


def run_case(seed, devices):
    """Run a case, and tell whether it was refused."""
    case = Case(seed, devices)
    try:
        case.run()
    except RuntimeError as error:
        if any(re.search(pattern, str(error)) for pattern in case.refused()):
            return True
        raise AssertionError(f'seed {seed}') from error
    except AssertionError as error:
        raise AssertionError(f'seed {seed}') from error
    return False


@pytest.mark.parametrize(
    'block, devices',
    [
        pytest.param(
            block,
            DEVICES[kind],
            id=f'{block}-{kind}',
            marks=[
                *[pytest.mark.slow] * (block > 1),
                *[pytest.mark.accelerator] * (kind == 'accelerators'),
            ],
        )
        for block, kind in enumerate([*DEVICES] * 7)
    ],
)
def test_odd_state(devices, block):
    """525 cases."""
    refused = [run_case(seed, devices) for seed in range(25 * block, 25 * block + 25)]
    assert sum(refused) < 15
