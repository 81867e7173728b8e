"""Profiled memory: outputs of a layer, tensors kept by autograd, and by the profiler itself."""

import copy

import torch
from torch import nn

from benchmarks.harness.memory import LiveTensors
from tests.plan.models import unet
from tests.skip.layers import Pop, StashLinear, popping, stashing
from torchgpipe import GPipe
from torchgpipe.balance import profile
from torchgpipe.skip import skippable, stash

KIB = 1024


def sizes(*layers, sample=None):
    """Profile layers on 64 samples of width 64 (16 KiB); give KiB kept by each."""
    sample = torch.rand(64, 64) if sample is None else sample
    costs = profile(nn.Sequential(*layers), sample, device='cpu', timeout=0)
    return [layer.activation_bytes / KIB for layer in costs.layers]


def test_an_activation_counts_for_the_layer_that_made_it_if_anyone_keeps_it():
    def linear():
        return nn.Linear(64, 64)

    assert sizes(linear(), linear(), linear()) == [16, 16, 0]  # each keeps its input
    assert sizes(linear(), nn.ReLU(), linear()) == [0, 16, 0]  # keeps its output, as does the next
    assert sizes(linear(), nn.ReLU(inplace=True)) == [16, 0]  # the memory of the layer before
    assert sizes(linear(), nn.Flatten(), nn.Identity(), linear()) == [16, 0, 0, 0]  # views of it
    assert sizes(nn.ReLU(), linear()) == [16, 0]  # whose input needs no gradient
    assert sizes(nn.Sequential(linear(), nn.Sigmoid(), linear(), nn.Sigmoid())) == [32]
    assert sizes(linear().requires_grad_(False), nn.ReLU()) == [0, 0]


def test_a_partition_keeps_the_sum_of_its_layers():
    """Compare with the tensors alive after a forward of several layers at once."""
    model = nn.Sequential(
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.LayerNorm(64),
        nn.Linear(64, 64),
    )
    costs = profile(model, torch.rand(64, 64), device='cpu', timeout=0)
    x = torch.rand(64, 64)
    with LiveTensors().watched() as live:
        graph = model(x).grad_fn
    assert graph is not None
    assert live.now == sum(layer.activation_bytes for layer in costs.layers)


class Squares(nn.Linear):
    """Multiply by a gradient, and compute a value that is not used."""

    def forward(self, x):
        x = super().forward(x)
        x.exp().sin()
        return x * torch.func.grad(lambda x: x.square().sum())(x) if self.bias is None else x


def test_tensors_outside_of_the_results_graph():
    assert sizes(nn.Linear(64, 64), Squares(64, 64)) == [16, 0]


def test_a_layer_that_refuses_hooks():
    assert sizes(Squares(64, 64, bias=False), nn.Linear(64, 64)) == [16, 0]


def test_skips_count_for_the_layer_that_made_them():
    assert sizes(StashLinear(64), nn.Linear(64, 64), Pop()) == [0, 0, 0]
    square = popping('skip')
    model = nn.Sequential(StashLinear(64), nn.Linear(64, 64), square(), nn.Linear(64, 64))
    costs = profile(model, torch.rand(64, 64), device='cpu', timeout=0)
    assert [(s.source, s.target, s.bytes) for s in costs.skips] == [(0, 2, 16 * KIB)]
    assert costs.layers[0].output_bytes == 16 * KIB


def test_a_skip_that_is_none():
    @skippable(stash=['skip'])
    class StashNone(nn.Module):
        def forward(self, x):
            yield stash('skip', None)
            return x

    costs = profile(nn.Sequential(StashNone(), Pop()), torch.rand(2, 3), device='cpu', timeout=0)
    assert costs.skips == ()
    assert (
        profile(
            nn.Sequential(stashing('a')(), popping('a')()),
            torch.rand(2, 3),
            device='cpu',
            timeout=0,
        )
        .skips[0]
        .bytes
        == 24
    )


def test_sizes_of_parameters():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False))
    model[2].requires_grad_(False)
    layers = profile(model, torch.rand(8, 4), device='cpu', timeout=0).layers
    assert [layer.parameter_bytes for layer in layers] == [80, 32, 64]
    assert [layer.frozen_bytes for layer in layers] == [0, 0, 64]
    assert [layer.buffer_bytes for layer in layers] == [0, 40, 0]
    assert [layer.name for layer in layers] == ['0', '1', '2']


def test_the_predicted_memory_of_a_partition():
    """Against the peak of a training step, as it is counted for the whole pipeline."""
    m, width = 8, 64
    model = nn.Sequential(
        *[layer for _ in range(12) for layer in (nn.Linear(width, width), nn.Tanh())]
    )
    x = torch.rand(m * 64, width)
    for mode in ('always', 'never'):
        balance = profile(model, x, device='cpu', timeout=0).balance(1, chunks=m, checkpoint=mode)
        gpipe = GPipe(copy.deepcopy(model), balance, devices=['cpu'], chunks=m, checkpoint=mode)
        gpipe(x).sum().backward()
        with LiveTensors().watched() as live:
            output = gpipe(x)
            output.backward(torch.ones_like(output))
        parameters = sum(p.numel() * 4 for p in model.parameters())
        peak = live.peak + 2 * parameters + x.numel() * 4
        assert 0.75 * balance.bytes[0] <= peak <= 1.25 * balance.bytes[0], mode


def test_a_layer_dies_before_the_next_one_is_on_the_device():
    log = []

    class See(nn.Linear):
        def forward(self, x):
            if not any(known is self for known in refs()):
                log.append(len(refs()))
                weak.append(weakref.ref(self))
            return super().forward(x)

    import weakref

    weak = []

    def refs():
        return [ref() for ref in weak if ref() is not None]

    profile(
        nn.Sequential(See(4, 4), See(4, 4), See(4, 4)), torch.rand(2, 4), device='cpu', timeout=0
    )
    assert log == [0, 0, 0]


def test_nothing_is_left_alive():
    model, sample = unet()
    with LiveTensors().watched() as live:
        costs = profile(model, sample, device='cpu', timeout=0)
    assert costs is not None and live.now == 0


def test_autocast_keeps_no_layer():
    alive = []

    class See(nn.Linear):
        def forward(self, x):
            alive.append(live.now)
            return super().forward(x)

    model = nn.Sequential(*[See(512, 512) for _ in range(4)])
    with torch.autocast('cpu', dtype=torch.bfloat16), LiveTensors().watched() as live:
        profile(model, torch.rand(2, 512), device='cpu', timeout=0)
    starts = alive[:: len(alive) // 4]
    assert max(starts) < 1.5 * starts[0] + 100_000
