"""How far a micro-batch goes: distinct files and functions of the package on its way."""

import sys
import threading
from pathlib import Path

import torch
from torch import nn

import torchgpipe
from tests.helpers import in_partitions

ROOT = str(Path(torchgpipe.__file__).parent)


def called(function):
    """Return files and functions of the package that a call enters, in any thread."""
    found = set()

    def see(frame, event, arg):
        code = frame.f_code
        if event == 'call' and code.co_filename.startswith(ROOT) and code.co_name[0] != '<':
            found.add(
                (
                    code.co_filename,
                    code.co_qualname
                    if hasattr(code, 'co_qualname')
                    else (code.co_name, code.co_firstlineno),
                )
            )

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return len({file for file, _ in found}), len(found)


def counts(devices):
    """Count for forward, backward and a step of two partitions, all of it checkpointed."""
    layers = nn.Linear(2, 2), nn.Linear(2, 2)
    gpipe = in_partitions(devices, *layers, chunks=2, checkpoint='always')
    x = torch.rand(4, 2)
    for _ in range(2):  # The first pass sees which layers draw, and the second makes its plan.
        gpipe(x).sum().backward()
    gpipe._engine.workers.stop()  # The profile covers threads that start from now on.
    outputs = []
    forward = called(lambda: outputs.append(gpipe(x).sum()))
    backward = called(lambda: outputs[0].backward())
    for _ in range(2):  # So it is with a loss.
        gpipe.step(x, x, squares, schedule='1f1b')
    gpipe._engine.workers.stop()
    return forward, backward, called(lambda: gpipe.step(x, x, squares, schedule='1f1b'))


def squares(output, target):
    """Return a mean over samples."""
    return (output - target).square().mean()


def test_the_way_does_not_grow_unnoticed():
    """In v0.3.0 it was 17 files and 78 functions, with workers 96; and 10 and 39 in backward."""
    for devices, most in (
        (['cpu'] * 2, [(18, 80), (9, 31), (25, 147)]),
        (['cpu:0', 'cpu:1'], [(19, 99), (9, 31), (25, 162)]),
    ):
        for found, bound in zip(counts(devices), most):
            assert found[0] <= bound[0] and found[1] <= bound[1]


if __name__ == '__main__':
    for devices in (['cpu'] * 2, ['cpu:0', 'cpu:1']):
        print(devices, *counts(devices))
