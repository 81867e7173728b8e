"""Links: connections between the first rank of a mesh and each other one, which notice its end.

::

    rank 0 ──── link ──── rank 1      closed: the process has ended, at once
       └─────── link ──── rank 2      timeout: its host, or the network to it, is lost: UNREACHABLE

The kernel keeps a link alive. It answers the probes of the other side, even if a layer holds
Python's lock or the process is stopped. So neither of these looks like a lost host.

Each rank listens at a port, and publishes its addresses and a secret in the store of
``torch.distributed``. The first rank connects to all others, because it can reach the address by
which a rank has reached the store. Afterwards, a link does not need the store.
"""

import json
import os
import secrets
import socket
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from errno import ECONNRESET, EPIPE
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

#: After how many seconds without an answer of its kernel a host is lost.
UNREACHABLE = 50

#: How many seconds a connection to another rank may take, or a call of the store.
_TIMEOUT = 5.0

#: How often to try to connect to a rank. A firewall between hosts may refuse it.
_ATTEMPTS = 3

#: The options of a link in seconds, where the system has them: when probes begin, how far apart
#: they are, how many may be lost, and how long sent data may be without an answer.
_OPTIONS = {
    'TCP_KEEPIDLE': UNREACHABLE // 3,
    'TCP_KEEPALIVE': UNREACHABLE // 3,  # the name in macOS
    'TCP_KEEPINTVL': UNREACHABLE // 6,
    'TCP_KEEPCNT': 4,
    'TCP_USER_TIMEOUT': 1000 * UNREACHABLE,  # in milliseconds
}

#: Errors of a connection whose process has ended, while its host is there.
_ENDED = (ECONNRESET, EPIPE)


class Unreachable(OSError):
    """The host of another rank, or the network to it, is lost."""


#: The connections of this process.
_open: WeakSet[socket.socket] = WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked child, which would keep them open for its parent."""
    for connection in [*_open]:
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


class RankLink:
    """A connection to another rank, for messages that are lists of plain values."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_TIMEOUT)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _OPTIONS.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection = connection
        self._received = b''
        _open.add(connection)

    def fileno(self) -> int:
        """Return the number of the connection, by which a selector waits for it."""
        return self._connection.fileno()

    def send(self, *message: Any) -> None:
        """Send a message. Nothing happens if the link is lost, which its receiver notices."""
        with suppress(OSError):
            self._connection.sendall(json.dumps(message).encode() + b'\n')

    def receive(self) -> list[list[Any]]:
        """Return the messages that have arrived.

        Raises:
            EOFError: The other process has ended.
            Unreachable: Its host, or the network to it, is lost.
        """
        try:
            data = self._connection.recv(1 << 16)
        except OSError as error:
            if error.errno in _ENDED:
                raise EOFError from error
            if error.errno is None:  # Nothing has arrived for `_TIMEOUT`.
                return []
            raise Unreachable(str(error)) from error
        if not data:
            raise EOFError
        *lines, self._received = (self._received + data).split(b'\n')
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close the link."""
        self._connection.close()


#: How many meeting points were made with a default group, by their ranks.
_counts: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()


class MeetingPoint:
    """Where ranks find each other: the store, which has the addresses of all.

    Args:
        ranks: The ranks, the first of which connects to all others. All of them make their
            meeting points in the same order.
        rank: This rank.
    """

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        world: Any = dist.group.WORLD
        store = world.get_group_store()
        count = _counts.setdefault(world, Counter())
        count[tuple(ranks)] += 1
        name = zlib.crc32(repr(ranks).encode())
        # A separate connection, because a client of the store is locked while a call waits.
        self._store = dist.PrefixStore(  # type: ignore[attr-defined]
            f'torchgpipe.links/{name}/{count[tuple(ranks)]}', store.clone()
        )
        self._store.set_timeout(timedelta(seconds=_TIMEOUT))
        self._secret = secrets.token_hex(8).encode()
        self._listener = _listener()
        self._attempts: Counter[int] = Counter()
        addresses = [*_addresses(store)]
        place = addresses, self._listener.getsockname()[1], self._secret.decode()
        self._store.set(str(rank), json.dumps(place))
        #: The host of this rank: an address.
        self.host = addresses[0]

    def fileno(self) -> int:
        """Return the number of the port, by which a selector waits for a connection."""
        return self._listener.fileno()

    def accept(self) -> RankLink | None:
        """Return the link to the first rank, or ``None`` if another process has connected."""
        connection, _ = self._listener.accept()
        with suppress(OSError):
            connection.settimeout(_TIMEOUT)
            if connection.recv(len(self._secret), socket.MSG_WAITALL) == self._secret:
                connection.sendall(self._secret[::-1])
                return RankLink(connection)
        connection.close()
        return None

    def connect(self, rank: int) -> tuple[RankLink, str] | None:
        """Return the link to another rank, and its host; ``None`` if there is no link yet."""
        if self._attempts[rank] >= _ATTEMPTS or not self._store.check([str(rank)]):
            return None
        self._attempts[rank] += 1
        addresses, port, secret = json.loads(self._store.get(str(rank)))
        for address in addresses:
            with suppress(OSError):
                connection = socket.create_connection((address, port), _TIMEOUT)
                connection.sendall(secret.encode())
                # Another process may have this address and port, as seen from here.
                if connection.recv(len(secret), socket.MSG_WAITALL) == secret[::-1].encode():
                    return RankLink(connection), addresses[0]
                connection.close()
        return None

    def close(self) -> None:
        """Close the port."""
        self._listener.close()


def _listener() -> socket.socket:
    """Return a port at which other hosts may connect."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(('', 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(('', 0))


def _addresses(store: Any) -> Iterator[str]:
    """Yield the addresses by which other ranks may reach this one, the most likely one first."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        # The address of the network interface that leads to the store.
        with suppress(OSError), socket.create_connection((store.host, store.port), 5.0) as probe:
            yield probe.getsockname()[0]
        # On the host of the store, that address may be known here only.
        yield store.host
    with suppress(OSError):
        yield socket.gethostbyname(socket.gethostname())
    yield 'localhost'
