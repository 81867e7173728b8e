"""Two ranks train layers with nested backwards through their graph, hooks, or kept state."""

import copy

import pytest
import torch
from torch import nn

from tests.engine.checkpoint.test_state_use import COUNTING, Registering
from tests.engine.test_gradients_nested import LAYERS, WRITING, Equilibrium, loss_of
from tests.helpers import assert_same, micro_batches
from tests.shard.processes import run
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.schedule.generators import V_SHAPED

CASES = {
    **LAYERS,
    **WRITING,
    **COUNTING,
    'equilibrium': Equilibrium,
    'hook': lambda: Registering('register_hook'),
}


def train(schedule, mode):
    """Train each model on this rank and in one process, and return the names that differ."""
    places = [0, 1, 1, 0] if schedule in V_SHAPED else [0, 1]
    balance = [4 // len(places)] * len(places)
    different = []
    for name, make in CASES.items():
        if name in WRITING and mode == 'never':  # PyTorch refuses several micro-batches.
            continue
        torch.manual_seed(0)
        layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(4, 4), make()) for _ in range(4)]
        ).double()
        model = copy.deepcopy(layers)
        gpipe = DistributedGPipe(
            layers, balance, mesh=init_mesh(pipe=2), chunks=3, checkpoint=mode, places=places
        )
        for _ in range(2):
            x, target = torch.randn(2, 7, 4, dtype=torch.double)
            model.zero_grad()
            gpipe.zero_grad()
            for part, label in zip(micro_batches(x, 3), micro_batches(target, 3)):
                (loss_of(model(part), label) * len(part) / len(x)).backward()
            gpipe.step(x, target, loss_of, schedule=schedule)
            expected = dict(model.named_parameters())
            for key, parameter in gpipe.named_parameters():
                try:
                    assert_same([parameter.grad], [expected[key].grad], 1e-10)
                except AssertionError:
                    different.append(f'{name}: {key}')
    return different


@pytest.mark.slow
@pytest.mark.parametrize(
    'schedule, mode', [('1f1b', 'always'), ('zb-h1', 'never'), ('zb-v', 'always')]
)
def test_two_ranks(schedule, mode):
    assert run(2, train, schedule, mode) == [[], []]
