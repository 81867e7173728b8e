"""Cells: a value and its tensors, on their way through layers."""

from itertools import product
from typing import NamedTuple

import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.engine.backward_order import find_grad


def test_the_cpu_comes_last_among_tensors_that_require_grad():
    constant, here = torch.ones(1), torch.ones(1, requires_grad=True)
    elsewhere = torch.ones(1, device='meta', requires_grad=True)
    assert find_grad([here]) == 0 and find_grad([constant]) is None
    assert find_grad([constant, here, here]) == 1
    assert find_grad([constant, here, elsewhere, elsewhere]) == 2


class Pair(NamedTuple):
    """A named tuple."""

    x: torch.Tensor
    y: torch.Tensor


class Swap(nn.Module):
    """Swap the parts of a named tuple."""

    def forward(self, pair):
        assert isinstance(pair, Pair)
        return Pair(pair.y * 2, pair.x)


class Max(nn.Module):
    """Return a named tuple of PyTorch's."""

    def forward(self, pair):
        assert isinstance(pair, Pair)
        return pair.x.max(1)


def test_in_v030_named_tuples_became_tuples_depending_on_the_batch_size():
    balances = [[2], [1, 1]]
    for mode, size, chunks, balance in product(['always', 'never'], [1, 2, 5], [1, 3], balances):
        x, y = torch.rand(size, 3, requires_grad=True), torch.rand(size, 3, requires_grad=True)
        devices = [f'cpu:{j}' for j in range(len(balance))]
        options = {'devices': devices, 'chunks': chunks, 'checkpoint': mode}

        swapped = GPipe(nn.Sequential(Swap(), Swap()), balance, **options)(Pair(x, y))
        assert isinstance(swapped, Pair) and torch.equal(swapped.x, x * 2)

        largest = GPipe(nn.Sequential(Swap(), Max()), balance, **options)(Pair(x, y))
        assert type(largest) is type(x.max(1))
        assert torch.equal(largest.values, (y * 2).max(1).values)
