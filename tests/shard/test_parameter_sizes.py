"""How a size is cut."""

from itertools import product

import pytest
import torch

import torchgpipe.shard as ts
from torchgpipe.shard.parameter import lengths, shard


def test_parts_follow_torch_chunk():
    for n, size in [*product(range(1, 7), range(12))]:
        x = torch.arange(size)
        pieces = ts.slice(x, n)
        assert len(pieces) == n and torch.cat(pieces).equal(x)
        chunks = x.chunk(n) if size else ()
        assert [piece.tolist() for piece in pieces] == [
            *map(torch.Tensor.tolist, chunks),
            *[[]] * (n - len(chunks)),
        ]
        for rank, piece in enumerate(pieces):
            begin, length = shard(size, n, rank)
            assert piece.equal(x[begin : begin + length])
        assert lengths(size, n) == [len(piece) for piece in pieces]


def test_the_last_dimension_is_cut_unless_another_is_named():
    x = torch.arange(12.0).view(3, 4)
    assert [tuple(piece.shape) for piece in ts.slice(x, 2)] == [(3, 2), (3, 2)]
    assert [tuple(piece.shape) for piece in ts.slice(x, 2, 0)] == [(2, 4), (1, 4)]
    assert [tuple(piece.shape) for piece in ts.slice(x, 2, -2)] == [(2, 4), (1, 4)]


def test_parts_are_views_unless_they_have_to_be_contiguous():
    x = torch.arange(12.0).view(3, 4)
    view, copied = ts.slice(x, 2)[1], ts.slice(x, 2, contiguous=True)[1]
    assert view.equal(copied) and copied.is_contiguous()
    x.zero_()
    assert view.sum() == 0 < copied.sum()


def test_there_is_at_least_one_part():
    with pytest.raises(ValueError, match='not 0'):
        ts.slice(torch.zeros(2), 0)
