"""Two hosts in one: network namespaces with a switch between them, whose links can be cut."""

import itertools
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
_number = itertools.count()


def ip(*words):
    """Run a command of iproute2."""
    subprocess.run(['ip', *words], check=True, capture_output=True)


def can_make_hosts():
    """Return whether this process may make network namespaces with a bridge."""
    if shutil.which('ip') is None:
        return False
    try:
        with Network():
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


class Network:
    """Two hosts and a switch."""

    def __init__(self):
        self.name = f'tg{os.getpid() % 10000}x{next(_number)}'
        self.hosts = [f'{self.name}a', f'{self.name}b']
        self._switch = f'{self.name}s'

    def __enter__(self):
        try:
            for namespace in (*self.hosts, self._switch):
                ip('netns', 'add', namespace)
            ip('-n', self._switch, 'link', 'add', 'switch', 'type', 'bridge')
            ip('-n', self._switch, 'link', 'set', 'switch', 'up')
            for k, host in enumerate(self.hosts):
                port = f'port{k}'
                ip('-n', host, 'link', 'add', 'net', 'type', 'veth', 'peer', 'name', port)
                ip('-n', host, 'link', 'set', port, 'netns', self._switch)
                ip('-n', self._switch, 'link', 'set', port, 'master', 'switch')
                ip('-n', self._switch, 'link', 'set', port, 'up')
                ip('-n', host, 'addr', 'add', f'10.77.0.{k + 1}/24', 'dev', 'net')
                ip('-n', host, 'link', 'set', 'net', 'up')
                ip('-n', host, 'link', 'set', 'lo', 'up')
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        for namespace in (*self.hosts, self._switch):
            subprocess.run(['ip', 'netns', 'del', namespace], capture_output=True)

    def cut(self, host):
        """Cut the link of a host: packets are lost, and no interface says so."""
        ip('-n', self._switch, 'link', 'set', f'port{host}', 'nomaster')


@contextmanager
def ranks(network, folder, program, *args):
    """Run a program on two ranks of each host; yield the processes, and kill them in the end."""
    processes = []
    for rank in range(4):
        environment = {
            **os.environ,
            'PYTHONPATH': str(ROOT),
            'MASTER_ADDR': '10.77.0.1',
            'MASTER_PORT': '29577',
            'RANK': str(rank),
            'WORLD_SIZE': '4',
            'LOCAL_RANK': str(rank % 2),
            'GLOO_SOCKET_IFNAME': 'net',
            'OMP_NUM_THREADS': '1',
        }
        command = ['ip', 'netns', 'exec', network.hosts[rank // 2]]
        command += [sys.executable, str(program), str(folder), *map(str, args)]
        with Path(folder, f'{rank}.txt').open('w') as output:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            )
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def wait_for(files, seconds):
    """Wait until files are there."""
    deadline = time.monotonic() + seconds
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, [str(file) for file in files if not file.exists()]
        time.sleep(0.02)


def ends(processes, seconds):
    """Return after how many seconds each process has ended, and its status."""
    start = time.monotonic()
    result = {}
    while len(result) < len(processes) and time.monotonic() < start + seconds:
        for rank, process in enumerate(processes):
            if rank not in result and process.poll() is not None:
                result[rank] = time.monotonic() - start, process.returncode
        time.sleep(0.02)
    return result
