"""Balances by size, of memory only."""

import torch
from torch import nn

from torchgpipe.balance import balance_by_size


class Expand(nn.Module):
    """Make a number of leaves as large as the input."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        for _ in range(self.number):
            x = x + torch.rand_like(x, requires_grad=True)
        return x


def test_balance_by_size():
    x = torch.rand(10, 100, 100)
    for numbers, expected in (([1, 2, 3, 4, 5, 6], [4, 2]), ([6, 5, 4, 3, 2, 1], [2, 4])):
        model = nn.Sequential(*[Expand(number) for number in numbers])
        assert balance_by_size(2, model, x, device='cpu') == expected
    growing = nn.Sequential(*[nn.Linear(k + 1, k + 2) for k in range(6)])
    assert balance_by_size(2, growing, torch.rand(7, 1), param_scale=100, device='cpu') == [4, 2]
    shrinking = nn.Sequential(*[nn.Linear(k + 2, k + 1) for k in reversed(range(6))])
    assert balance_by_size(2, shrinking, torch.rand(1, 7), param_scale=100, device='cpu') == [2, 4]


def test_balance_by_size_takes_a_micro_batch():
    model = nn.Sequential(nn.Linear(64, 64), *[nn.Sigmoid() for _ in range(15)])
    x = torch.rand(64, 64)
    assert balance_by_size(2, model, x, device='cpu', param_scale=0)[0] >= 8
    assert balance_by_size(2, model, x, device='cpu', chunks=64)[0] < 4


def test_balance_by_size_on_meta_takes_no_memory():
    model = nn.Sequential(*[nn.Linear(1 << 17, 1 << 17, device='meta') for _ in range(4)])
    x = torch.rand(1, 1 << 17, device='meta')
    assert balance_by_size(2, model, x, device='meta') == [2, 2]
