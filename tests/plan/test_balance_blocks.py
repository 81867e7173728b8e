"""The exact min-max partition, ties as evenly as possible, also with limits of blocks."""

import itertools
import random

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgpipe.plan import balance


def key(blocks):
    """Return the values to minimize, in order of priority."""
    sums = [sum(block) for block in blocks]
    return (max(sums), sum(total**2 for total in sums), sum(len(block) ** 2 for block in blocks))


def brute_force(sequence, partitions, furthest=None):
    """Rate the best of all partitions, if there is one."""
    cuts = itertools.combinations(range(1, len(sequence)), partitions - 1)
    edges = [(0, *cut, len(sequence)) for cut in cuts]
    return min(
        (
            key([sequence[a:b] for a, b in zip(edge, edge[1:])])
            for edge in edges
            if furthest is None or fits(edge, furthest)
        ),
        default=None,
    )


def fits(edge, furthest):
    """Return whether blocks keep their limits."""
    return all(a < b <= limits[a] for limits, a, b in zip(furthest, edge, edge[1:]))


def check(sequence, partitions):
    """Compare with brute force."""
    blocks = balance.solve(sequence, partitions)
    assert len(blocks) == partitions and all(blocks) and sum(blocks, []) == list(sequence)
    assert key(blocks) == brute_force(sequence, partitions)


def test_all_small_cases():
    for length in range(1, 6):
        for sequence in itertools.product(range(4), repeat=length):
            for partitions in range(1, length + 1):
                check(list(sequence), partitions)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 40) | st.sampled_from([0, 1, 1000]), min_size=1, max_size=11),
    st.integers(1, 11),
)
def test_larger_cases(sequence, partitions):
    check(sequence, min(partitions, len(sequence)))


def test_floats_are_exact():
    sequence = [0.1, 0.2, 0.3, 1e-300, 0.3, 0.2, 0.1, 1e300, 5e-324]
    for partitions in range(1, 10):
        scaled = balance.integers(sequence)
        lengths = [len(block) for block in balance.solve(sequence, partitions)]
        assert lengths == [len(block) for block in balance.solve(scaled, partitions)]
        assert key(balance.solve(scaled, partitions)) == brute_force(scaled, partitions)


def test_even_ties():
    for sequence, partitions, expected in [
        ([1, 2, 3, 4, 5, 6], 2, [4, 2]),
        ([0, 0], 2, [1, 1]),
        ([0] * 8, 2, [4, 4]),
        ([5, 0, 0, 0, 0, 5], 2, [3, 3]),
        ([1] * 6, 4, None),
        ([9, 1, 1, 1, 1, 1, 1], 4, [1, 2, 2, 2]),
    ]:
        lengths = [len(block) for block in balance.solve(sequence, partitions)]
        assert lengths == expected or (expected is None and sorted(lengths) == [1, 1, 2, 2])


def test_many_layers():
    chance = random.Random(0)
    for sequence in (
        [chance.random() for _ in range(1_000)],
        [1] * 1_000,
        [0] * 1_000,
        [1] * 500 + [10**6] + [1] * 499,
    ):
        blocks = balance.solve(sequence, 16)
        assert len(blocks) == 16 and sum(map(len, blocks)) == 1_000
        assert max(map(sum, blocks)) <= sum(sequence) / 16 + max(sequence)


def test_numbers_of_numpy_and_pytorch():
    sequence = [numpy.int64(1000), 0.001, numpy.float32(0.5), torch.tensor(2.0)]
    assert balance.integers(sequence)[0] > 0
    assert [len(x) for x in balance.solve(sequence, 2)] == [1, 3]


def test_bad_input():
    for sequence, partitions, message in [
        ([1], 0, 'positive'),
        ([1], -1, 'positive'),
        ([1], 2, '1 layers.*2 partitions'),
        ([], 1, '0 layers'),
        ([1, -1], 1, 'item 1 is -1'),
        ([float('nan')], 1, 'item 0 is nan'),
        ([1, float('inf')], 1, 'item 1 is inf'),
    ]:
        with pytest.raises(ValueError, match=message):
            balance.solve(sequence, partitions)


@st.composite
def limited(draw):
    """Draw costs and, for each device, how far a block can reach from each start."""
    sequence = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    number = len(sequence)
    partitions = draw(st.integers(1, number))
    furthest = [[draw(st.integers(a, number)) for a in range(number)] for _ in range(partitions)]
    return sequence, furthest


@pytest.mark.parametrize('ascending', [False, True])
@settings(max_examples=200, deadline=None, derandomize=True)
@given(limited())
def test_limits_of_blocks(ascending, case):
    """Where no limit is below an earlier start's limit, ties are as even as without limits."""
    sequence, furthest = case
    if ascending:
        furthest = [[*itertools.accumulate(limits, max)] for limits in furthest]
    lengths = balance.bounded_cuts(sequence, range(len(sequence) + 1), furthest)
    expected = brute_force(sequence, len(furthest), furthest)
    assert (lengths is None) == (expected is None)
    if lengths is not None:
        edge = [0, *itertools.accumulate(lengths)]
        assert edge[-1] == len(sequence) and len(lengths) == len(furthest)
        assert fits(edge, furthest)
        found = key([sequence[a:b] for a, b in zip(edge, edge[1:])])
        assert found == expected if ascending else found[0] == expected[0]
