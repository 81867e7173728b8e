"""Hosts in one: their links have the rate that is asked for, in both directions at once."""

import subprocess
import time

import pytest
import torch
from torch import distributed

from benchmarks.harness import hosts
from benchmarks.harness.hosts import Network, why_not
from torchgpipe.trainer import processes

#: Bytes of a message, and how many of them there are.
SIZE, NUMBER = 2**18, 4


class Exchanges:
    """A worker that sends messages to the other one, and receives as many."""

    def seconds(self, both_ways):
        rank = distributed.get_rank()
        sent = torch.ones(SIZE, dtype=torch.uint8)
        received = torch.empty_like(sent)
        distributed.barrier()
        start = time.perf_counter()
        for _ in range(NUMBER):
            works = []
            if both_ways or rank == 0:
                works.append(distributed.isend(sent, 1 - rank))
            if both_ways or rank == 1:
                works.append(distributed.irecv(received, 1 - rank))
            for work in works:
                work.wait()
        return time.perf_counter() - start


@pytest.fixture
def allowed():
    """Skip the test if this process cannot make hosts."""
    reason = why_not()
    if reason or not processes.is_available():
        pytest.skip(reason or 'needs gloo')


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize('both_ways', [False, True])
def test_a_message_takes_the_time_that_its_bytes_take_on_the_link(allowed, both_ways):
    """Less than this would be a link without a limit; the rest of a burst is free."""
    with (
        Network('20mbit') as network,
        processes.Processes(2, Exchanges, **hosts.on_hosts(network.hosts)) as ranks,
    ):
        seconds = max(ranks.call('seconds', both_ways))
    assert seconds > 0.9 * (NUMBER * SIZE - 2**17) * 8 / 20e6


@pytest.mark.slow
def test_no_host_is_left_after_a_network_that_could_not_be_made(allowed):
    network = Network('as fast as it can')
    with pytest.raises(subprocess.CalledProcessError), network:
        pass
    names = subprocess.run(['ip', 'netns', 'list'], capture_output=True, text=True).stdout
    assert not set(network.hosts) & set(names.split())


def test_a_process_without_iproute2_is_told_so(monkeypatch):
    monkeypatch.setenv('PATH', '')
    assert 'iproute2' in why_not()


def test_a_process_without_the_right_is_told_so(monkeypatch):
    def refuse(command, **options):
        raise subprocess.CalledProcessError(1, command, stderr='Operation not permitted\n')

    monkeypatch.setattr(hosts.subprocess, 'run', refuse)
    monkeypatch.setattr(Network, '__exit__', lambda *_: None)
    assert why_not() == (
        'no network namespaces with a slow link can be made here: Operation not permitted'
    )


def test_an_unknown_host_is_an_error_that_names_it():
    with pytest.raises(OSError, match='no-such-host'):
        hosts.enter('no-such-host')


def test_ranks_of_a_host_share_its_core():
    options = hosts.on_hosts(['b', 'a', 'b', 'a'])
    assert options['cores'] == [0, 1, 0, 1]
    assert [function.args for function in options['prepare']] == [('b',), ('a',), ('b',), ('a',)]
