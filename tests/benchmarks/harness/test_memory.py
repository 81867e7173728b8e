"""Peaks count tensors that are alive."""

import torch

from benchmarks.harness.memory import LiveTensors


def test_live_tensors_are_counted_once_and_until_they_die():
    with LiveTensors().watched() as live:
        a = torch.empty(100)
        b = a.view(10, 10)
        assert live.now == 400
        c = b + 1
        del a, c
        assert live.now == 400
        del b
    assert (live.now, live.peak) == (0, 800)
