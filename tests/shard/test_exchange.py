"""The exchange of facts between ranks."""

import pytest
import torch
import torch.distributed as dist

from tests.shard.processes import run
from torchgpipe.base.devices import CPU
from torchgpipe.shard import exchange as exchange_module
from torchgpipe.shard.exchange import WIDTH, exchange


def exchanged(times, fan=None):
    """Exchange other numbers several times; return the rows of each time."""
    if fan is not None:
        exchange_module.FAN = fan
    rank = dist.get_rank()
    results = []
    for time in range(times):
        results.append(exchange([10.0 * time + rank, rank], dist.group.WORLD, CPU))
    return results


def expected(world, times):
    """Return the rows of each time."""
    rows = []
    for time in range(times):
        rows.append([[10.0 * time + rank, rank] + [0.0] * (WIDTH - 2) for rank in range(world)])
    return rows


@pytest.mark.parametrize('world, fan', [(2, None), (4, None), (4, 1), (4, 2), (5, 3)])
def test_all_ranks_get_the_numbers_of_all_ranks(world, fan):
    assert run(world, exchanged, 3, fan) == [expected(world, 3)] * world


def not_finite():
    """Exchange numbers that are not finite."""
    rank = dist.get_rank()
    numbers = [float('nan') if rank else float('inf'), 2.0**53 - 1]
    return [row[:2] for row in exchange(numbers, dist.group.WORLD, CPU)]


def test_numbers_that_are_not_finite_stay_in_their_rows():
    for rows in run(3, not_finite):
        assert rows[0] == [float('inf'), 2.0**53 - 1]
        for number, largest in rows[1:]:
            assert number != number
            assert largest == 2.0**53 - 1


def on_device(times):
    """Exchange numbers in a group without a backend for the host."""
    exchange_module._has_host_backend = lambda group: False
    return exchanged(times)


def test_a_group_without_a_backend_for_the_host_exchanges_on_the_device():
    assert run(2, on_device, 2) == [expected(2, 2)] * 2


def answers(times):
    """Return whether the receives of the next exchange were there before it began."""
    exchanged(times)
    place = exchange_module._places[dist.group.WORLD]
    if dist.get_rank() == 0:
        dist.barrier()
        # The other rank has sent its row, so it arrives without anything that this rank does.
        (message,) = place._from_children
        return message.wait()[1, 1].item()
    exchange_module._Place._start_receives = lambda self, group: None
    place._send(torch.full((2, WIDTH), 7.0, dtype=torch.float64), 0, dist.group.WORLD)
    dist.barrier()
    return None


def test_receives_of_the_next_exchange_have_started():
    assert run(2, answers, 1) == [7.0, None]


def two_groups(times):
    """Exchange numbers in two groups in turn."""
    other = dist.new_group([0, 1])
    results = []
    for _ in range(times):
        for group in (dist.group.WORLD, other):
            number = dist.get_rank() + (100.0 if group is other else 0.0)
            results.append([row[0] for row in exchange([number], group, CPU)])
    return results


def test_groups_of_the_same_ranks_do_not_mix_their_numbers():
    assert run(2, two_groups, 2) == [[[0.0, 1.0], [100.0, 101.0]] * 2] * 2
