"""Layers that stash and pop in ways of their own: tuples, nesting, contexts, sparse tensors."""

import copy

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.helpers import assert_same, train_both
from tests.marks import MODES
from tests.skip.layers import Pop, Stash, StashLinear
from tests.skip.models import WIDTH
from torchgpipe import GPipe
from torchgpipe.skip import Namespace, pop, skippable, stash


def test_sparse_tensors_may_skip():
    model = nn.Sequential(
        Stash(lambda x: (x.detach().to_sparse(), x)),
        nn.Linear(4, 4),
        Pop(lambda x, skip: x + skip.to_dense()),
    ).double()
    gpipe = GPipe(
        copy.deepcopy(model), [1, 1, 1], devices=['cpu'] * 3, chunks=2, checkpoint='never'
    )
    train_both(model, gpipe, torch.randn(4, 4, dtype=torch.double))


@devices
def test_skips_within_a_layer_stay_there(devices):
    def block():
        return nn.Sequential(Stash(), nn.Linear(4, 4), Pop())

    model = nn.Sequential(block(), block(), block()).double()
    gpipe = GPipe(
        copy.deepcopy(model), [1, 1, 1], devices=devices(3), chunks=2, checkpoint='except_last'
    )
    train_both(model, gpipe, torch.randn(4, 4, dtype=torch.double))
    # A skip does not pass from one layer into another unless it is declared.
    model = nn.Sequential(nn.Sequential(Stash()), nn.Sequential(Pop()))
    gpipe = GPipe(model, [1, 1], devices=devices(2))
    with pytest.raises(RuntimeError, match="'skip' has not been stashed"):
        gpipe(torch.rand(2, 4, device=devices.first))


@devices
def test_a_skip_within_a_layer_must_not_have_the_name_of_one_that_crosses(devices):
    model = nn.Sequential(
        Stash(), nn.Linear(4, 4), Pop(), nn.Sequential(Stash(), nn.Linear(4, 4), Pop())
    )
    GPipe(model, [3, 1], devices=devices(2))(torch.rand(2, 4, device=devices.first))
    with pytest.raises(TypeError, match="a layer within '3' declared 'skip'"):
        GPipe(model, [2, 2], devices=devices(2))


@devices
def test_a_pipeline_within_a_layer(devices):
    for inner_mode in MODES:

        def model(wrap):
            torch.manual_seed(0)
            inner = nn.Sequential(StashLinear(), nn.Linear(4, 4), Pop()).double()
            if wrap:  # on the device of the partition that it is in
                inner = GPipe(
                    inner, [1, 1, 1], devices=devices(3)[1:2] * 3, chunks=2, checkpoint=inner_mode
                )
            one = Namespace()
            return nn.Sequential(StashLinear().double().isolate(one), inner, Pop().isolate(one))

        gpipe = GPipe(
            model(True), [1, 1, 1], devices=devices(3), chunks=2, checkpoint='except_last'
        )
        train_both(model(False), gpipe, torch.randn(8, 4, dtype=torch.double))


@devices
@pytest.mark.parametrize('context', [torch.no_grad, torch.inference_mode])
def test_a_yield_within_no_grad(devices, context):
    @skippable(stash=['skip'])
    class StashWithin(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            skip = self.fc(x)
            with context():
                yield stash('skip', skip)
            return x

    @skippable(pop=['skip'])
    class PopWithin(nn.Module):
        def forward(self, x):
            with context():
                skip = yield pop('skip')
            return x * skip

    model = nn.Sequential(StashWithin(), nn.Linear(WIDTH, WIDTH), PopWithin()).double()
    gpipe = GPipe(
        copy.deepcopy(model), [1, 1, 1], devices=devices(3), chunks=2, checkpoint='except_last'
    )
    train_both(model, gpipe, torch.randn(4, WIDTH, dtype=torch.double))


def test_an_error_of_a_yield_appears_where_it_was_made():
    states = []

    @skippable(stash=['skip'])
    class Wrong(nn.Module):
        def forward(self, x):
            try:
                with torch.no_grad():
                    yield stash('typo', x)
            finally:
                states.append(torch.is_grad_enabled())

    with pytest.raises(RuntimeError, match="'typo' has not been declared") as error:
        Wrong()(torch.rand(2))
    assert states == [True] and torch.is_grad_enabled()
    assert "yield stash('typo', x)" in str(error.getrepr())


@devices
def test_a_skip_that_is_a_tensor_of_the_batch(devices):
    """Behind it, too, that is one tensor in two places, in the first pass and in the next one."""

    @skippable(pop=['skip'])
    class PopPair(nn.Linear):
        def forward(self, x):
            return x, (yield pop('skip')), super().forward(x)

    class Pair(nn.Module):
        def forward(self, three):
            return three[0] * three[1], three[2]

    model = nn.Sequential(Stash(), PopPair(4, 4), Pair()).double()
    gpipe = GPipe(
        copy.deepcopy(model), [1, 1, 1], devices=devices(3), chunks=2, checkpoint='except_last'
    )
    x = torch.randn(4, 4, dtype=torch.double)
    for each, value in ((model, x), (gpipe, x.to(devices.first))):
        first, second = each(value)
        (first.sum() + second.sin().sum()).backward()
    assert_same([p.grad.cpu() for p in gpipe.parameters()], [p.grad for p in model.parameters()])
