"""Whether the samples of a mini-batch are mixed, so that micro-batches would give other numbers.

::

    sample    (8, 3)   ─▶  (8, 5)
    halves    (4, 3)   ─▶  (4, 5)  ┐ put together, they have to be the output for all of it
              (4, 3)   ─▶  (4, 5)  ┘

Both halves count: the first one is right where a sample sees those before it, as steps in time do.
"""
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchgpipe.distance import default_tolerance, distance, typical_size

__all__ = ['coarsest_tolerance', 'differences', 'mixed']


def mixed(whole: dict[str, Tensor], halves: Sequence[dict[str, Tensor]], tolerance: float
          ) -> list[str]:
    """Return which outputs for halves of a sample are not those halves of that for all of it.

    What has no batch dimension, such as a scalar, becomes what ``GPipe(…, gather=…)`` says.

    Args:
        whole: The outputs for all of the sample.
        halves: Those for each half.
        tolerance: What rounding may come to.
    """
    found = []
    joined: dict[str, Tensor] = {}
    for name in {name: None for outputs in (whole, *halves) for name in outputs}:
        if not all(name in outputs for outputs in (whole, *halves)):
            found.append(f'{name}, which is not there for each')
            continue
        parts = [outputs[name] for outputs in halves]
        shapes = [tuple(x.shape) for x in parts]
        if any(shape != whole[name].shape for shape in shapes):
            together = _joined(parts, whole[name])
            if together is None:
                found.append(f'{name} of shapes {", ".join(map(str, shapes))}, in place of parts '
                             f'of {tuple(whole[name].shape)}')
            else:
                joined[name] = together
    return found + differences(whole, joined, tolerance)


def differences(expected: dict[str, Tensor], found: dict[str, Tensor], tolerance: float
                ) -> list[str]:
    """Return which tensors differ by more than rounding, and by how much.

    Integers and truths may differ by much where what they are made of differs by rounding.
    """
    typical = typical_size([*expected.values()])
    apart = {name: distance(x, expected[name], typical) for name, x in found.items()
             if x.is_floating_point() or x.is_complex()}
    return [f'{name} by {size:.1e}' for name, size in apart.items() if size > tolerance]


def _joined(parts: Sequence[Tensor], expected: Tensor) -> Tensor | None:
    """Return parts, put together by the dimension in which they are parts, if there is one."""
    for dim in range(expected.dim()):
        sizes = list(expected.shape)
        for x in parts:
            sizes[dim] = x.shape[dim] if dim < x.dim() else 0
            if list(x.shape) != sizes:
                break
        else:
            if sum(x.shape[dim] for x in parts) == expected.shape[dim]:
                return torch.cat(list(parts), dim)
    return None


def coarsest_tolerance(tensors: Iterable[Tensor]) -> float:
    """Return what rounding may come to in the least precise of some tensors.

    Other sizes get other kernels, so rounding is another one; and those may compute with less
    precision than what they are given has, under autocast, or by TF32, which has that of float16.
    """
    found: set[torch.dtype] = set()
    for x in tensors:
        if x.is_floating_point() or x.is_complex():
            kind = x.device.type
            lower = kind != 'cpu' or torch.get_float32_matmul_precision() != 'highest'
            found.add(torch.float16 if lower and x.dtype == torch.float32 else x.dtype)
            if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
                found.add(torch.get_autocast_dtype(kind))
    return max(map(default_tolerance, found), default=0.0)
