"""Distances of tensors: relative to their size, and infinite where tensors do not correspond."""

import math

import torch

from torchgpipe.base.distance import apart, close, default_tolerance, split_dim, together


def test_rounding_depends_on_the_type():
    x = torch.ones(3)
    assert close(x * (1 + default_tolerance(torch.float32) / 2), x)
    assert not close(x.double() * (1 + default_tolerance(torch.float32)), x.double())


def test_a_missing_tensor_is_infinitely_apart_and_equal_ones_are_left_out():
    x = torch.ones(2)
    assert apart({'a': x, 'b': x}, {'a': x.clone()}) == {'b': math.inf}


def test_tensors_without_size_are_measured_by_their_kind():
    """A gradient that is zero but for rounding differs in each run, relative to itself."""
    expected = {
        'weight': torch.tensor([8.0]),
        'large': torch.tensor([8.0]),
        'bias': torch.zeros(1),
    }
    assert apart(expected, {**expected, 'bias': torch.tensor([2.0])}) == {'bias': 0.25}


def test_parts_are_joined_along_the_split_dimension_or_summed():
    whole = torch.arange(6.0).view(2, 3)
    assert split_dim(whole, whole.split(1, 1)) == 1
    (joined,) = together(whole, whole.split([1, 2], 1), [1, 2])
    assert joined.equal(whole)
    mean, total = together(torch.tensor(2.0), [torch.tensor(1.0), torch.tensor(4.0)], [2, 1])
    assert mean == 2 and total == 5
    assert split_dim(torch.tensor(2.0), [torch.tensor(1.0)]) is None
    assert together(torch.ones(3), [torch.ones(2), torch.ones(2)], [1, 1]) == []
