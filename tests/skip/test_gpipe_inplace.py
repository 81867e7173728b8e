"""Changes in place around skips: as in the unwrapped model, or an error, and never wrong."""

import copy

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.helpers import assert_same, call, train_both
from tests.marks import modes
from tests.skip.layers import Pop, Stash, StashLinear, popping, stashing
from torchgpipe import GPipe
from torchgpipe.skip import pop, skippable


class Change(nn.Module):
    """Change the input in place."""

    def forward(self, x):
        return x.relu_()


@skippable(pop=['a'])
class ChangePopped(nn.Module):
    """Change the popped tensor in place."""

    def forward(self, x):
        a = yield pop('a')
        return x + a.relu_()


@devices
def test_an_inplace_change_of_a_stashed_tensor(devices):
    """The layer that pops sees it, as in the unwrapped model."""
    layers = [nn.Linear(4, 4), Stash(), Change(), nn.Linear(4, 4), Pop()]
    model = nn.Sequential(*layers).double()
    gpipe = GPipe(
        copy.deepcopy(model), [4, 1], devices=devices(2), chunks=2, checkpoint='except_last'
    )
    train_both(model, gpipe, torch.randn(4, 4, dtype=torch.double))


@devices
def test_an_inplace_change_in_another_partition_raises(devices):
    """There the unwrapped model's numbers can't be had: whether it is seen depends on copies."""
    for balance in [[2, 2], [2, 1, 1], [1, 1, 1, 1]]:
        model = nn.Sequential(nn.Linear(4, 4), Stash(), Change(), Pop())
        gpipe = GPipe(
            model, balance, devices=devices(len(balance)), chunks=2, checkpoint='except_last'
        )
        with pytest.raises(RuntimeError, match='skip tensor.*was changed in place'):
            gpipe(torch.rand(4, 4, device=devices.first))
        with (
            pytest.raises(RuntimeError, match='skip tensor.*was changed in place'),
            torch.no_grad(),
        ):
            gpipe(torch.rand(4, 4, device=devices.first))


@devices
@modes
def test_an_inplace_change_after_the_pop_is_fine(devices, mode):
    model = nn.Sequential(nn.Linear(4, 4), Stash(), nn.Identity(), Pop(), Change()).double()
    gpipe = GPipe(
        copy.deepcopy(model), [1, 1, 1, 1, 1], devices=devices(5), chunks=2, checkpoint=mode
    )
    if mode == 'never':
        train_both(model, gpipe, torch.randn(4, 4, dtype=torch.double))
    with torch.no_grad():
        x = torch.randn(4, 4, dtype=torch.double)
        assert_same([call(gpipe, x)], [model(x)])


@devices
@pytest.mark.parametrize('requires_grad', [True, False])
def test_an_inplace_change_of_a_popped_tensor_raises_under_checkpoints(devices, requires_grad):
    def make(mode):
        torch.manual_seed(0)
        change = Pop(lambda x, skip: skip.mul_(2) + x)
        model = nn.Sequential(StashLinear(), nn.Linear(4, 4), change).double()
        model[0].requires_grad_(requires_grad)
        return model, GPipe(
            copy.deepcopy(model), [1, 1, 1], devices=devices(3), chunks=2, checkpoint=mode
        )

    x = torch.randn(4, 4, dtype=torch.double)
    model, gpipe = make('never')
    train_both(model, gpipe, x)
    _, gpipe = make('always')
    with pytest.raises(RuntimeError, match='skip tensor that it popped, was changed in place'):
        call(gpipe, x).sum().backward()


@devices
def test_a_skip_that_shares_its_memory_must_not_be_changed_after_its_pop(devices):
    @skippable(pop=['a'])
    class Swap(nn.Module):
        def forward(self, x):
            return (yield pop('a'))

    first = nn.Linear(4, 4), stashing('a', 'b')()
    # In v0.4.0, the second one was wrong on several accelerators.
    for layers, balance in (
        ((*first, nn.Linear(4, 4), ChangePopped(), popping('b')()), [3, 1, 1]),
        ((*first, Swap(), Change(), popping('b')()), [2, 1, 1, 1]),
        ((nn.Linear(4, 4), stashing('a')(), ChangePopped()), [2, 1]),
    ):
        gpipe = GPipe(nn.Sequential(*layers), balance, devices=devices(len(balance)))
        with pytest.raises(RuntimeError, match='skip tensor .* was changed in place'):
            gpipe(torch.rand(4, 4, device=devices.first))


@devices
def test_an_inplace_first_layer_before_a_stash(devices):
    """Micro-batches are views that count changes together: never wrong, but it may raise."""
    model = nn.Sequential(nn.ReLU(inplace=True), Stash(), nn.Linear(4, 4), Pop()).double()
    x = torch.randn(6, 4, dtype=torch.double)
    for chunks in (1, 3):
        gpipe = GPipe(
            copy.deepcopy(model), [3, 1], devices=devices(2), chunks=chunks, checkpoint='never'
        )
        try:
            assert_same([call(gpipe, x.clone())], [model(x.clone())])
        except RuntimeError as error:
            assert chunks == 3 and 'Use an operation that is not in place' in str(error)
        del gpipe
