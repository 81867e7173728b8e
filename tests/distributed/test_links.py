"""Links between ranks: messages, ends of processes, and processes that only look like a rank."""

import json
import multiprocessing
import os
import socket

import pytest
import torch.distributed as dist

from tests.shard.processes import run
from torchgpipe.distributed.links import MeetingPoint, RankLink, Unreachable


@pytest.fixture
def pair():
    """Return a function that returns two linked ends, which are closed after the test."""
    connections = []

    def make():
        with socket.create_server(('localhost', 0)) as server:
            connections.append(socket.create_connection(server.getsockname()))
            connections.append(server.accept()[0])
        return [RankLink(connection) for connection in connections[-2:]]

    yield make
    for connection in connections:
        connection.close()


def test_messages_arrive_in_order_whatever_the_parts_they_come_in(pair):
    one, other = pair()
    one.send('failure', 1, 'é\n' * 40_000)
    one.send('left', 3)
    messages = []
    while len(messages) < 2:
        messages += other.receive()
    assert messages == [['failure', 1, 'é\n' * 40_000], ['left', 3]]


def test_a_closed_link_is_the_end_of_the_other_process(pair):
    one, other = pair()
    one.close()
    with pytest.raises(EOFError):
        other.receive()
    other.send('left', 3)  # Nothing happens.


def test_a_reset_is_the_end_of_the_process_and_a_timeout_the_loss_of_its_host(pair):
    for error, expected in (
        (ConnectionResetError(104, 'reset'), EOFError),
        (TimeoutError(110, 'timed out'), Unreachable),
        (OSError(113, 'no route to host'), Unreachable),
    ):

        class Broken:
            def recv(self, size, error=error):
                raise error

        one, other = pair()
        other._connection = Broken()
        with pytest.raises(expected):
            other.receive()


def test_a_link_without_data_has_no_messages(pair):
    one, other = pair()
    other._connection.settimeout(0.01)
    assert other.receive() == []


def test_a_forked_child_does_not_keep_a_link_open(pair):
    """In v0.28.0 there were no links; a worker of a data loader is such a child."""
    one, other = pair()
    context = multiprocessing.get_context('fork')
    released = context.Event()
    child = context.Process(target=released.wait)
    child.start()
    one.close()
    other._connection.settimeout(5)
    try:
        with pytest.raises(EOFError):
            other.receive()
    finally:
        released.set()
        child.join()


def met(strangers):
    """RankLink two ranks. On the second one, other processes connect first."""
    rank = dist.get_rank()
    point = MeetingPoint([0, 1], rank)
    if rank:
        for data in strangers:
            address = 'localhost', point._listener.getsockname()[1]
            with socket.create_connection(address) as stranger:
                stranger.sendall(data)
                stranger.shutdown(socket.SHUT_WR)
                assert point.accept() is None
        dist.barrier()
        link = point.accept()
        link.send('left', 7)
        return [], link.receive()
    dist.barrier()
    assert point.connect(5) is None  # It has not come.
    link, host = point.connect(1)
    messages = link.receive()
    link.send('hosts', {0: host})
    return host, messages


def test_ranks_meet_and_strangers_are_turned_away():
    (host, left), (_, hosts) = run(2, met, [b'', b'x' * 16, b'GET / HTTP/1.1'])
    assert left == [['left', 7]] and hosts == [['hosts', {'0': host}]]


def misled():
    """Publish the port of another program; then the own one."""
    rank = dist.get_rank()
    point = MeetingPoint([0, 1], rank)
    if rank:
        with socket.create_server(('localhost', 0)) as server:
            place = json.loads(point._store.get('1'))
            place[1] = server.getsockname()[1]
            point._store.set('1', json.dumps(place))
            dist.barrier()
            for _ in range(4):
                server.settimeout(1)
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    break
                connection.sendall(b'something else..')
                connection.close()
        dist.barrier()
        return None
    dist.barrier()
    links = [point.connect(1) for _ in range(5)]
    dist.barrier()
    return links, point._attempts[1]


def test_a_program_at_the_same_port_is_no_rank_and_attempts_end():
    (links, attempts), _ = run(2, misled)
    assert links == [None] * 5 and attempts == 3


def test_links_are_closed_in_a_child_and_not_in_its_parent(pair):
    one, other = pair()
    child = os.fork()
    if not child:
        os._exit(0 if one.fileno() == -1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    one.send('left', 1)
    assert other.receive() == [['left', 1]]
