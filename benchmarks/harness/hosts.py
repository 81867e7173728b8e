"""Hosts in one: network namespaces with a switch between them, whose links are slow, or are cut.

::

    host 0    ranks ── net ══ rate ══ port0 ──┐
                                              ├── switch
    host 1    ranks ── net ══ rate ══ port1 ──┘

A link has the rate in each direction. This takes Linux, the right to make namespaces, which
root has, and ``ip`` and ``tc`` of iproute2.
"""

import ctypes
import itertools
import os
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

#: The interface of a host.
INTERFACE = 'net'

#: The most bytes that leave a host at once, after a pause. With more, small messages would be
#: free. With less, the kernel's timers would limit fast links.
BURST = '16kb'

#: A packet that would wait longer for its turn is dropped, in the notation of ``tc``.
LONGEST_WAIT = '2s'

_number = itertools.count()


def ip(*words: str) -> None:
    """Run a command of iproute2.

    Raises:
        OSError: There is no iproute2.
        subprocess.CalledProcessError: The command has failed.
    """
    subprocess.run(['ip', *words], check=True, capture_output=True, text=True)


class Network:
    """Two hosts and a switch, as a context.

    Args:
        rate: Of each link, in the notation of ``tc``, such as ``'100mbit'``; ``None`` for no
            limit.

    Raises:
        OSError: There is no iproute2.
        subprocess.CalledProcessError: A command of it has failed.
    """

    def __init__(self, rate: str | None = None) -> None:
        name = f'tg{os.getpid()}x{next(_number)}'
        self.hosts = [f'{name}a', f'{name}b']
        self._switch = f'{name}s'
        self._rate = rate

    def __enter__(self) -> 'Network':
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for namespace in (*self.hosts, self._switch):
            subprocess.run(['ip', 'netns', 'del', namespace], capture_output=True)

    def cut(self, host: int) -> None:
        """Cut the link of a host: packets are lost, and no interface says so."""
        ip('-n', self._switch, 'link', 'set', f'port{host}', 'nomaster')

    def _make(self) -> None:
        for namespace in (*self.hosts, self._switch):
            ip('netns', 'add', namespace)
        ip('-n', self._switch, 'link', 'add', 'switch', 'type', 'bridge')
        ip('-n', self._switch, 'link', 'set', 'switch', 'up')
        for k, host in enumerate(self.hosts):
            port = f'port{k}'
            ip('-n', host, 'link', 'add', INTERFACE, 'type', 'veth', 'peer', 'name', port)
            ip('-n', host, 'link', 'set', port, 'netns', self._switch)
            ip('-n', self._switch, 'link', 'set', port, 'master', 'switch')
            ip('-n', self._switch, 'link', 'set', port, 'up')
            ip('-n', host, 'addr', 'add', f'10.77.0.{k + 1}/24', 'dev', INTERFACE)
            ip('-n', host, 'link', 'set', INTERFACE, 'up')
            ip('-n', host, 'link', 'set', 'lo', 'up')
            if self._rate is not None:
                self._limit(host, self._rate)

    def _limit(self, host: str, rate: str) -> None:
        """Limit the rate at which a host sends."""
        command = f'tc -n {host} qdisc add dev {INTERFACE} root tbf rate {rate}'
        command += f' burst {BURST} latency {LONGEST_WAIT}'
        subprocess.run(command.split(), check=True, capture_output=True, text=True)


def on_hosts(hosts: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of processes that have a network and a core for each host.

    Args:
        hosts: The host of each rank.
    """
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    return {
        'cores': [numbers[host] for host in hosts],
        'prepare': [partial(enter, host) for host in hosts],
    }


def why_not() -> str | None:
    """Return why this process cannot make a :class:`Network`; ``None`` if it can."""
    try:
        with Network('1gbit'):
            return None
    except OSError as error:
        return f'it takes ip and tc of iproute2: {error}'
    except subprocess.CalledProcessError as error:
        return f'no network namespaces with a slow link can be made here: {error.stderr.strip()}'


def enter(host: str) -> None:
    """Let this process use the network of a host, in this thread and in later ones.

    Raises:
        OSError: The system refuses it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with Path('/run/netns', host).open() as namespace:
        if libc.setns(namespace.fileno(), 0):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), host)
    os.environ['GLOO_SOCKET_IFNAME'] = INTERFACE
