"""The end of a process: threads of gloo release their tensors before the interpreter ends.

A thread of gloo holds what it has sent until after it has said that it is done, and may be the
last that does. A tensor of Python's is let go under the lock of the interpreter. If there is none
any more, the thread is ended in a destructor, and the process with it: ``terminate called without
an active exception``, and ``torchrun`` reports that a training failed which had come to its end::

    main thread        wait ── loss.item() ── the script ends ── the interpreter ends ──
    thread of gloo     done ┘ ·············· not scheduled ··············· let go ✗

``destroy_process_group`` waits for the threads of a group only where nothing else keeps it: a
DeviceMesh does, and the graph of a loss.
"""
import atexit
import time
from functools import cache
from pathlib import Path

#: What the system calls the threads of this process. Where there is none, nobody can look.
THREADS = Path('/proc/self/task')

#: For how many seconds the end of a process waits at most.
LIMIT = 10.


@cache
def wait_at_exit() -> None:
    """Let this process wait for threads of gloo when it ends. Who makes groups calls this."""
    atexit.register(let_threads_finish)


def let_threads_finish() -> None:
    """Wait until no thread of gloo has anything to do, or the limit is reached.

    One that waits for the interpreter's lock does not run either, and gets it in the pause between
    two looks.
    """
    quiet, end = 0, time.monotonic() + LIMIT
    while quiet < 2 and time.monotonic() < end:
        time.sleep(0.001)
        quiet = 0 if any(_runs(thread) for thread in THREADS.glob('*/stat')) else quiet + 1


def _runs(thread: Path) -> bool:
    """Return whether this is a thread of gloo that runs, or would if it had a core."""
    try:
        name, _, rest = thread.read_text().partition('(')[2].rpartition(')')
    except OSError:  # It has just ended.
        return False
    return name.startswith('pt_gloo') and rest.split()[0] == 'R'
