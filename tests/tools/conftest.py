"""What tests of tools get: no thread that outlives them, and no state of the process."""
import importlib.util

import pytest
from tqdm import tqdm


@pytest.fixture(autouse=True)
def no_monitor(monkeypatch):
    """Let bars of progress, which these tools have, start no thread."""
    monkeypatch.setattr(tqdm, 'monitor_interval', 0)


@pytest.fixture
def no_state():
    """Forget what Accelerate, which others use, too, keeps for the process."""
    yield
    if importlib.util.find_spec('accelerate') is not None:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
