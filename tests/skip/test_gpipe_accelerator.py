"""Skips between accelerators, and between them and the CPU."""

import copy

import pytest
import torch
from torch import nn

from tests.devices import ACCELERATOR, places
from tests.helpers import Slow, as_if_on_several, assert_trains_alike
from tests.skip.models import WIDTH, crossing
from torchgpipe import GPipe


@pytest.mark.accelerator
def test_accelerators_and_mixed_devices():
    for where in ['aaa', 'cac', 'aca', 'aac', 'caa', 'cca', 'acc']:
        model = crossing()
        reference = copy.deepcopy(model)
        gpipe = GPipe(model, [2, 2, 2], devices=places(where), chunks=4, checkpoint='except_last')
        for size in (1, 4, 9):
            assert_trains_alike(reference, gpipe, torch.randn(size, WIDTH, dtype=torch.double))


@pytest.mark.accelerator
def test_streams_do_not_race(monkeypatch):
    """Three partitions on one device, which copy as if they were on three, behind slow kernels."""
    as_if_on_several(monkeypatch, 3)
    model = crossing()
    reference = copy.deepcopy(model)
    layers = [layer for pair in zip([Slow() for _ in model], model) for layer in pair]
    gpipe = GPipe(
        nn.Sequential(*layers),
        [4, 4, 4],
        devices=[ACCELERATOR] * 3,
        chunks=6,
        checkpoint='except_last',
    )
    assert [partition.moves for partition in gpipe._engine.partitions] == [False, True, True]
    for _ in range(10):
        x = torch.randn(24, WIDTH, dtype=torch.double)
        reference.zero_grad(), gpipe.zero_grad()
        assert_trains_alike(reference, gpipe, x, 1e-9)
