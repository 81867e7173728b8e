"""The exact min-max partition where not every block fits on every device."""
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgpipe.balance.bounded import solve_bounded


def brute_force(sequence, furthest):
    """Return the least bound, or None."""
    best = None
    for cut in itertools.combinations(range(1, len(sequence)), len(furthest) - 1):
        edge = (0, *cut, len(sequence))
        if all(b <= limits[a] for limits, a, b in zip(furthest, edge, edge[1:])):
            bound = max(sum(sequence[a:b]) for a, b in zip(edge, edge[1:]))
            best = bound if best is None else min(best, bound)
    return best


@st.composite
def cases(draw):
    """Draw costs and, for each device, how far a block can reach from each start."""
    sequence = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    number = len(sequence)
    partitions = draw(st.integers(1, number))
    furthest = [[draw(st.integers(a, number)) for a in range(number)] for _ in range(partitions)]
    return sequence, furthest


@pytest.mark.slow
@settings(max_examples=1000, deadline=None, derandomize=True)
@given(cases())
def test_against_brute_force(case):
    sequence, furthest = case
    lengths = solve_bounded(sequence, furthest)
    expected = brute_force(sequence, furthest)
    assert (lengths is None) == (expected is None)
    if lengths is not None:
        edge = [0, *itertools.accumulate(lengths)]
        assert all(a < b <= limits[a] for limits, a, b in zip(furthest, edge, edge[1:]))
        assert edge[-1] == len(sequence) and len(lengths) == len(furthest)
        assert max(sum(sequence[a:b]) for a, b in zip(edge, edge[1:])) == expected


def test_rather_even():
    assert solve_bounded([1] * 7, [[7] * 7] * 3) in ([3, 2, 2], [2, 3, 2], [2, 2, 3])
    assert solve_bounded([5, 0, 0, 0, 0, 5], [[6] * 6] * 2) is not None
