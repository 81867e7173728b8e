"""The description of a layer of the zoo: how to make it, its input, and its errors."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Entry:
    """A layer from one shape to the same shape.

    Attributes:
        make: Returns a new layer.
        shape: The shape of a sample. Its last dimension is 4 if a linear layer may precede.
        deferred: How many gradients of weights the second half of a backward adds for each
            micro-batch, or None if this is not of interest.
        refused: Modes of checkpointing in which a recomputation or PyTorch refuses the layer.
        draws: Whether the layer draws random numbers. It then is in one partition only.
        lacks: Options and kinds of devices that the layer does not admit.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4,)
    deferred: int | None = None
    refused: frozenset[str] = frozenset()
    draws: bool = False
    lacks: frozenset[str] = frozenset()
