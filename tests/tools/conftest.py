"""Fixtures of tests of tools: no thread that outlives them, and no state of the process."""

import importlib.util

import pytest
from tqdm import tqdm


@pytest.fixture(autouse=True)
def no_monitor(monkeypatch):
    """Let bars of progress, which these tools have, start no thread."""
    monkeypatch.setattr(tqdm, 'monitor_interval', 0)


@pytest.fixture
def no_state():
    """Reset the state of the process that Accelerate keeps, also if other tools use it."""
    yield
    if importlib.util.find_spec('accelerate') is not None:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
