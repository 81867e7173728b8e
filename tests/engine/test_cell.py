"""Cells: a value and its tensors, on their way through layers."""

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


def test_in_v030_named_tuples_became_tuples_depending_on_the_batch_size():
    for mode in ['always', 'never']:
        for size in [1, 2, 5]:
            for chunks in [1, 3]:

                class Swap(nn.Module):
                    def forward(self, pair):
                        assert isinstance(pair, Pair)
                        return Pair(pair.y * 2, pair.x)

                class Max(nn.Module):
                    def forward(self, pair):
                        assert isinstance(pair, Pair)
                        return pair.x.max(1)

                x, y = (
                    torch.rand(size, 3, requires_grad=True),
                    torch.rand(size, 3, requires_grad=True),
                )
                for balance in ([2], [1, 1]):
                    devices = [f'cpu:{j}' for j in range(len(balance))]
                    gpipe = GPipe(
                        nn.Sequential(Swap(), Swap()),
                        balance,
                        devices=devices,
                        chunks=chunks,
                        checkpoint=mode,
                    )
                    output = gpipe(Pair(x, y))
                    assert isinstance(output, Pair) and torch.equal(output.x, x * 2)
                    gpipe = GPipe(
                        nn.Sequential(Swap(), Max()),
                        balance,
                        devices=devices,
                        chunks=chunks,
                        checkpoint=mode,
                    )
                    output = gpipe(Pair(x, y))
                    assert torch.equal(output.values, (y * 2).max(1).values)
                    assert type(output) is type(x.max(1))
