"""How far two tensors are from each other."""

import math

import pytest
import torch

from torchgpipe.base.distance import default_tolerance, distance
from torchgpipe.testing.differences import Difference, Differences

NAN, INF = math.nan, math.inf


def test_distance():
    for actual, expected, typical, result in [
        ([1.0, 2.0], [1.0, 2.0], 0, 0),
        ([1.0, 3.0], [1.0, 2.0], 0, 0.5),
        ([1.0, 3.0], [1.0, 2.0], 10, 0.1),
        ([3.0, -200.0], [1.0, -200.0], 0, 0.01),
        ([1.0, INF, NAN], [1.0, INF, NAN], 0, 0),
        ([1.0, INF, NAN], [2.0, INF, NAN], 0, 0.5),
        ([1.0, NAN], [1.0, 2.0], 0, INF),
        ([1.0, INF], [1.0, 2.0], 0, INF),
        ([INF], [-INF], 0, INF),
        ([2.0], [0.0], 0, 2),
        ([5], [2], 10, 3),
        ([True], [False], 0, 1),
        ([1 + 1j], [1], 0, INF),
        ([3 + 4j], [0j], 10, 0.5),
        ([2**62 + 1], [2**62], 0, 1),
        ([], [], 0, 0),
        ([1.0], [1.0, 1.0], 0, INF),
        ([2], [2.0], 0, INF),
    ]:
        assert distance(torch.tensor(actual), torch.tensor(expected), typical) == pytest.approx(
            result
        )


def test_values_that_are_zero_up_to_rounding_do_not_differ():
    expected = {
        ('gradients', name): torch.tensor([size])
        for name, size in (('a', 1e-4), ('b', 1e-20), ('c', 2e-4))
    }
    actual = {key: x + 1e-19 for key, x in expected.items()}
    comparison = Differences(1e-10)
    comparison.add(0, expected, actual)
    assert comparison.differences == [] and comparison.tensors['gradients'] == 3
    assert 0 < comparison.largest['gradients'] < 1e-10


def test_the_first_difference_of_each_tensor():
    comparison = Differences(1e-10)
    one, two = torch.ones(2), torch.full((2,), 2.0)
    comparison.add(
        0,
        {('buffers', 'a'): one, ('outputs', 'b'): one},
        {('buffers', 'a'): one, ('outputs', 'b'): two},
    )
    comparison.add(
        1,
        {('buffers', 'a'): one, ('outputs', 'b'): one, ('outputs', 'c'): one},
        {('buffers', 'a'): two, ('outputs', 'b'): two * 2, ('buffers', 'd'): one},
    )
    assert comparison.differences == [
        Difference('outputs', 'b', 1, 1),
        Difference('outputs', 'c', 2, INF),
        Difference('buffers', 'd', 2, INF),
        Difference('buffers', 'a', 2, 1),
    ]


def test_tolerances():
    assert default_tolerance(torch.float64) < 4e-11 and default_tolerance(None) > 1e-5
