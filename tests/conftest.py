"""What every test gets: a seed, one intra-op thread, and a check that it leaves no thread.

And a clock, for those that ask for it.
"""
import gc
import threading
from importlib import import_module

import pytest
import torch

from tests.clock import Clock


@pytest.fixture(autouse=True)
def seed():
    """Make every test repeatable by itself."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def one_intra_op_thread():
    """Let workers be the only thing that runs at the same time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_thread_left():
    """Fail a test that leaves a thread behind."""
    before = set(threading.enumerate())
    yield
    if set(threading.enumerate()) - before:
        gc.collect()
    assert not set(threading.enumerate()) - before


@pytest.fixture
def clock(monkeypatch):
    """Let the profiler look at a clock that the test moves."""
    clock = Clock()
    for name in ('measure', 'profile'):  # a function hides the module of the second name
        monkeypatch.setattr(import_module(f'torchgpipe.balance.{name}'), 'time', clock)
    return clock


def pytest_collection_modifyitems(items):
    """Skip what this machine has no device for."""
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason='needs a CUDA device')
        for item in items:
            if 'cuda' in item.keywords:
                item.add_marker(skip)
