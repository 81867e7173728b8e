"""Measurements of this machine, with small sizes."""

import pytest
import torch

from torchgpipe.base.devices import CPU
from torchgpipe.trainer import measuring


def test_a_call_is_timed():
    calls = []
    seconds = measuring.seconds(lambda: calls.append(1), CPU, least=1e-4)
    assert 0 < seconds < 1 and len(calls) >= 8


@pytest.mark.slow
def test_products_and_memory(monkeypatch):
    monkeypatch.setattr(measuring, 'SIZES', ((), (16, 64)))
    rates = measuring.products(CPU, torch.float32)
    assert [*rates] == [16, 64] and min(rates.values()) > 1e6
    assert measuring.bandwidth(CPU, torch.float32) > 1e7
    assert measuring.peak_tflops(CPU) is None
