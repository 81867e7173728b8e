"""Ranks on two hosts, which are network namespaces of this one."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from benchmarks.harness.hosts import INTERFACE

ROOT = Path(__file__).parents[2]

#: Seconds until a test gives up. A machine that others keep busy may take long.
PATIENCE = 200


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
            'GLOO_SOCKET_IFNAME': INTERFACE,
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


def wait_for(files):
    """Wait until files are there."""
    deadline = time.monotonic() + PATIENCE
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, [str(file) for file in files if not file.exists()]
        time.sleep(0.02)


def ends(processes):
    """Return the status of each process, which is ``None`` of one that does not end."""
    deadline = time.monotonic() + PATIENCE
    statuses = [None] * len(processes)
    while None in statuses and time.monotonic() < deadline:
        statuses = [process.poll() for process in processes]
        time.sleep(0.02)
    return statuses
