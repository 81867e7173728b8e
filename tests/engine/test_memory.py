"""Versions and memories of tensors."""
import torch

from torchgpipe.engine.memory import is_among, share_memory, size_of, versions


def test_versions_count_changes_in_place_but_for_those_in_inference_mode():
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
