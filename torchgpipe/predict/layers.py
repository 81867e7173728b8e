"""What one layer costs, and what one skip does, as data."""
from dataclasses import dataclass, fields
from math import inf
from numbers import Real
from typing import Any

__all__ = ['LayerProfile', 'SkipProfile', 'check_numbers']


def check_numbers(record: Any, unlimited: str = '') -> None:
    """Check that the numbers in a dataclass are finite, and not below zero.

    Args:
        record: What has been made.
        unlimited: The field that may be infinite, and not zero.

    Raises:
        ValueError: One is something else.
    """
    for field in fields(record):
        value = getattr(record, field.name)
        if field.type not in (int, float, int | None, float | None) or (
                value is None and field.type in (int | None, float | None)):
            continue
        fits = isinstance(value, Real) and (
            0 < value if field.name == unlimited else 0 <= value < inf)  # type: ignore[operator]
        if not fits:
            what = 'number above zero' if field.name == unlimited else (
                'finite number, not below zero')
            raise ValueError(f'{field.name!r} of a {type(record).__name__} must be a {what}, but '
                             f'is {value!r}')


@dataclass(frozen=True)
class LayerProfile:
    """What one layer costs in a training step on the sample, by itself.

    Times are medians in seconds, sizes are in bytes.

    >>> LayerProfile('0', 0.5, 1.0, 288, 0, 0, 0, 512).backward_seconds
    1.0
    """

    #: In the sequential module.
    name: str
    #: Of the forward.
    forward_seconds: float
    #: Of the backward.
    backward_seconds: float
    #: Of all parameters.
    parameter_bytes: int
    #: Of those among them that require no gradient.
    frozen_bytes: int
    #: Of all buffers.
    buffer_bytes: int
    #: Memory that the forward made and autograd keeps for the backward of this or later layers.
    activation_bytes: int
    #: What crosses the boundary if a partition ends here, skips not counted.
    output_bytes: int
    #: The layer, by index, whose result this one changes in place, if any; the first such.
    changes: int | None = None
    #: The part of ``forward_seconds`` that does not shrink with the batch, and so is spent once
    #: per micro-batch.
    forward_overhead: float = 0.0
    #: The same part of ``backward_seconds``.
    backward_overhead: float = 0.0
    #: The parts of ``backward_seconds`` that its halves take where a schedule splits it: gradients
    #: of what the layer was given, and of its weights. Splitting costs what makes them more than
    #: one together. ``None`` if that was not measured.
    input_share: float | None = None
    weight_share: float | None = None

    def __post_init__(self) -> None:
        check_numbers(self)


@dataclass(frozen=True)
class SkipProfile:
    """A skip tensor: from which layer to which, by index, and its size.

    >>> SkipProfile(source=0, target=3, bytes=512)
    SkipProfile(source=0, target=3, bytes=512)
    """

    #: The layer that stashes it.
    source: int
    #: The layer that pops it.
    target: int
    #: Of the tensor.
    bytes: int

    def __post_init__(self) -> None:
        check_numbers(self)
