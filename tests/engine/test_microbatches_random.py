"""Values of random nesting through random layers, wrapped at random: as without a pipeline.

Each case comes from a seed, and the error names it. The following command runs case 7 alone::

    python -m tests.engine.test_microbatches_random 7

The suite runs the first cases only; ``TORCHGPIPE_RANDOM_CASES=500`` in the environment sets their
number. The same command with ``0 500`` runs as many, and lists all seeds that fail.
"""

import copy
import os
import random
import sys
import traceback

import pytest
import torch
from torch import nn

from tests.devices import places
from tests.engine.nestings import Bare, Color, Nest, Several
from tests.engine.random_layers import (
    LENGTH,
    WIDTH,
    Branch,
    Drop,
    Forget,
    InPlace,
    Layer,
    Normal,
    Pop,
    Stash,
    Sum,
    Use,
)
from tests.helpers import assert_same, gradients
from tests.marks import MODES, slow_after
from torchgpipe import Arguments, GPipe, NoChunk, no_recompute
from torchgpipe.base.context import context
from torchgpipe.skip import Namespace

#: PyTorch's own, where it compiles.
pytestmark = pytest.mark.filterwarnings('ignore:The .grad attribute of a Tensor')

#: How many cases there are in one test, and in how many of them.
BLOCK = 25
BLOCKS = -(-int(os.environ.get('TORCHGPIPE_RANDOM_CASES', 100)) // BLOCK)

#: Devices for partitions: one worker, two that are serialized, a worker each.
CPUS = [
    lambda n: ['cpu'] * n,
    lambda n: [f'cpu:{j % 2}' for j in range(n)],
    lambda n: [f'cpu:{j}' for j in range(n)],
]

#: Where leaves of the input have the batch, if that is not dimension 0.
DIMS = {'turned': 1, 'table': None, 'places': None}
#: The rules of leaves in the output, likewise. A leaf that was popped has another name.
RULES = {'turned': 1, 'mean': 'mean', 'sum': 'sum'}
RULES |= {name + "'": rule for name, rule in RULES.items()}

#: Leaves that steps may change.
FLOATS = ('x', 'turned', 'extra', 'table', 'scalar')


def leaves_of_batch(choose, size):
    """Return leaves for a mini-batch, by their names."""

    def rand(*shape):
        return torch.rand(*shape, dtype=torch.double) + 0.1

    return {
        'x': rand(size, LENGTH, WIDTH),
        'mask': rand(size, LENGTH) < 0.5,
        'turned': rand(LENGTH, size, WIDTH),
        'labels': torch.randint(WIDTH, (size,)),
        'extra': rand(size, WIDTH),
        'table': rand(LENGTH, WIDTH),
        'places': torch.randperm(LENGTH),
        'scalar': rand(()),
        'plain': choose.choice([None, 2, 0.5, 'text', True, Color.RED, torch.float]),
    }


class Model:
    """Random layers, each of which takes the output of the one before.

    Attributes:
        input: The nesting of the first layer's input. output: The nesting of the last layer's
        output. layers (list[nn.Module]): The layers.
    """

    def __init__(self, choose, names):
        self.choose = choose
        self.input = self.output = self._first(names)
        self.layers = []
        stashed = []
        number = choose.randint(1, 7)
        for _ in range(number):
            names = self._add(self._layer(names, stashed), names)
        for name, namespace in stashed:
            names = self._add(Pop(self.output, name).isolate(namespace), names)

    def _add(self, layer, names):
        names = layer.names(names)
        self.output = layer.after = self._nest(names)
        self.layers.append(layer)
        return names

    def _first(self, names):
        if len(names) > 1 and self.choose.random() < 0.4:
            return Several(self.choose, names)
        return self._nest(names)

    def _nest(self, names):
        if names == ['x'] and self.choose.random() < 0.5:
            return Bare()
        return Nest(self.choose, names)

    def _layer(self, names, stashed):
        choose, before = self.choose, self.output
        kind = choose.choice([Layer, Normal, InPlace, Drop, Use, Forget, Branch, Stash, Pop])
        if kind in (Use, Forget):
            usable = [
                name
                for name in names
                if name
                in ('mask', 'turned', 'labels', 'extra', 'table', 'places', 'scalar', 'plain')
            ]
            return kind(before, choose.choice(usable)) if usable else Layer(before)
        if kind is Branch:
            new = choose.choice(['extra', 'turned', 'again', 'part', 'constant', 'mean', 'sum'])
            if new in names:
                return Layer(before)
            return (Sum if new in ('mean', 'sum') else Branch)(before, new)
        if kind is Stash:
            taken = [name for name, _ in stashed] + [
                name.rstrip("'") for name in names if name[-1] == "'"
            ]
            name = choose.choice(names)
            if name in taken or name[-1] == "'":
                return Layer(before)
            stashed.append((name, Namespace()))
            keep = name == 'x' or choose.random() < 0.5
            return Stash(before, name, keep).isolate(stashed[-1][1])
        if kind is Pop:
            if not stashed or isinstance(before, Several):
                return Layer(before)
            name, namespace = stashed.pop(choose.randrange(len(stashed)))
            return Pop(before, name).isolate(namespace)
        return kind(before)


class Case:
    """A model, the options of its pipeline, and its steps.

    Args:
        seed: Of the random choices.
        accelerators: Whether partitions are on accelerators, and not on the CPU alone.
    """

    def __init__(self, seed, accelerators=False):
        self.choose = choose = random.Random(seed)
        torch.manual_seed(seed)
        self.names = [
            'x',
            *choose.sample(
                ['mask', 'turned', 'labels', 'extra', 'table', 'places', 'scalar', 'plain'],
                choose.randint(0, 4),
            ),
        ]
        self.grads = {name for name in FLOATS if choose.random() < 0.4}
        #: Whether values that all micro-batches share are marked, or given by a rule.
        self.marked = choose.random() < 0.5
        self.model = Model(choose, self.names)
        self.plain = nn.Sequential(*self.model.layers).double()
        self.share()
        compiled = choose.choice([None] * 12 + ['inner', 'layers', 'partitions'])
        for layer in self.plain:
            layer.requires_grad_(choose.random() < 0.8)
            # A marked module cannot be compiled.
            if choose.random() < 0.1 and compiled not in ('inner', 'layers'):
                no_recompute(layer)
        self.gpipe = self.wrap(accelerators)
        self.compile(compiled)
        self.optimizers = [
            torch.optim.SGD(net.parameters(), 0.05) for net in (self.plain, self.gpipe)
        ]

    def share(self):
        """Let layers have a parameter in common, or a module."""
        choose, layers = self.choose, [*self.plain]
        while len(layers) > 1 and choose.random() < 0.4:
            first, second = choose.sample(layers, 2)
            if choose.random() < 0.5:
                second.linear = first.linear
            else:
                second.linear.weight = first.linear.weight

    def wrap(self, accelerators):
        """Make a pipeline of a copy."""
        choose, layers = self.choose, len(self.plain)
        cuts = sorted(choose.sample(range(1, layers), choose.randint(0, min(3, layers - 1))))
        balance = [b - a for a, b in zip([0, *cuts], [*cuts, layers])]
        modes = choose.choices(MODES, k=len(balance))
        return GPipe(
            copy.deepcopy(self.plain),
            balance,
            chunks=choose.randint(1, 5),
            devices=places(choose.choices('aaac', k=len(balance)))
            if accelerators
            else choose.choice(CPUS)(len(balance)),
            checkpoint=choose.choice([*MODES, *MODES, modes, modes.__getitem__]),
            batch_dim=self.model.input.rule({'turned': 1} if self.marked else DIMS),
            gather=self.model.output.rule(RULES),
            offload=choose.random() < 0.2,
        )

    def compile(self, what):
        """Compile parts of the pipeline."""
        if what is not None:
            torch.compiler.reset()
        parts = {
            None: [],
            'inner': [layer.linear for layer in self.gpipe],
            'layers': [*self.gpipe],
            'partitions': [*self.gpipe.partitions],
        }[what]
        for part in parts:
            if self.choose.random() < 0.6:
                part.compile(backend='eager')

    def run(self):
        """Train both for some steps, and compare all after each."""
        for _ in range(3):
            leaves = leaves_of_batch(self.choose, self.choose.randint(1, 7))
            # In this order, because the unwrapped model gets the random numbers of the pipeline.
            actual, plain = self.step(self.gpipe, leaves)
            expected, expected_plain = self.step(self.plain, leaves)
            assert plain == expected_plain
            assert_same(actual, expected, 1e-12)
            for optimizer in self.optimizers:
                optimizer.step()

    def step(self, net, leaves):
        """Run forward and backward; give all tensors that come of it, and the plain values."""
        net.zero_grad()
        device = net.devices[0] if net is self.gpipe else 'cpu'
        leaves = {
            name: leaf.to(device, copy=True).requires_grad_(
                name in self.grads and leaf.is_floating_point()
            )
            if isinstance(leaf, torch.Tensor)
            else leaf
            for name, leaf in leaves.items()
            if name in self.names
        }
        output = self.model.output.unpack(self.call(net, leaves))
        found = [x for _, x in sorted(output.items())]
        tensors = [x for x in found if isinstance(x, torch.Tensor)]
        loss = sum((x.cpu() * 1.5).sigmoid().sum() for x in tensors if x.is_floating_point())
        if loss.requires_grad:
            loss.backward()
        return [
            *[x.long() if x.dtype is torch.bool else x for x in tensors],
            *[x.grad for x in leaves.values() if isinstance(x, torch.Tensor)],
            *gradients(net),
            *net.state_dict().values(),
        ], [x for x in found if not isinstance(x, torch.Tensor)]

    def call(self, net, leaves):
        """Call a model."""
        if net is self.plain:
            value = self.model.input.pack(leaves)
            for layer in net:
                value = call(layer, value)
            return value
        if self.marked:
            leaves = {
                name: NoChunk(leaf) if name in ('table', 'places') else leaf
                for name, leaf in leaves.items()
            }
        output = call(net, self.model.input.pack(leaves))
        # Before backward, in which they draw the same again.
        for own, wrapped in zip(self.plain, net):
            if isinstance(own, Drop):
                own.given = torch.cat([mask.cpu() for mask in wrapped.masks])
                wrapped.masks.clear()
        return output


def call(module, value):
    """Call a module with a value or with several."""
    if isinstance(value, Arguments):
        return module(*value.args, **value.kwargs)
    return module(value)


def run_case(seed, accelerators=False):
    """Run a case."""
    try:
        Case(seed, accelerators).run()
    except Exception as error:
        raise AssertionError(f'seed {seed}') from error


@pytest.mark.slow
@pytest.mark.parametrize('block', range(BLOCKS))
def test_cases(block):
    for seed in range(BLOCK * block, BLOCK * block + BLOCK):
        run_case(seed)


@pytest.mark.accelerator
@pytest.mark.parametrize('block', slow_after(1, range(4)))
def test_cases_on_accelerators(block):
    for seed in range(10 * block, 10 * block + 10):
        run_case(seed, accelerators=True)


def test_a_wrong_number_would_be_found(monkeypatch):
    """As where a layer is not the same in a pipeline."""
    monkeypatch.setattr(
        Layer,
        'change',
        lambda self, leaves: {
            **leaves,
            'x': self.linear(leaves['x']) * (1 + 1e-9 * (context.micro_batch is not None)),
        },
    )
    with pytest.raises(AssertionError, match='seed'):
        for seed in range(5):
            run_case(seed)


def main(first, end):
    """Run cases; give the seeds that fail."""
    failing = []
    for seed in range(first, end):
        try:
            run_case(seed)
        except AssertionError:
            traceback.print_exc()
            failing.append(seed)
    return failing


if __name__ == '__main__':
    seeds = [int(argument) for argument in sys.argv[1:]]
    failures = main(seeds[0], seeds[-1] + (len(seeds) == 1))
    print(f'{len(failures)} of {seeds} fail: {failures}')
    sys.exit(bool(failures))
