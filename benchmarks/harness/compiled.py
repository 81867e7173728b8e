"""Compile partitions, between the layers that the compiler has to leave alone.

::

    layers      conv  norm  relu  stash  conv  norm  pop  relu
    compiled    ───────────────          ──────────       ────

Layers that stash or pop have effects that it cannot see. A deferred batch norm does something
else in each micro-batch, so it would be compiled again and again.
"""

from collections.abc import Callable
from itertools import groupby

import torch
from torch import nn

from torchgpipe.base.structure import Value
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.skip.layout import DeclaresSkips

Step = Callable[[Value], Value]


def compile_partition(partition: nn.Sequential) -> None:
    """Let a partition run its layers in compiled runs, in place."""
    steps: list[Step] = []
    for alone, layers in groupby(partition, key=_is_left_alone):
        run = list(layers)
        if alone:
            steps += run
        else:
            steps.append(torch.compile(_run(run, len(steps))))

    def forward(input: Value) -> Value:
        for step in steps:
            input = step(input)
        return input

    partition.forward = forward


def _run(layers: list[nn.Module], number: int) -> Step:
    """Return a function of some layers, with a code object of its own.

    PyTorch counts compilations by code object, and gives up at the eighth.
    """

    def run(input: Value) -> Value:
        for layer in layers:
            input = layer(input)
        return input

    run.__code__ = run.__code__.replace(co_name=f'run_{number}')
    return run


def _is_left_alone(layer: nn.Module) -> bool:
    return any(
        isinstance(module, (DeclaresSkips, DeferredBatchNorm)) for module in layer.modules()
    )
