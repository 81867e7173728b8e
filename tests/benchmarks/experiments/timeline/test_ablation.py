"""Ablations change speed and memory, but no results."""

import copy

import torch
from torch import nn

from benchmarks.experiments.timeline.ablation import carry, without
from tests.benchmarks import tiny
from tests.helpers import Call, assert_same, gradients
from torchgpipe import GPipe
from torchgpipe.engine.workers import Workers
from torchgpipe.skip.layout import inspect_skip_layout


def unet():
    """Return a U-Net whose numbers do not depend on random draws."""
    model = tiny.UNET.build().double()
    for module in model.modules():
        if isinstance(module, nn.Dropout2d):
            module.p = 0.0
    return model


def train(model, setting, x):
    """Return output and gradients of the model under a setting of the ablation."""
    with without(setting.off):
        layers = carry(model) if 'portals' in setting.off else model
        gpipe = GPipe(
            layers, setting.balance, devices=['cpu:0', 'cpu:1', 'cpu:2'], chunks=setting.chunks
        )
        output = gpipe(x)
        output.square().sum().backward()
    return [output, *gradients(gpipe)]


def test_compiled_models_train_as_the_unwrapped_model():
    model, x = unet(), torch.rand(4, 3, 64, 64, dtype=torch.double)
    reference = copy.deepcopy(model)
    expected = reference(x)
    expected.square().sum().backward()
    for setting in tiny.TIMELINE.settings:
        results = train(copy.deepcopy(model), setting, x)
        assert_same(results, [expected, *gradients(reference)])


def test_carried_skips_cross_every_boundary():
    model = tiny.UNET.build()
    parts = [nn.Sequential(*list(model)[k : k + 13]) for k in range(0, 65, 13)]
    assert sum(len(inspect_skip_layout(parts).outgoing(j)) for j in range(5)) > 2
    carried = carry(model)
    assert not any(
        inspect_skip_layout([nn.Sequential(layer) for layer in carried]).outgoing(j)
        for j in range(65)
    )
    x = torch.rand(2, 3, 64, 64)
    widths = []
    for layer in carried:
        x = layer(x)
        widths.append(len(x) if isinstance(x, tuple) else 1)
    assert max(widths) == 6 and widths[-1] == 1 and x.shape == (2, 1, 64, 64)


def test_layers_that_give_tuples_can_be_carried():
    layers = nn.Sequential(Call(lambda x: (x, x + 1)), Call(lambda pair: pair[0] * pair[1]))
    x = torch.rand(3)
    assert torch.equal(carry(layers)(x), x * (x + 1))


def order_of_backward(off):
    """Return the order in which micro-batches of the last partition go through backward."""
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            """Note when the gradient comes."""
            number = int(x[0, 0].item())
            x = x * 1
            x.register_hook(lambda _: seen.append(number))
            return x

    model = nn.Sequential(nn.Identity(), Look())
    x = torch.arange(4.0)[:, None].requires_grad_()
    with without(off):
        gpipe = GPipe(model, [1, 1], devices=['cpu', 'cpu'], chunks=4, checkpoint='never')
        output = gpipe(x)
    edges = str(output.grad_fn.next_functions)
    output.sum().backward()
    return seen, edges


def test_without_dependency_there_is_no_edge_between_micro_batches():
    seen, edges = order_of_backward([])
    assert seen == [3, 2, 1, 0] and 'Tie' in edges
    seen, edges = order_of_backward(['dependency'])
    assert sorted(seen) == [0, 1, 2, 3] and 'Tie' not in edges


def test_without_streams_copies_use_the_stream_of_the_computation(monkeypatch):
    monkeypatch.setattr(
        'benchmarks.experiments.timeline.ablation.current_stream', lambda device: device
    )
    with without(['streams']):
        assert Workers().copy_streams(torch.device('cpu', 1), 2) == [torch.device('cpu', 1)] * 2
    with without([]):
        assert Workers().copy_streams(torch.device('cpu', 1), 2) != [torch.device('cpu', 1)] * 2
