"""The training recipe of ResNet on ImageNet (Goyal et al., arXiv 1706.02677).

SGD with Nesterov momentum 0.9 and weight decay 1e-4. The learning rate is 0.1 for a batch of 256
and grows with it; it is divided by 10 three times, after a warm-up::

    epoch     0 ─── 5 ─────── 30 ─────── 60 ──── 80 ─── 90
    rate      0.1 ↗ peak      ÷ 10       ÷ 100   ÷ 1000         peak = 0.1 × batch / 256

Training for another number of epochs stretches all of it. It differs from the paper: weight decay
is on all parameters, and the scale of each block's last batch norm starts at 1. The last layer
starts as PyTorch's does, and the last mini-batch of an epoch may be smaller.
"""

from collections.abc import Iterable

import torch
from torch import nn

EPOCHS = 90
WARM_UP = 5 / 90
MILESTONES = (30 / 90, 60 / 90, 80 / 90)


def learning_rate(progress: float, batch: int) -> float:
    """Return the learning rate.

    >>> [round(learning_rate(epoch / 90, 1024), 4) for epoch in (0, 2.5, 5, 30, 60, 80)]
    [0.1, 0.25, 0.4, 0.04, 0.004, 0.0004]

    Args:
        progress: Fraction of the training that is over, from 0 to 1.
        batch: Samples of a mini-batch.
    """
    peak = 0.1 * batch / 256
    if progress < WARM_UP:
        start = min(0.1, peak)
        return start + (peak - start) * progress / WARM_UP
    return peak / 10 ** sum(progress >= milestone for milestone in MILESTONES)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer; the learning rate is set before each step."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
