"""The comparison of two runs: distances of tensors, rounding errors, and concatenated parts."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchgpipe.base.structure import leaves_of

Name = TypeVar('Name', bound=Hashable)


def default_tolerance(dtype: torch.dtype | None) -> float:
    """Return the expected size of rounding errors: 4e-11 for float64, 2e-5 for float32."""
    return float(torch.finfo(dtype or torch.get_default_dtype()).eps ** (2 / 3))


def distance(actual: Tensor, expected: Tensor, typical: float = 0.0) -> float:
    """Return the largest difference of two elements, as in :class:`Difference`."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    if _same(actual, expected):  # That takes a tenth of the time.
        return 0.0
    alike = (actual == expected) | (actual.isnan() & expected.isnan())
    wide = torch.complex128 if actual.is_complex() else torch.float64
    apart = (actual.to(wide) - expected.to(wide)).abs().masked_fill(alike, 0)
    largest = float(apart.nan_to_num(math.inf, math.inf).max())
    return (
        largest / (max(_size(expected), typical) or 1.0)
        if is_real(expected)
        else max(largest, 1.0)
    )  # which is 0 where integers have more digits than floats


def _same(actual: Tensor, expected: Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(actual, expected)


def rounding(x: Tensor | None) -> float:
    """Return the largest difference that rounding may make in a tensor."""
    return default_tolerance(None if x is None or not x.is_floating_point() else x.dtype)


def close(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are the same except for rounding."""
    return distance(actual, expected) <= rounding(expected)


def apart(
    expected: Mapping[Name, Tensor],
    actual: Mapping[Name, Tensor],
    kind: Callable[[Name], Hashable] = lambda name: None,
) -> dict[Name, float]:
    """Return the distances between two runs, for all tensors that differ.

    If a tensor is missing, its distance is infinite. Each distance is relative to the typical size
    of its kind.
    """
    found = {
        name: math.inf
        for name in {**expected, **actual}
        if name not in expected or name not in actual or not _same(actual[name], expected[name])
    }
    typical = {
        each: typical_size(x for name, x in expected.items() if kind(name) == each)
        for each in {*map(kind, found)}
    }
    return {
        name: distance(actual[name], expected[name], typical[kind(name)])
        if name in expected and name in actual
        else far
        for name, far in found.items()
    }


def split_dim(whole: Tensor, parts: Sequence[Tensor]) -> int | None:
    """Return the dimension along which the concatenated parts have the shape of a tensor."""

    def beside(x: Tensor, dim: int) -> list[int]:
        return [*x.shape[:dim], *x.shape[dim + 1 :]]

    return next(
        (
            dim
            for dim in range(whole.dim())
            if all(x.dim() == whole.dim() and beside(x, dim) == beside(whole, dim) for x in parts)
            and sum(x.shape[dim] for x in parts) == whole.shape[dim]
        ),
        None,
    )


def together(whole: Tensor, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Return candidates for a whole: parts concatenated, or summed, or averaged by sizes."""
    dim = split_dim(whole, parts)
    if dim is not None:
        return [torch.cat([*parts], dim)]
    if any(x.shape != whole.shape for x in parts):
        return []
    means = [x * (size / sum(sizes)) for x, size in zip(parts, sizes)]
    return [torch.stack([*xs]).sum(0) for xs in (means, parts)]


def is_real(x: Tensor) -> bool:
    """Return whether a tensor has values that are rounded."""
    return x.is_floating_point() or x.is_complex()


def _size(x: Tensor) -> float:
    """Return the largest finite element."""
    finite = x[x.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def typical_size(tensors: Iterable[Tensor]) -> float:
    """Return the median size of the tensors.

    Some tensors are zero except for rounding, such as the gradient of a bias before a
    normalisation. Their distance relative to themselves would not be meaningful.
    """
    sizes = sorted(_size(x) for x in tensors if is_real(x))
    return sizes[len(sizes) // 2] if sizes else 0.0


def arbitrary_loss(output: Any, batch_dim: Any = None) -> Tensor:
    """Return a loss that no symmetry of the output makes constant.

    Args:
        output: The output: a tensor of any shape, or a value of any nesting.
        batch_dim: The dimension of samples in tensors that have it. If it is given, the loss is a
            mean over samples, to each of which the same constants apply. Scalars are left out,
            because they are gathered by different rules.
    """
    tensors = [leaf.value for leaf in leaves_of(output) if isinstance(leaf.value, Tensor)]
    if batch_dim is not None:
        tensors = [x for x in tensors if x.dim() > 0]
    dim = batch_dim if isinstance(batch_dim, int) else None
    return sum((_from_constants(x, dim) for x in tensors if is_real(x)), torch.zeros(()))


def _from_constants(x: Tensor, batch_dim: int | None) -> Tensor:
    shape = list(x.shape)
    if batch_dim is not None and -len(shape) <= batch_dim < len(shape):
        shape[batch_dim] = 1
    if x.is_complex():
        x = torch.view_as_real(x)
        shape.append(2)
    target = torch.arange(math.prod(shape), dtype=x.dtype, device=x.device).cos().view(shape)
    return (x - target).square().mean()
