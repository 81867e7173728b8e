"""The clock: literal schedules."""
import pytest

from torchgpipe.pipeline import clock_cycles


@pytest.mark.parametrize('m, n, expected', [
    (1, 1, [[(0, 0)]]),
    (1, 3, [[(0, 0)], [(0, 1)], [(0, 2)]]),
    (3, 1, [[(0, 0)], [(1, 0)], [(2, 0)]]),
    (3, 3, [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1), (0, 2)], [(2, 1), (1, 2)], [(2, 2)]]),
    (4, 2, [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(3, 0), (2, 1)], [(3, 1)]])])
def test_clock_cycles(m, n, expected):
    assert list(clock_cycles(m, n)) == expected
