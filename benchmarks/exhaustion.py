"""Running out of memory, as a result instead of a crash.

CUDA's allocator raises an error. The CPU's does not before the machine kills the process, so there
the process gets a limit of what is free.
"""
import re
import resource
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import torch

__all__ = ['free_memory', 'is_exhaustion', 'memory_limit', 'require']

_PHRASES = ("can't allocate memory", 'not enough memory', 'out of memory', 'bad_alloc')


def free_memory() -> int:
    """Give the bytes of the host that are free, or can be."""
    found = re.search(r'MemAvailable: +(\d+) kB', Path('/proc/meminfo').read_text())
    free = int(found[1]) * 1024 if found else 2 ** 62
    group = Path('/sys/fs/cgroup')
    try:
        most = (group / 'memory.max').read_text().strip()
        used = int((group / 'memory.current').read_text())
    except OSError:
        return free
    return free if most == 'max' else min(free, int(most) - used)


def require(number: int, what: str) -> None:
    """Raise :exc:`MemoryError` if the host has fewer than this many bytes left."""
    free = free_memory()
    if number > free:
        raise MemoryError(f'{what} needs {number / 2**30:.1f} GiB of the host, and '
                          f'{free / 2**30:.1f} GiB are free')


@contextmanager
def memory_limit() -> Iterator[None]:
    """Let allocations on the CPU fail within the context once all memory is taken."""
    found = re.search(r'VmData:\s+(\d+) kB', Path('/proc/self/status').read_text())
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if found:
        limit = int(found[1]) * 1024 + free_memory()
        resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def is_exhaustion(error: BaseException) -> bool:
    """Tell an error of an allocator from others."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        phrase in str(error) for phrase in _PHRASES)
