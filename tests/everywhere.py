"""Check that each test with a device in it also runs on accelerators, or says why it does not.

A test has a device in it if it makes an object that takes one: a pipeline, a worker, a checkpoint,
a profile, an edge or a copy.
"""

import functools

import pytest

from torchgpipe.engine.backward_order import Copy, Tie, Wait
from torchgpipe.engine.checkpoint.recomputation import Recomputation
from torchgpipe.engine.partition import Engine
from torchgpipe.engine.workers import Workers
from torchgpipe.plan.profile import Flow

#: Functions that take a device.
TOLD = [
    (Engine, '__init__'),
    (Workers, '__init__'),
    (Recomputation, '__init__'),
    (Flow, '__init__'),
    (Copy, 'forward'),
    (Wait, 'forward'),
    (Tie, 'forward'),
]

#: The property of a test's report with the reason why the test runs on the CPU only, or None.
DEVICE = 'device'

#: Tests of something else, which may use a pipeline to show it.
APART = {'tests/benchmarks/': 'benchmarks have tests on accelerators of their own'}


class Everywhere:
    """A plugin of pytest that fails tests which run on the CPU only, and do not say why."""

    def __init__(self):
        #: Of each test function with a device in it, why it runs on the CPU only, if it does.
        self._found = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        """Look whether a test has a device in it."""
        if not isinstance(item, pytest.Function):
            return (yield)
        with pytest.MonkeyPatch.context() as patch:
            seen = _watch(patch)
            result = yield
        if seen:
            reason = _why_not(item)
            item.user_properties.append((DEVICE, reason))
            assert reason != '', (
                'the test has a device in it: let it run on accelerators, by `devices` of '
                'tests/devices.py, or mark it as cpu_only(reason)'
            )
        return result

    def pytest_runtest_logreport(self, report):
        """Record the reason found for a test, possibly in another process of pytest-xdist."""
        for name, reason in report.user_properties:
            if name == DEVICE:
                self._found[report.nodeid.split('[')[0]] = reason

    def pytest_terminal_summary(self, terminalreporter):
        """Say how many there are."""
        reasons = [reason for reason in self._found.values() if reason is not None]
        terminalreporter.write_line(
            f'{len(self._found)} test functions have a device in them: '
            f'{len(self._found) - len(reasons)} run on accelerators, {len(reasons)} say why not'
        )


def _watch(patch):
    """Return a list that gets longer when something is told of a device."""
    seen = []
    for owner, name in TOLD:

        def watched(*args, _function=getattr(owner, name), **kwargs):
            seen.append(_function)
            return _function(*args, **kwargs)

        watched = functools.wraps(getattr(owner, name))(watched)
        patch.setattr(owner, name, watched if name == '__init__' else staticmethod(watched))
    return seen


def _why_not(item):
    """Return the reason why a test runs on the CPU only; nothing if it gives none; None if not."""
    for mark in item.iter_markers('parametrize'):
        if any(
            each.name == 'accelerator'
            for value in mark.args[1]
            for each in getattr(value, 'marks', ())
        ):
            return None
    if item.get_closest_marker('accelerator') or item.get_closest_marker('sim'):
        return None
    mark = item.get_closest_marker('cpu_only')
    if mark is not None:
        return mark.args[0]
    return next((reason for path, reason in APART.items() if item.nodeid.startswith(path)), '')
