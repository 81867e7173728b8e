"""Nested tensors between layers: as without checkpoints, or refused with a way out."""

import copy

import pytest
import torch
from torch import nn

from tests.devices import cpus
from tests.helpers import train_both
from torchgpipe import GPipe, is_recomputing, no_recompute

pytestmark = [
    pytest.mark.filterwarnings('ignore:The PyTorch API of nested tensors'),
]

SIZES = 1, 3, 2


class Nest(nn.Module):
    """Return samples of several lengths."""

    def __init__(self, layout):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.layout = layout

    def forward(self, x):
        rows = [sample[: SIZES[k % 3]] for k, sample in enumerate(self.linear(x))]
        return torch.nested.as_nested_tensor(rows, layout=self.layout)


class Pad(nn.Module):
    """Pad them."""

    def forward(self, x):
        return torch.nested.to_padded_tensor(x, 0.0)


def layers(first):
    """Return layers with nested tensors between them."""
    return nn.Sequential(first, nn.Linear(4, 4), nn.ReLU(), Pad(), nn.Linear(4, 2)).double()


def train(model, balance, devices, mode):
    """Train both."""
    gpipe = GPipe(
        copy.deepcopy(model), balance, devices=devices(len(balance)), chunks=2, checkpoint=mode
    )
    train_both(model, gpipe, torch.rand(6, 3, 4, dtype=torch.double))


@cpus
def test_they_train_as_without_a_pipeline(devices):
    """A recomputation that only makes them has another ragged size, which is not used."""
    for balance, mode, layer in [
        ([5], 'except_last', no_recompute(Nest(torch.jagged))),
        ([1, 4], 'except_last', no_recompute(Nest(torch.jagged))),
        ([2, 3], 'except_last', no_recompute(Nest(torch.jagged))),
        ([2, 3], 'never', Nest(torch.jagged)),
        ([2, 3], 'never', Nest(torch.strided)),
        ([1, 4], ['never', 'always'], Nest(torch.jagged)),
        ([2, 3], ['never', 'always'], Nest(torch.jagged)),
        ([1, 4], 'always', Nest(torch.jagged)),
    ]:
        train(layers(layer), balance, devices, mode)


@cpus
def test_others_are_refused_with_a_way_out(devices):
    """In v0.4.0 it was "Internal error: NestedTensorImpl doesn't support sizes", or worse."""
    for balance, mode, layer in [
        ([5], 'always', Nest(torch.jagged)),
        ([2, 3], 'always', Nest(torch.jagged)),
        ([1, 4], 'always', Nest(torch.strided)),
        ([2, 3], 'always', Nest(torch.strided)),
        ([5], 'always', Nest(torch.strided)),
        ([1, 4], ['never', 'always'], Nest(torch.strided)),
        ([5], 'always', no_recompute(Nest(torch.strided))),
    ]:
        with pytest.raises(RuntimeError, match="no_recompute.*jagged; or use checkpoint='never'"):
            train(layers(layer), balance, devices, mode)


@cpus
def test_other_values_in_a_recomputation_are_found(devices):
    class Change(Nest):
        def forward(self, x):
            return super().forward(x * 2 if is_recomputing() else x)

    with pytest.raises(RuntimeError, match='took another path .* other values'):
        train(layers(Change(torch.jagged)), [1, 4], devices, 'always')
