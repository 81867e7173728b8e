"""Stacks of equal cells, so that nothing but a schedule decides how well partitions do."""

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.harness.timing import time_in_turn


class Stack(NamedTuple):
    """A stack of equal layers.

    Attributes:
        layer: Makes a layer, whose output has the shape of its input.
        shape: The shape of a micro-batch.
    """

    layer: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def build(self, cells: int, depth: int) -> nn.Sequential:
        """Make a number of cells of ``depth`` layers each, the same ones whenever it is called."""
        torch.manual_seed(0)
        result = nn.Sequential()
        for _ in range(cells):
            result.append(nn.Sequential(*[self.layer() for _ in range(depth)]))
        return result

    def layer_seconds(self) -> float:
        """Return the median time of forward in a layer, of a micro-batch."""
        layer, (x, _) = self.layer(), self.data(1)
        (times,) = time_in_turn({0: lambda: layer(x)}, 20).values()
        return median(times)

    def data(self, chunks: int) -> tuple[Tensor, Tensor]:
        """Return an input and a target of so many micro-batches, the same ones each time."""
        generator = torch.Generator().manual_seed(0)
        shape = (chunks * self.shape[0], *self.shape[1:])
        return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def _rectified(layer: nn.Linear | nn.Conv2d) -> nn.Module:
    """Put a ReLU behind a layer, and keep the variance of values and of gradients in any depth."""
    nn.init.kaiming_normal_(layer.weight)
    return nn.Sequential(layer, nn.ReLU())


def perceptron(width: int, rows: int) -> Stack:
    """Return a stack of linear layers, of so many rows in a micro-batch."""
    return Stack(lambda: _rectified(nn.Linear(width, width)), (rows, width))


#: By name. A layer's forward takes about a millisecond or two on a core.
STACKS = {
    'mlp': perceptron(512, 256),
    'convolutional': Stack(lambda: _rectified(nn.Conv2d(32, 32, 3, padding=1)), (8, 32, 24, 24)),
    'transformer': Stack(
        lambda: nn.TransformerEncoderLayer(
            128, 4, 512, dropout=0.0, batch_first=True, norm_first=True
        ),
        (4, 64, 128),
    ),
}
