"""What one layer costs, and what one skip does, as data."""
from dataclasses import dataclass
from typing import Optional

__all__ = ['LayerProfile', 'SkipProfile']


@dataclass(frozen=True)
class LayerProfile:
    """What one layer costs in a training step on the sample, by itself."""

    #: In the sequential module.
    name: str
    #: Medians.
    forward_seconds: float
    backward_seconds: float
    #: All parameters, and those among them that require no gradient.
    parameter_bytes: int
    frozen_bytes: int
    buffer_bytes: int
    #: Memory that the forward made and autograd keeps for the backward of this or later layers.
    activation_bytes: int
    #: What crosses the boundary if a partition ends here, skips not counted.
    output_bytes: int
    #: The layer, by index, whose result this one changes in place, if any; the first such.
    changes: Optional[int] = None
    #: What of the times above does not shrink with the batch: spent once per micro-batch.
    forward_overhead: float = 0.0
    backward_overhead: float = 0.0


@dataclass(frozen=True)
class SkipProfile:
    """A skip tensor: from which layer to which, by index, and its size."""

    source: int
    target: int
    bytes: int
