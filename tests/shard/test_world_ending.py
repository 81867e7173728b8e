"""At the end of a process that made groups of gloo, their threads come to their end first."""

import subprocess
import sys

import pytest

from torchgpipe.shard.world import THREADS

pytestmark = [
    pytest.mark.skipif(not THREADS.exists(), reason='this system does not show its threads')
]

#: A thread that the system takes for one of gloo's works on, and the script ends.
SCRIPT = """
import hashlib, os, sys, threading
import torchgpipe
{before}

def work():
    with open(f'/proc/self/task/{{threading.get_native_id()}}/comm', 'w') as file:
        file.write('pt_gloo_runloop')
    begun.set()
    for _ in range({times}):
        hashlib.sha256(memory)  # without the interpreter's lock
    os.write(1, b'done')

memory, begun = bytes(2 ** 28), threading.Event()
threading.Thread(target=work, daemon=True).start()
begun.wait()
"""

MESH = "import torchgpipe.distributed; torchgpipe.distributed.init_mesh(device_type='cpu')"
SHARD = """
import torchgpipe.shard as ts
from torch import distributed as dist
dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
ts.distributed.init_process_group()
"""


def run(before, times=3):
    """Run the script after something else, and return its output."""
    return subprocess.run(
        [sys.executable, '-c', SCRIPT.format(before=before, times=times)],
        check=True,
        capture_output=True,
    ).stdout


@pytest.mark.slow
@pytest.mark.parametrize('before', [MESH, SHARD], ids=['mesh', 'shard'])
def test_a_thread_of_gloo_comes_to_its_end(before):
    assert run(before) == b'done'


@pytest.mark.slow
def test_the_end_of_a_process_waits_no_longer_than_the_limit():
    assert (
        run(MESH + '; import torchgpipe.shard.world; torchgpipe.shard.world.LIMIT = .1', 10**6)
        == b''
    )


@pytest.mark.slow
def test_a_process_without_such_groups_does_not_wait():
    assert run('assert "torchgpipe.shard.world" not in sys.modules', 10**6) == b''
