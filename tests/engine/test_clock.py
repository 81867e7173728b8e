"""The clock: literal schedules."""
import pytest

from torchgpipe.engine.clock import clock_cycles, clocks


@pytest.mark.parametrize('m, n, expected', [
    (1, 1, [[(0, 0)]]),
    (1, 3, [[(0, 0)], [(0, 1)], [(0, 2)]]),
    (3, 1, [[(0, 0)], [(1, 0)], [(2, 0)]]),
    (3, 3, [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1), (0, 2)], [(2, 1), (1, 2)], [(2, 2)]]),
    (4, 2, [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(3, 0), (2, 1)], [(3, 1)]])])
def test_clock_cycles(m, n, expected):
    assert list(clock_cycles(m, n)) == expected


def run(m, *ordered):
    """Give the clocks where some partitions are ordered."""
    return list(clocks(m, len(ordered), lambda j: bool(ordered[j])))


@pytest.mark.parametrize('ordered', [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_where_one_partition_is_ordered_nothing_waits(ordered):
    for m in range(1, 6):
        assert run(m, *ordered) == list(clock_cycles(m, 3))


@pytest.mark.parametrize('ordered', [(1, 1, 1), (1, 0, 1)])
def test_where_the_first_and_the_last_partition_are_it_is_the_order_of_a_plain_run(ordered):
    assert run(4, *ordered) == [[(i, j)] for i in range(4) for j in range(3)]


def test_a_partition_that_is_not_runs_ahead_by_one_micro_batch_at_most():
    assert run(4, 0, 0, 1, 1) == [
        [(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1), (0, 2)], [(3, 0), (2, 1), (0, 3)],
        [(1, 2)], [(3, 1), (1, 3)], [(2, 2)], [(2, 3)], [(3, 2)], [(3, 3)]]


def test_what_becomes_known_in_between_counts_from_then_on():
    ordered = [True, True, True]
    following = clocks(3, 3, ordered.__getitem__)
    assert [next(following) for _ in range(2)] == [[(0, 0)], [(0, 1)]]
    ordered[:2] = [False, False]
    assert list(following) == [[(1, 0), (0, 2)], [(2, 0), (1, 1)], [(2, 1), (1, 2)], [(2, 2)]]
