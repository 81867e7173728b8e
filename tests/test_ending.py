"""At the end of a process, threads of gloo come to their end first."""
import subprocess
import sys

import pytest

from tests.devices import cpu_only
from torchgpipe.ending import THREADS

pytestmark = cpu_only('gloo is on the CPU')

#: A thread that the system takes for one of gloo's works on, and the script ends.
SCRIPT = """
import hashlib, os, threading
import {module}

def work():
    with open(f'/proc/self/task/{{threading.get_native_id()}}/comm', 'w') as file:
        file.write('pt_gloo_runloop')
    begun.set()
    for _ in range(3):
        hashlib.sha256(memory)  # without the interpreter's lock
    os.write(1, b'done')

memory, begun = bytes(2 ** 28), threading.Event()
threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


@pytest.mark.slow
@pytest.mark.skipif(not THREADS.exists(), reason='this system does not show its threads')
@pytest.mark.parametrize('module', ['torchgpipe', 'torchgpipe.distributed'])
def test_a_thread_of_gloo_comes_to_its_end(module):
    assert subprocess.run([sys.executable, '-c', SCRIPT.format(module=module)], check=True,
                          capture_output=True).stdout == b'done'
