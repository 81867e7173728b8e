"""Running out of memory, as a result instead of a crash.

CUDA's allocator raises an error. The CPU's does not, before the machine kills the process. So
there, on Linux, the process gets the free memory as its limit.
"""

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

#: Phrases in errors of allocators, and of libraries without memory for their workspace.
_PHRASES = (
    "can't allocate memory",
    'not enough memory',
    'out of memory',
    'bad_alloc',
    'ALLOC_FAILED',
    'unable to find an engine to execute',
    'could not create a primitive',
    'could not create a memory object',
    "can't start new thread",
)

_UNKNOWN = 2**62


def free_memory() -> int:
    """Return the bytes of the host that are free or can be freed; a huge number if unknown."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)  # memory that this process has freed, but keeps
    free = (_number('/proc/meminfo', r'MemAvailable: +(\d+) kB') or _UNKNOWN // 1024) * 1024
    most = _number('/sys/fs/cgroup/memory.max', r'^(\d+)$')
    used = _number('/sys/fs/cgroup/memory.current', r'^(\d+)$')
    return free if most is None or used is None else min(free, most - used)


def _number(path: str, pattern: str) -> int | None:
    try:
        found = re.search(pattern, Path(path).read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


def require(number: int, what: str) -> None:
    """Raise :exc:`MemoryError` if the host has fewer than this many bytes left."""
    free = free_memory()
    if number > free:
        raise MemoryError(
            f'{what} needs {number / 2**30:.1f} GiB of the host, and '
            f'{free / 2**30:.1f} GiB are free'
        )


@contextmanager
def memory_limit() -> Iterator[None]:
    """Let allocations on the CPU fail within the context once all memory is taken."""
    used = _number('/proc/self/status', r'VmData:\s+(\d+) kB')
    if used is None:
        yield
        return
    import resource  # Linux has it.

    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used * 1024 + free_memory()
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if there is none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def is_exhaustion(error: BaseException) -> bool:
    """Distinguish an error of an allocator from others."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _PHRASES)
