"""Compile partitions, between the layers that stash or pop, which the compiler has to leave alone.

::

    layers      conv  norm  relu  stash  conv  norm  pop  relu
    compiled    ───────────────          ──────────       ────
"""
from itertools import groupby

import torch
from torch import nn

from torchgpipe.aliases import TensorOrTensors
from torchgpipe.skip.layout import DeclaresSkips

__all__ = ['compile_partition']


def compile_partition(partition: nn.Sequential) -> None:
    """Let a partition run its layers in compiled runs, in place."""
    steps = [step for skips, layers in groupby(partition, key=_has_skips)
             for step in (layers if skips else [torch.compile(nn.Sequential(*layers))])]

    def forward(input: TensorOrTensors) -> TensorOrTensors:
        for step in steps:
            input = step(input)
        return input
    partition.forward = forward


def _has_skips(layer: nn.Module) -> bool:
    return any(isinstance(module, DeclaresSkips) for module in layer.modules())
