"""Random programs on tensors that share memories: as on single micro-batches, or refused.

Layers change tensors in place, return one in several places, return views, stash and pop. The
plain call and a step give the results of the layers on each micro-batch, or one of the errors
below. ``TORCHGPIPE_RANDOM_CASES=1000`` in the environment runs so many.
"""

import copy
import os
import random
import re

import pytest
import torch
from torch import nn

from tests.devices import places
from tests.helpers import assert_same
from tests.marks import MODES
from torchgpipe import Arguments, GPipe, NoChunk
from torchgpipe.schedule.generators import V_SHAPED
from torchgpipe.skip import pop, skippable, stash

CASES = int(os.environ.get('TORCHGPIPE_RANDOM_CASES', 100))
BLOCK = 25

#: Allowed errors for in-place changes whose autograd history cannot be kept.
REFUSED = re.compile(
    'changed in place|modified by an inplace operation|modified inplace|'
    'changed the input of the partition in place|'
    'changed a tensor in place that all micro-batches share|leaf Variable|'
    'hands on a tensor that was changed|'
    # Where a checkpointed partition did, and was run again beside this one.
    'took another path'
)

#: Schedules, and on which worker each of four partitions is.
SCHEDULES = {
    'gpipe': [0, 1, 2, 3],
    '1f1b': [0, 1, 2, 3],
    'zb-h1': [0, 1, 2, 3],
    'interleaved': [0, 1, 0, 1],
    'looped-bfs': [0, 1, 0, 1],
    **dict.fromkeys(V_SHAPED, [0, 1, 1, 0]),
}

CHANGES = [
    lambda x, y: x.mul_(1.5),
    lambda x, y: x.relu_(),
    lambda x, y: x.add_(y * 0.5),
    lambda x, y: x[:, :2].add_(1),
]


class Op(nn.Module):
    """Make one of three tensors anew, from another; a fourth one is shared by all samples."""

    def __init__(self, choose):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kind = choose.choice(['linear', 'linear', 'add', 'change', 'same', 'view', 'table'])
        self.a, self.b = choose.randrange(3), choose.randrange(3)
        self.change = choose.choice(CHANGES)
        self.change_table = choose.random() < 0.1

    def forward(self, values):
        a, values = self.a, list(values)
        x, y, table = values[a], values[self.b], values[3]
        if self.kind == 'table':
            values[a] = x + (table.mul_(2) if self.change_table else table)
        else:
            values[a] = {
                'linear': lambda: self.linear(y),
                'add': lambda: x + y,
                'change': lambda: self.change(x, y),
                'same': lambda: y,
                'view': lambda: y[:, :],
            }[self.kind]()
        return tuple(values)


def stashing(name):
    """Return a layer that stashes one of the values, which may go on as well."""

    @skippable(stash=[name])
    class Stash(nn.Module):
        def __init__(self, choose):
            super().__init__()
            self.a, self.keep = choose.randrange(4), choose.random() < 0.6

        def forward(self, values):
            yield stash(name, values[self.a])
            values = list(values)
            if not self.keep and self.a < 3:
                values[self.a] = values[(self.a + 1) % 3] * 2
            return tuple(values)

    return Stash


def popping(name):
    """Return a layer that pops it, and may change it."""

    @skippable(pop=[name])
    class Pop(nn.Module):
        def __init__(self, choose):
            super().__init__()
            self.a, self.how = choose.randrange(3), choose.choice(['add', 'give', 'change'])

        def forward(self, values):
            skip = yield pop(name)
            values, a = list(values), self.a
            if self.how == 'change':
                skip.mul_(2)
            values[a] = skip + values[a] * (self.how != 'give')
            return tuple(values)

    return Pop


class Start(nn.Module):
    """Take two arguments, and make the four values."""

    def __init__(self, choose):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.raw = choose.random() < 0.3

    def forward(self, x, table):
        y = self.linear(x)
        return (x if self.raw else y * 2), y, y.sin(), table


class End(nn.Module):
    """Return one tensor."""

    def forward(self, values):
        return values[0] + 2 * values[1] + 3 * values[2]


class Case:
    """A program, the options of its pipeline, and its arguments."""

    def __init__(self, seed, accelerators):
        self.choose = choose = random.Random(seed)
        torch.manual_seed(seed)
        layers, under_way = [Start(choose)], []
        for k in range(choose.randint(4, 9)):
            roll = choose.random()
            if roll < 0.2:
                layers.append(stashing(f's{k}')(choose))
                under_way.append(f's{k}')
            elif roll < 0.4 and under_way:
                name = under_way.pop(choose.randrange(len(under_way)))
                layers.append(popping(name)(choose))
            else:
                layers.append(Op(choose))
        self.layers = nn.Sequential(
            *layers, *[popping(name)(choose) for name in under_way], End()
        ).double()
        self.schedule = choose.choice([*SCHEDULES])
        workers = SCHEDULES[self.schedule]
        number = len(self.layers)
        cuts = sorted(choose.sample(range(1, number), 3))
        self.chunks = 4
        # Stages on one device stay so.
        devices = places('aaaa') if accelerators else [f'cpu:{j}' for j in workers]
        self.devices = [devices[j] for j in workers] if accelerators else devices
        self.gpipe = GPipe(
            copy.deepcopy(self.layers),
            [b - a for a, b in zip([0, *cuts], [*cuts, number])],
            devices=self.devices,
            chunks=self.chunks,
            batch_dim=0,
            checkpoint=choose.choice(MODES),
        )
        self.grads = choose.random() < 0.3, choose.random() < 0.3
        self.x, self.table = torch.randn(8, 4).double(), torch.randn(4).double()

    def inputs(self, device):
        """Return the leaves, and the arguments: leaves or results of them."""
        given = [
            x.to(device, copy=True).requires_grad_(grad)
            for x, grad in zip((self.x, self.table), self.grads)
        ]
        return given, [x * 1 if x.requires_grad else x for x in given]

    def expected(self):
        """Train the layers on each micro-batch; return all gradients."""
        leaves, (x, table) = self.inputs('cpu')
        for part in x.split(2):
            loss_of(self.layers[1:](self.layers[0](part.clone(), table)), None).div(4).backward(
                retain_graph=True
            )
        return gradients(self.layers, leaves)

    def found(self, how):
        """Do so through the pipeline."""
        self.gpipe.zero_grad()
        leaves, (x, table) = self.inputs(self.gpipe.devices[0])
        if how == 'step':
            self.gpipe.step(Arguments(x, NoChunk(table)), None, loss_of, schedule=self.schedule)
        else:
            loss_of(self.gpipe(x, NoChunk(table)), None).backward()
        return gradients(self.gpipe, leaves)


def gradients(layers, leaves):
    """Return the gradients of parameters and leaves, on the CPU."""
    return [None if x.grad is None else x.grad.cpu() for x in (*layers.parameters(), *leaves)]


def loss_of(output, target):
    """Return a mean over samples."""
    return output.sin().square().mean()


def run_case(seed, accelerators=False):
    """Run a case; return the outcomes of the call and of the step."""
    case = Case(seed, accelerators)
    try:
        expected = case.expected()
    except RuntimeError:  # It is no program that autograd takes.
        return None
    became = []
    for how in ('call', 'step'):
        try:
            found = case.found(how)
        except RuntimeError as error:
            assert REFUSED.search(str(error)), f'seed {seed}, {how}: {error}'
            became.append('refused')
            continue
        try:
            assert_same(found, expected, 1e-10)
        except AssertionError as error:
            raise AssertionError(f'seed {seed}, {how}') from error
        became.append('equal')
    return became


@pytest.mark.slow
def test_programs():
    for block in range(-(-CASES // BLOCK)):
        became = [run_case(seed) for seed in range(BLOCK * block, BLOCK * block + BLOCK)]
        assert ['equal', 'equal'] in became and any('refused' in each for each in became if each)


@pytest.mark.accelerator
@pytest.mark.parametrize('block', range(-(-CASES // BLOCK // 4)))
def test_programs_on_accelerators(block):
    for seed in range(BLOCK * block, BLOCK * block + BLOCK):
        run_case(seed, accelerators=True)
