"""Skips in a pipeline: outputs and gradients equal the unwrapped model's."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.devices import devices
from tests.helpers import assert_same, call, gradients, train_both, train_twice
from tests.marks import MODES
from tests.skip.layers import Pop, StashLinear
from tests.skip.models import KINDS, WIDTH, build, crossing
from torchgpipe import GPipe
from torchgpipe.skip import skippable, stash


@st.composite
def models(draw):
    """Draw up to 8 layers and 6 skips between them, in two namespaces, and a balance."""
    number = draw(st.integers(1, 8))
    skips = (
        draw(
            st.lists(st.tuples(st.integers(0, number - 1), st.integers(0, number - 1)), max_size=6)
        )
        if number > 1
        else []
    )
    skips = [(min(skip), max(skip)) for skip in skips if skip[0] != skip[1]]
    kinds = {f's{k}': draw(st.sampled_from(sorted(KINDS))) for k in range(len(skips))}
    computes = draw(
        st.lists(
            st.sampled_from(['tanh', 'inplace', 'frozen', 'nothing', 'detach']),
            min_size=number,
            max_size=number,
        )
    )
    cuts = draw(st.sets(st.integers(1, number - 1), max_size=4)) if number > 1 else set()
    edges = [0, *sorted(cuts), number]
    return skips, kinds, computes, [b - a for a, b in zip(edges, edges[1:])]


@pytest.mark.slow
@devices
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    model=models(),
    chunks=st.sampled_from([1, 2, 3]),
    size=st.integers(1, 5),
    modes=st.sampled_from(MODES) | st.lists(st.sampled_from(MODES), min_size=5, max_size=5),
    input_grad=st.booleans(),
)
def test_random_layouts(devices, model, chunks, size, modes, input_grad):
    skips, kinds, computes, balance = model
    mode = modes if isinstance(modes, str) else modes[: len(balance)]
    torch.manual_seed(size)
    module = build(skips, kinds, computes)
    reference = copy.deepcopy(module)
    gpipe = GPipe(module, balance, devices=devices(len(balance)), chunks=chunks, checkpoint=mode)
    train_twice(reference, gpipe, torch.randn(size, WIDTH, dtype=torch.double), input_grad)


@devices
def test_every_mode_and_balance(devices):
    for balance in [[6], [1] * 6, [2, 2, 2], [1, 4, 1], [3, 3]]:
        model = crossing()
        gpipe = GPipe(
            copy.deepcopy(model),
            balance,
            devices=devices(len(balance)),
            chunks=3,
            checkpoint='except_last',
        )
        train_both(model, gpipe, torch.randn(7, WIDTH, dtype=torch.double))


@devices
def test_gradients_may_be_asked_for_twice_and_of_gradients(devices):
    model = crossing()
    gpipe = GPipe(
        copy.deepcopy(model), [2, 2, 2], devices=devices(3), chunks=2, checkpoint='except_last'
    )
    got = []
    for net in (model, gpipe):
        x = torch.linspace(-1, 1, 12, dtype=torch.double).view(4, 3).requires_grad_()
        output = call(net, x).square().sum()
        output.backward(retain_graph=True)
        (grad,) = torch.autograd.grad(output, x, create_graph=True)
        grad.square().sum().backward()
        got.append([x.grad, *gradients(net)])
    assert_same(*got)
    with pytest.raises(RuntimeError, match='a second time'):
        output.backward()


@devices
def test_a_skip_past_layers_without_a_gradient(devices):
    """The main path is detached, or made of integers: the skip's gradient goes its own way."""

    class Indices(nn.Module):
        def forward(self, x):
            return x.detach().argmax(1)

    model = nn.Sequential(nn.Linear(4, 4), StashLinear(), Indices(), nn.Embedding(4, 4), Pop())
    model = model.double()
    for balance in ([1, 1, 1, 1, 1], [2, 2, 1], [2, 1, 2]):
        model.zero_grad()
        gpipe = GPipe(
            copy.deepcopy(model),
            balance,
            devices=devices(len(balance)),
            chunks=3,
            checkpoint='except_last',
        )
        train_both(model, gpipe, torch.randn(6, 4, dtype=torch.double))


class Both(nn.Module):
    """Return two outputs: the input of a skip's partition, and a linear layer's output."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.fc(x), x * 2


@skippable(stash=['skip'])
class StashOfPair(nn.Module):
    """Stash a function of a pair's first part."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, input):
        yield stash('skip', self.fc(input[0]))
        return input


@devices
def test_a_gradient_that_was_left_behind_does_not_reach_the_next_backward(devices):
    def steps(net, model):
        first, second = call(net, torch.ones(4, WIDTH, dtype=torch.double))
        grads = torch.autograd.grad(
            second.sum(), [model[0].fc.weight], retain_graph=True, allow_unused=True
        )
        first.sum().backward()
        return [*grads, *gradients(model)]

    add = Pop(lambda input, skip: (input[0], input[1] + skip))
    model = nn.Sequential(Both(), StashOfPair(), add).double()
    gpipe = GPipe(
        copy.deepcopy(model), [2, 1], devices=devices(2), chunks=2, checkpoint='except_last'
    )
    assert_same(steps(gpipe, nn.ModuleList(gpipe)), steps(model, model))
