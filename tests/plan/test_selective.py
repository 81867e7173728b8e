"""Results that checkpointing keeps in a plan: the choice, the prediction, and a training by it."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from torchgpipe import GPipe
from torchgpipe.balance import Profile, profile
from torchgpipe.plan import Plan, plan
from torchgpipe.plan.costs import LayerProfile, OperationProfile
from torchgpipe.plan.selective import UNITS, knapsack


def test_a_knapsack_is_as_good_as_all_subsets():
    choose = random.Random(0)
    for _ in range(100):
        # Sizes in whole units, which are not rounded.
        sizes = [choose.randint(1, UNITS // 2) for _ in range(8)]
        values = [choose.random() for _ in sizes]
        best = max(
            sum(values[k] for k in subset)
            for number in range(9)
            for subset in itertools.combinations(range(8), number)
            if sum(sizes[k] for k in subset) <= UNITS
        )
        chosen = knapsack(sizes, values, UNITS)
        assert sum(sizes[k] for k in chosen) <= UNITS
        assert sum(values[k] for k in chosen) == pytest.approx(best)


def test_items_without_a_size_are_free():
    assert knapsack([0, 5], [1, 1], 4) == [0]
    assert knapsack([0, 5], [1, 1], 0) == []


def random_profile(choose, layers=6):
    """Return a profile of layers with operations of any times and sizes."""
    profiles = []
    for k in range(layers):
        operations = []
        for name in ('aten.mm.default', 'aten.gelu.default', 'aten.native_layer_norm.default'):
            size = choose.randint(100, 1000)
            saved = choose.choice([0, size])
            operations.append(OperationProfile(name, choose.random(), size, saved))
        seconds = sum(operation.seconds for operation in operations)
        activations = sum(operation.saved_bytes for operation in operations)
        activations += choose.randint(0, 1000)
        profiles.append(
            LayerProfile(
                str(k), seconds, 2 * seconds, 80, 0, 0, activations, 100, operations=(*operations,)
            )
        )
    return Profile((*profiles,), (), 8, 100, 'cpu')


@pytest.mark.parametrize('schedule', ['1f1b', 'gpipe', 'zb-h1', 'plain call'])
def test_plans_between_the_modes_are_faster(schedule):
    """They fit, and are faster than the best plan whose checkpoints keep nothing."""
    choose = random.Random(1)
    options = {
        'devices': ['cuda:0', 'cuda:1'],
        'schedules': [schedule],
        'chunks': [8],
        'virtual': 1,
    }
    compared = 0
    while compared < 20:
        costs = random_profile(choose)
        layers = [dict(layer, operations=[]) for layer in costs.to_dict()['layers']]
        plain = Profile.from_dict({**costs.to_dict(), 'layers': layers})
        most, least = (
            plan(plain, checkpoints=[mode], **options).bytes['cuda:0']
            for mode in ('never', 'always')
        )
        limit = [int(least + (most - least) * choose.uniform(0.3, 0.8)), None]
        today = plan(plain, memory_limit=limit, **options)
        if today.checkpoint == 'never':
            continue  # With another balance, there is room for all results.
        best = plan(costs, memory_limit=limit, **options)
        assert best.bytes['cuda:0'] <= limit[0]
        assert best.seconds < today.seconds
        again = Plan.from_dict(best.to_dict())
        assert again == best and again.seconds == best.seconds
        compared += 1


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width=32):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, -1).unbind(2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def test_operations_of_a_profile():
    (layer,) = profile(
        nn.Sequential(Block()), torch.rand(4, 8, 32), device='cpu', timeout=0
    ).layers
    operations = {operation.name: operation for operation in layer.operations}
    products = operations['aten.addmm.default']
    assert products.bytes == 4 * 8 * 32 * (3 + 1 + 4 + 1) * 4
    # The sums read neither the result of the attention's product nor of the last one.
    assert products.saved_bytes == 4 * 8 * 32 * (3 + 4) * 4
    assert sum(operation.seconds for operation in layer.operations) <= layer.forward_seconds
    assert not any('view' in name or 'empty' in name for name in operations)


class Counted(TorchDispatchMode):
    """A mode that counts products."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_a_pipeline_by_such_a_plan():
    model = nn.Sequential(*[Block() for _ in range(4)])
    x = torch.rand(8, 8, 32)
    costs = profile(model, x, device='cpu', timeout=0)
    # The times of all blocks are those of one, so two stages of two blocks are the fastest.
    layers = [replace(costs.layers[0], name=layer.name) for layer in costs.layers]
    costs = replace(costs, layers=tuple(layers))
    options = {'devices': ['cpu:0', 'cpu:1'], 'schedules': ['1f1b'], 'chunks': [4], 'virtual': 1}
    most = plan(costs, checkpoints=['never'], **options).bytes['cpu:0']
    least = plan(costs, checkpoints=['always'], **options).bytes['cpu:0']
    best = plan(costs, memory_limit=(most + least) // 2, **options)
    assert best.keep and 'selective' in str(best) and 'kept results' in str(best)
    gpipe = GPipe(model, best)
    kept = sum('aten.addmm.default' in names for names in best.keep.values())
    recomputed = sum(
        number
        for number, mode in zip(best.balance, best.checkpoint)
        if mode == 'always' or best.checkpoint == 'always'
    )
    with Counted() as counted:
        gpipe.step(x, x, nn.MSELoss(), schedule='auto')
    assert counted.number == 4 * 4 * (4 + recomputed - kept)
    with pytest.raises(ValueError, match='a plan says devices, chunks, checkpoint and keep'):
        GPipe(model, best, keep='products')
