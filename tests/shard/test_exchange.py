"""The exchange of facts between ranks."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.shard.processes import run
from torchgpipe.base.devices import CPU
from torchgpipe.distributed.agreement import Facts
from torchgpipe.distributed.starts import StepFacts
from torchgpipe.distributed.steps import LossFacts
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
    with mock.patch.object(exchange_module, 'has_backend', return_value=False):
        results = exchanged(times)
    assert dist.group.WORLD not in exchange_module._nodes
    return results


def test_a_group_without_a_backend_for_the_host_exchanges_on_the_device():
    assert run(2, on_device, 2) == [expected(2, 2)] * 2


def early():
    """Return a number that another rank has sent before the exchange begins."""
    exchanged(1)
    node = exchange_module._nodes[dist.group.WORLD]
    if dist.get_rank() == 1:
        node._send(torch.full((2, WIDTH), 7.0, dtype=torch.float64), 0, dist.group.WORLD)
        node._sends[-1].wait()  # This ends only if the other rank has started to receive.
    dist.barrier()
    if dist.get_rank() == 1:
        return None
    (message,) = node._from_children
    return message.wait()[1, 1].item()


def test_receives_of_the_next_exchange_have_started():
    assert run(2, early, timeout=20) == [7.0, None]


def on_another_default_device():
    """Exchange numbers where new tensors are on the meta device."""
    with torch.device('meta'):
        return exchanged(2)


def test_numbers_are_in_the_memory_of_the_host_whatever_the_default_device():
    assert run(2, on_another_default_device) == [expected(2, 2)] * 2


def interrupted():
    """Return the errors of exchanges after one that was interrupted on the first rank."""
    exchanged(1)
    errors = []
    if dist.get_rank() == 0:
        with mock.patch.object(
            exchange_module._TreeNode, 'exchange', side_effect=KeyboardInterrupt
        ):
            with pytest.raises(KeyboardInterrupt):
                exchanged(1)
        for _ in range(2):
            with pytest.raises(RuntimeError) as info:
                exchanged(1)
            errors.append(str(info.value))
    return errors


def test_after_an_interrupt_a_rank_does_not_exchange_again():
    first, _ = run(2, interrupted)
    assert len(first) == 2
    for error in first:
        assert 'was interrupted or has failed' in error and 'start again' in error


def test_facts_of_steps_fit():
    for facts in (Facts(), StepFacts(), LossFacts()):
        assert 1 + len(facts) <= WIDTH


def test_too_many_numbers_are_an_error_of_the_rank_that_has_them():
    with pytest.raises(ValueError, match='17 numbers, and at most 16'):
        exchange_module._row([0.0] * 17, CPU)


def of_part(times):
    """Exchange numbers between two of three ranks."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return None
    rank = group.rank()
    return [exchange([10.0 * time + rank, rank], group, CPU) for time in range(times)]


def test_a_part_of_the_ranks():
    assert run(3, of_part, 2) == [expected(2, 2), None, expected(2, 2)]


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
