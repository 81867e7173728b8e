"""Versions and memories of tensors."""

import torch
from torch import nn

from torchgpipe.base.private import versions
from torchgpipe.base.structure import copy_of, is_among, share_memory, size_of


def test_versions_count_in_place_changes_outside_inference_mode():
    x, y = torch.zeros(2), torch.zeros(2)
    assert versions([x, y]) == [0, 0]
    y[:1].add_(1)
    assert versions([x, y]) == [0, 1]
    with torch.inference_mode():
        z = torch.zeros(2).add_(1)
    assert versions([x, y, z]) == [0, 1, 0]


def test_who_shares_a_memory():
    x, y, sparse = torch.zeros(2), torch.zeros(2), torch.eye(2).to_sparse()
    assert share_memory([y, x], [x[1:]]) and not share_memory([y], [x])
    assert not share_memory([sparse], [x]) and not share_memory([x], [sparse])
    assert not share_memory([sparse], [sparse])


def test_who_is_among_others():
    x, sparse = torch.zeros(2), torch.eye(2).to_sparse()
    assert is_among(x[:], [torch.zeros(2), x]) and not is_among(x[1:], [x])
    assert not is_among(x, [sparse]) and not is_among(sparse, [x, sparse])


def test_sizes():
    x = torch.eye(4)
    assert size_of(x) == 4 * 16
    assert size_of(x.to_sparse()) == 4 * 4 + 2 * 8 * 4


def test_copies():
    for make in [
        lambda: torch.rand(6),
        lambda: torch.rand(2, 3).t(),
        lambda: torch.rand(8)[2:],
        lambda: torch.rand(3, 1).expand(3, 4),
        lambda: torch.eye(3).to_sparse(),
        lambda: nn.Parameter(torch.rand(3)),
        lambda: torch.rand(0),
    ]:
        x = make()
        copy = copy_of(x, {})
        assert torch.equal(copy.to_dense(), x.to_dense()) and not copy.requires_grad, make
        assert not share_memory([x], [copy]) and copy.stride() == x.stride() or x.is_sparse, make


def test_copies_of_tensors_that_share_a_memory_share_one():
    x, memories = torch.rand(4, 2), {}
    for views in ([x, x[1:], x.t()], [x[1:], x, x[0]]):
        copies = [copy_of(view, memories) for view in views]
        copies[0].mul_(2)
        assert all(map(torch.equal, copies[1:], [copy_of(view, memories) for view in views[1:]]))
        assert share_memory(copies[:1], copies[1:]) and not share_memory(copies, [x])
