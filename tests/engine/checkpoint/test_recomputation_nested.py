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
def test_a_layer_makes_them_that_is_kept_out_of_recomputation(devices):
    for balance in [[5], [1, 4], [2, 3]]:
        train(layers(no_recompute(Nest(torch.jagged))), balance, devices, 'except_last')


@cpus
@pytest.mark.parametrize('layout', [torch.jagged, torch.strided])
def test_without_a_checkpoint(layout, devices):
    train(layers(Nest(layout)), [2, 3], devices, 'never')


@cpus
@pytest.mark.parametrize('balance', [[1, 4], [2, 3]])
def test_they_come_from_a_partition_without_a_checkpoint(balance, devices):
    train(layers(Nest(torch.jagged)), balance, devices, ['never', 'always'])


@cpus
def test_a_partition_that_only_makes_them(devices):
    """Its recomputation has another ragged size, which is not used."""
    train(layers(Nest(torch.jagged)), [1, 4], devices, 'always')


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
