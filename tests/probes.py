"""Probes record the tests that reach a line of the package. `tests.mutants` sets them.

A copy of this file lies in the package's copy, where lines call :func:`reach`. In pytest, it is a
plugin that names the running test to the processes that this test starts.
"""

import os
from pathlib import Path

import pytest

#: The variable of the folder of records, and their suffixes.
VARIABLE = 'MUTANTS_PROBES'
RUNNING = '.running'
REACHED = '.reached'

_recorded = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Name the running test for as long as it runs."""
    running = Path(os.environ[VARIABLE], f'{os.getpid()}{RUNNING}')
    running.write_text(item.nodeid)
    result = yield
    running.unlink()
    return result


def parent_of(process):
    """Return the number of a process's parent."""
    stat = Path('/proc', str(process), 'stat').read_text()
    return int(stat.rpartition(')')[2].split()[1])


def running_test():
    """Return the test that this process or one of its ancestors runs, or ''."""
    process = os.getpid()
    while process > 1:
        try:
            return Path(os.environ[VARIABLE], f'{process}{RUNNING}').read_text()
        except FileNotFoundError:
            process = parent_of(process)
    return ''


def reach(probe):
    """Record that the running test reaches a probe."""
    test = running_test()
    if (probe, test) in _recorded:
        return
    _recorded.add((probe, test))
    with Path(os.environ[VARIABLE], f'{os.getpid()}{REACHED}').open('a') as records:
        print(probe, test, file=records)


def records_of(folder):
    """Return the tests that reach each probe: a dictionary of sets."""
    tests = {}
    for path in Path(folder).glob(f'*{REACHED}'):
        for line in path.read_text().splitlines():
            probe, test = line.split(' ', 1)
            tests.setdefault(int(probe), set()).add(test)
    return tests
