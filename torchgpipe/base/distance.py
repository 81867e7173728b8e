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
    epsilon = torch.finfo(dtype or torch.get_default_dtype()).eps
    return float(epsilon ** (2 / 3))


def distance(
    actual: Tensor,
    expected: Tensor,
    typical: float = 0.0,
) -> float:
    """Return the largest difference of two elements, as in :class:`Difference`."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    if _same(actual, expected):  # That takes a tenth of the time.
        return 0.0

    # Infinity minus infinity is not a number, so equal elements are excluded.
    is_equal = (actual == expected) | (actual.isnan() & expected.isnan())
    wide = torch.complex128 if actual.is_complex() else torch.float64
    differences = (actual.to(wide) - expected.to(wide)).abs()
    differences = differences.masked_fill(is_equal, 0)
    # An element that is not a number in only one of the tensors is infinitely far.
    differences = differences.nan_to_num(math.inf, math.inf)
    largest = float(differences.max())
    if is_real(expected):
        size = max(_size(expected), typical)
        return largest / (size or 1.0)
    # Integers with more digits than float64 differ by 0 here.
    return max(largest, 1.0)


def _same(actual: Tensor, expected: Tensor) -> bool:
    return actual.dtype == expected.dtype and torch.equal(actual, expected)


def rounding(x: Tensor | None) -> float:
    """Return the largest difference that rounding may make in a tensor."""
    if x is None or not x.is_floating_point():
        return default_tolerance(None)
    return default_tolerance(x.dtype)


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
    distances = {}
    typical_sizes: dict[Hashable, float] = {}
    for name in {**expected, **actual}:
        if name not in expected or name not in actual:
            distances[name] = math.inf
            continue
        # Usually all tensors are the same, and no typical size is needed.
        if _same(actual[name], expected[name]):
            continue
        group = kind(name)
        if group not in typical_sizes:
            peers = []
            for peer, x in expected.items():
                if kind(peer) == group:
                    peers.append(x)
            typical_sizes[group] = typical_size(peers)
        distances[name] = distance(
            actual[name],
            expected[name],
            typical_sizes[group],
        )
    return distances


def split_dim(
    whole: Tensor,
    parts: Sequence[Tensor],
) -> int | None:
    """Return the dimension along which the concatenated parts have the shape of a tensor."""
    for dim in range(whole.dim()):
        if _is_split(whole, parts, dim):
            return dim
    return None


def _is_split(
    whole: Tensor,
    parts: Sequence[Tensor],
    dim: int,
) -> bool:
    size = 0
    for part in parts:
        if part.dim() != whole.dim():
            return False
        # Only the sizes of this dimension may differ.
        shape = [*part.shape]
        shape[dim] = whole.shape[dim]
        if shape != [*whole.shape]:
            return False
        size += part.shape[dim]
    return size == whole.shape[dim]


def together(
    whole: Tensor,
    parts: Sequence[Tensor],
    sizes: Sequence[int],
) -> list[Tensor]:
    """Return candidates for a whole: parts concatenated, or summed, or averaged by sizes."""
    dim = split_dim(whole, parts)
    if dim is not None:
        return [torch.cat([*parts], dim)]
    if any(x.shape != whole.shape for x in parts):
        return []
    # A mean over samples becomes a mean of parts, weighted by their numbers of samples.
    samples = sum(sizes)
    weighted = [part * (size / samples) for part, size in zip(parts, sizes)]
    mean = torch.stack(weighted).sum(0)
    total = torch.stack([*parts]).sum(0)
    return [mean, total]


def is_real(x: Tensor) -> bool:
    """Return whether a tensor has values that are rounded."""
    return x.is_floating_point() or x.is_complex()


def _size(x: Tensor) -> float:
    """Return the largest finite element."""
    finite = x[x.isfinite()].abs()
    if not finite.numel():
        return 0.0
    return float(finite.max())


def typical_size(tensors: Iterable[Tensor]) -> float:
    """Return the median size of the tensors.

    Some tensors are zero except for rounding, such as the gradient of a bias before a
    normalisation. Their distance relative to themselves would not be meaningful.
    """
    sizes = sorted(map(_size, filter(is_real, tensors)))
    if not sizes:
        return 0.0
    return sizes[len(sizes) // 2]


def arbitrary_loss(output: Any, batch_dim: Any = None) -> Tensor:
    """Return a loss that no symmetry of the output makes constant.

    Args:
        output: The output: a tensor of any shape, or a value of any nesting.
        batch_dim: The dimension of samples in tensors that have it. If it is given, the loss is a
            mean over samples, to each of which the same constants apply. Scalars are left out,
            because they are gathered by different rules.
    """
    dim = batch_dim if isinstance(batch_dim, int) else None
    loss = torch.zeros(())
    for leaf in leaves_of(output):
        x = leaf.value
        if not isinstance(x, Tensor) or not is_real(x):
            continue
        if batch_dim is None or x.dim() > 0:
            loss = loss + _from_constants(x, dim)
    return loss


def _from_constants(x: Tensor, batch_dim: int | None) -> Tensor:
    shape = list(x.shape)
    if batch_dim is not None and -len(shape) <= batch_dim < len(shape):
        shape[batch_dim] = 1
    if x.is_complex():
        x = torch.view_as_real(x)
        shape.append(2)
    # Each element has another target, so that a permutation of the elements changes the loss.
    indices = torch.arange(math.prod(shape), dtype=x.dtype, device=x.device)
    target = indices.cos().view(shape)
    return (x - target).square().mean()
