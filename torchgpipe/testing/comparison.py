"""Compare what comes of the steps of two models, tensor by tensor."""
import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpipe.testing.training import KINDS, Record, Whole

__all__ = ['Comparison', 'Difference', 'close', 'compare', 'default_tolerance', 'distance']


class Difference(NamedTuple):
    """How far a tensor is from what it should be.

    Attributes:
        kind: ``'outputs'`` (and the loss), ``'gradients'``, ``'buffers'`` or ``'parameters'``.
        name: Which tensor: ``output['y']``, or the name of a parameter or buffer.
        step: The first step in which it differs, counted from 1.
        distance: The largest difference of two elements in that step, relative to the largest
            element of the tensor, or of a typical one of its kind if that is larger. Of integers
            it is the difference itself; infinite, if shapes differ or one is missing.
    """

    kind: str
    name: str
    step: int
    distance: float


class Comparison:
    """All differences in some steps.

    Attributes:
        differences: Of each tensor the first one, if it has any.
        tensors: Numbers of tensors that were compared, by kind.
        largest: The largest distance within the tolerance, by kind.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._found: dict[tuple[str, str], Difference] = {}
        self.tensors = dict.fromkeys(KINDS, 0)
        self.largest = dict.fromkeys(KINDS, 0.0)

    @property
    def differences(self) -> list[Difference]:
        """The differences, kind by kind, the largest first."""
        return sorted(self._found.values(), key=lambda each: (KINDS.index(each.kind), each.step,
                                                              -each.distance))

    def add(self, step: int, expected: Record, actual: Record) -> None:
        """Compare what came of a step, the first of which is 0."""
        for kind in KINDS:
            names = dict.fromkeys(name for of, name in [*expected, *actual] if of == kind)
            self.tensors[kind] = max(self.tensors[kind], len(names))
            typical = _typical([x for (of, _), x in expected.items() if of == kind])
            for name in names:
                a, b = actual.get((kind, name)), expected.get((kind, name))
                found = math.inf if a is None or b is None else distance(a, b, typical)
                if found <= self._tolerance:
                    self.largest[kind] = max(self.largest[kind], found)
                else:
                    self._found.setdefault((kind, name), Difference(kind, name, step + 1, found))


def compare(expected: Whole, actual: Whole, steps: int, tolerance: float) -> Comparison:
    """Train two models side by side, and compare all that comes of each step.

    Raises:
        ValueError: The loss of the first is not finite, so nothing could be told.
    """
    comparison = Comparison(tolerance)
    for step in range(steps):
        record = expected.step(step)
        loss = record['outputs', 'loss']
        if not loss.isfinite().all():
            raise ValueError(f'the loss of the unwrapped model is {loss.tolist()} in step '
                             f'{step + 1}, so there is nothing to compare; take fewer steps, or '
                             'an optimizer with a smaller learning rate')
        comparison.add(step, record, actual.step(step))
    return comparison


def default_tolerance(dtype: torch.dtype | None) -> float:
    """Give what rounding may come to: 4e-11 for float64, 2e-5 for float32."""
    return float(torch.finfo(dtype or torch.get_default_dtype()).eps ** (2 / 3))


def distance(actual: Tensor, expected: Tensor, typical: float = 0.0) -> float:
    """Give the largest difference of two elements, as in :class:`Difference`.

    Args:
        actual: A tensor.
        expected: One that should be the same.
        typical: The size of a typical tensor of this kind.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if same.all():
        return 0.0
    wide = torch.complex128 if actual.is_complex() else torch.float64
    apart = (actual.to(wide) - expected.to(wide)).abs().masked_fill(same, 0)
    largest = float(apart.nan_to_num(math.inf, math.inf).max())
    return largest / (max(_size(expected), typical) or 1.0) if _rounds(expected) else max(
        largest, 1.0)  # which is 0 where integers have more digits than floats


def close(actual: Tensor, expected: Tensor) -> bool:
    """Tell whether two tensors are the same but for rounding."""
    return distance(actual, expected) <= default_tolerance(
        expected.dtype if expected.is_floating_point() else None)


def _rounds(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _size(x: Tensor) -> float:
    """Give the largest element, of those that are finite."""
    finite = x[x.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _typical(tensors: list[Tensor]) -> float:
    """Give the size that half of the tensors have.

    What is zero but for rounding, as the gradient of a bias before a normalisation, would be
    another number each time relative to itself.
    """
    sizes = sorted(_size(x) for x in tensors if _rounds(x))
    return sizes[len(sizes) // 2] if sizes else 0.0
