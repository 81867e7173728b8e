"""Two hosts: a lost host is noticed and named on both sides, and a busy one is not lost."""

import random
import signal
import time
from pathlib import Path

import pytest

from benchmarks.harness.hosts import Network, why_not
from tests.distributed.hosts import ends, ranks, wait_for

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name('train_on_hosts.py')

#: After how many seconds a host is lost, in these tests.
UNREACHABLE = 6

#: The names of the ranks of each host.
NAMES = [
    ['rank 0 (data 0, pipe 0, tensor 0)', 'rank 1 (data 0, pipe 1, tensor 0)'],
    ['rank 2 (data 1, pipe 0, tensor 0)', 'rank 3 (data 1, pipe 1, tensor 0)'],
]


@pytest.fixture
def network():
    """Two hosts."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Network() as network:
        yield network


@pytest.mark.parametrize('host', [0, 1])
def test_both_sides_of_a_cut_link_end_and_name_the_ranks_of_the_other_host(
    network, tmp_path, host
):
    """The first host also has the store."""
    with ranks(network, tmp_path, PROGRAM, UNREACHABLE, 10**9, 0) as processes:
        wait_for([tmp_path / f'{rank}.runs' for rank in range(4)])
        time.sleep(random.uniform(0, 0.5))
        network.cut(host)
        statuses = ends(processes)
    for rank in range(4):
        output = (tmp_path / f'{rank}.txt').read_text()
        assert statuses[rank], (rank, output)
        lost = ', '.join(NAMES[1 - rank // 2])
        assert f'as {lost} cannot be reached: their host 10.77.0.' in output, (rank, output)


def test_a_host_whose_processes_are_killed_is_named(network, tmp_path):
    with ranks(network, tmp_path, PROGRAM, UNREACHABLE, 10**9, 0) as processes:
        wait_for([tmp_path / f'{rank}.runs' for rank in range(4)])
        for process in processes[2:]:
            process.send_signal(signal.SIGKILL)
        statuses = ends(processes)
    for rank in (0, 1):
        output = (tmp_path / f'{rank}.txt').read_text()
        assert statuses[rank], (rank, output)
        assert any(f'{name} is gone' in output for name in NAMES[1]), (rank, output)


def test_a_layer_that_holds_pythons_lock_for_longer_is_not_a_lost_host(network, tmp_path):
    with ranks(network, tmp_path, PROGRAM, UNREACHABLE, 8, 2 * UNREACHABLE) as processes:
        statuses = ends(processes)
    for rank in range(4):
        assert statuses[rank] == 0, (tmp_path / f'{rank}.txt').read_text()
        assert (tmp_path / f'{rank}.done').exists()
