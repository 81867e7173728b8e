"""The distance of two tensors, and its comparison with rounding errors."""
import math
from typing import Any

import torch
from torch import Tensor

from torchgpipe.structure import leaves_of

__all__ = ['arbitrary_loss', 'close', 'default_tolerance', 'distance', 'same', 'typical_size']


def default_tolerance(dtype: torch.dtype | None) -> float:
    """Return what rounding may come to: 4e-11 for float64, 2e-5 for float32."""
    return float(torch.finfo(dtype or torch.get_default_dtype()).eps ** (2 / 3))


def distance(actual: Tensor, expected: Tensor, typical: float = 0.0) -> float:
    """Return the largest difference of two elements, as in :class:`Difference`.

    Args:
        actual: A tensor.
        expected: One that should be the same.
        typical: The size of a typical tensor of this kind.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    if same(actual, expected):  # That takes a tenth of the time.
        return 0.0
    alike = (actual == expected) | (actual.isnan() & expected.isnan())
    wide = torch.complex128 if actual.is_complex() else torch.float64
    apart = (actual.to(wide) - expected.to(wide)).abs().masked_fill(alike, 0)
    largest = float(apart.nan_to_num(math.inf, math.inf).max())
    return largest / (max(_size(expected), typical) or 1.0) if _rounds(expected) else max(
        largest, 1.0)  # which is 0 where integers have more digits than floats


def same(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are of one type, and have the same numbers."""
    return actual.dtype == expected.dtype and torch.equal(actual, expected)


def close(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are the same but for rounding."""
    return distance(actual, expected) <= default_tolerance(
        expected.dtype if expected.is_floating_point() else None)


def _rounds(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _size(x: Tensor) -> float:
    """Return the largest element, of those that are finite."""
    finite = x[x.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def typical_size(tensors: list[Tensor]) -> float:
    """Return the size that half of the tensors have.

    What is zero but for rounding, as the gradient of a bias before a normalisation, would be
    another number each time relative to itself.
    """
    sizes = sorted(_size(x) for x in tensors if _rounds(x))
    return sizes[len(sizes) // 2] if sizes else 0.0


def arbitrary_loss(output: Any) -> Tensor:
    """Return a loss that no symmetry of the output makes constant."""
    tensors = [leaf.value for leaf in leaves_of(output) if isinstance(leaf.value, Tensor)]
    reals = [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
    return sum((_from_constants(x) for x in reals if x.is_floating_point()), torch.zeros(()))


def _from_constants(x: Tensor) -> Tensor:
    target = torch.arange(x.numel(), dtype=x.dtype, device=x.device).cos().view(x.shape)
    return (x - target).square().mean()
