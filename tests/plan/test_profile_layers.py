"""Profiling every kind of layer, and the balances that follow."""

import json

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from tests.devices import ACCELERATOR
from tests.plan.models import MODELS, resnet
from torchgpipe import GPipe
from torchgpipe.balance import Profile, balance_by_size, balance_by_time, profile


def test_from_profile_to_a_training_step():
    for make in MODELS:
        model, sample = make()
        costs = profile(model, sample, device='cpu', timeout=0)
        costs = Profile.from_dict(json.loads(json.dumps(costs.to_dict())))
        assert [layer.name for layer in costs.layers] == [
            name for name, _ in model.named_children()
        ], make
        balance = costs.balance(2, chunks=2, memory_limit=10**9)
        gpipe = GPipe(model, balance, devices=['cpu:0', 'cpu:1'], chunks=2, checkpoint='always')
        optimizer = torch.optim.SGD(gpipe.parameters(), lr=0.1)
        output = gpipe(sample)
        output.square().mean().backward()
        optimizer.step()
        assert output.shape[0] == sample.shape[0], make
        model, sample = make()
        assert sum(balance_by_time(2, model, sample, device='cpu', timeout=0)) == len(model), make
        assert sum(balance_by_size(2, model, sample, device='cpu', chunks=2)) == len(model), make


def test_no_cut_before_a_layer_that_works_in_place():
    model, sample = resnet()
    costs = profile(model, sample, device='cpu', timeout=0)
    relu = [k for k, layer in enumerate(model) if isinstance(layer, nn.ReLU)]
    changes = {k: x.changes for k, x in enumerate(costs.layers) if x.changes is not None}
    assert list(changes) == relu and list(changes.values()) == [k - 1 for k in relu]
    assert costs.edges() == [k for k in range(len(model) + 1) if k not in relu]
    for partitions in range(1, len(costs.edges())):
        cut = 0
        for number in costs.balance(partitions, chunks=2)[:-1]:
            cut += number
            assert cut not in relu
    with pytest.raises(ValueError, match="make only 16 groups for 17 partitions.*'4' is one"):
        costs.balance(17, chunks=2)
    assert sum(costs.balance(17, chunks=2, checkpoint='never')) == len(model)
    assert len(balance_by_time(17, model, sample, device='cpu', timeout=0)) == 17


def test_no_cut_between_a_layer_and_one_that_changes_it_through_a_view():
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.Linear(4, 4),
        nn.Flatten(),
        nn.Identity(),
        nn.ReLU(inplace=True),
        nn.Linear(4, 2),
    )
    costs = profile(model, torch.rand(8, 4), device='cpu', timeout=0)
    assert costs.edges() == [0, 1, 5, 6]


def test_hooks_that_make_weights_run():
    model = nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(4, 4)),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.LazyLinear(3),
    )
    layers = profile(model, torch.rand(8, 4), device='cpu', timeout=0).layers
    assert [layer.output_bytes for layer in layers] == [128, 128, 96]
    assert layers[2].parameter_bytes == 60
    assert isinstance(model[2], nn.LazyLinear)


def test_lazy_layers():
    model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU())
    layers = profile(model, torch.rand(16, 4), device='cpu', timeout=0).layers
    assert [layer.parameter_bytes for layer in layers] == [160, 64, 0]


def test_a_pipeline_within_a_layer():
    inner = GPipe(
        nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 3)),
        [1, 2],
        devices=['cpu:0', 'cpu:1'],
        chunks=2,
        checkpoint='always',
    )
    layers = profile(
        nn.Sequential(inner, nn.ReLU()), torch.rand(4, 3), device='cpu', timeout=0
    ).layers
    assert layers[0].parameter_bytes == 96


class Caching(nn.Linear):
    """Keep the output."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class Quiet(nn.Linear):
    """A common mistake: `train` returns nothing."""

    def train(self, mode=True):
        """Forget to return."""
        super().train(mode)


class Graph(nn.Module):
    """A layer with a sparse buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer('adjacency', torch.eye(64).to_sparse())
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        return torch.sparse.mm(self.adjacency, self.fc(x).t()).t()


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize(
    'make',
    [
        lambda: nn.utils.weight_norm(nn.Linear(64, 64)),
        lambda: nn.utils.spectral_norm(nn.Linear(64, 64)),
        lambda: Caching(64, 64),
        lambda: Quiet(64, 64),
        Graph,
        lambda: prune.random_unstructured(nn.Linear(64, 64), 'weight', 0.5),
        lambda: torch.jit.script(nn.Linear(64, 64)),
    ],
    ids=['weight norm', 'spectral norm', 'caching', 'train', 'sparse', 'pruned', 'script'],
)
def test_layers_that_are_hard_to_copy(make, clock):
    clock.tick = 1
    model = nn.Sequential(make(), nn.ReLU())
    x = torch.rand(64, 64)
    model(x)
    first, second = profile(model, x, device='cpu', timeout=0).layers
    assert first.output_bytes == 2**14 and second.activation_bytes == 2**14
    assert first.backward_seconds == 1
    assert all(p.grad is None and p.requires_grad and p.is_leaf for p in model.parameters())


@pytest.mark.slow
@pytest.mark.accelerator
def test_layers_on_an_accelerator():
    module = torch.get_device_module(ACCELERATOR)
    for make in MODELS:
        model, sample = make()
        state = module.get_rng_state()
        costs = profile(model, sample, timeout=0)
        assert all(p.device.type == 'cpu' for p in model.parameters()), make
        assert torch.equal(module.get_rng_state(), state), make
        cpu = profile(model, sample, timeout=0, device='cpu')
        for one, other in zip(costs.layers, cpu.layers, strict=True):
            assert one.parameter_bytes == other.parameter_bytes, (make, one)
            assert one.output_bytes == other.output_bytes, (make, one)
    assert sum(balance_by_size(2, model, sample)) == sum(balance_by_time(2, model, sample))
