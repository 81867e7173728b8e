"""Gradient clipping by the norm of all gradients, which are spread over ranks."""
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from torchgpipe.distributed.replicas import local, split_axes

__all__ = ['clip', 'is_counted']


def is_counted(grad: Tensor, places: Mapping[str, int]) -> bool:
    """Return whether this rank counts its part of a gradient.

    Of several ranks with the same part, only the first one counts it.

    Args:
        grad: The gradient.
        places: The number of this rank along each axis of the mesh along which other ranks have
            the same gradient or parts of it.
    """
    split = split_axes(grad)
    return not any(place for axis, place in places.items() if axis not in split)


@torch.no_grad()
def clip(gradients: Sequence[Tensor], copies: Sequence[Tensor], places: Mapping[str, int],
         max_norm: float, norm_type: float, group: dist.ProcessGroup | None, device: torch.device
         ) -> Tensor:
    """Scale gradients, in place, to a norm; return their previous norm.

    Args:
        gradients: The gradients of this rank.
        copies: Further gradients of this rank, which another rank counts.
        places: See :func:`is_counted`.
        max_norm: The largest norm that they may have.
        norm_type: The type of the norm; ``inf`` for the largest value.
        group: All ranks.
        device: The device of this rank.
    """
    power = 1. if norm_type == float('inf') else norm_type
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for grad in map(_summed, gradients):
        if is_counted(grad, places) and local(grad).numel():  # An empty tensor has no maximum.
            norm = torch.linalg.vector_norm(local(grad), norm_type)
            norms.append(norm.to(device, torch.float64) ** power)
    stacked = torch.stack(norms)
    total = stacked.amax() if norm_type == float('inf') else stacked.sum()
    if group is not None:
        operation = dist.ReduceOp.MAX if norm_type == float('inf') else dist.ReduceOp.SUM
        dist.all_reduce(total, operation, group)
    total = total ** (1 / power)
    scale = (max_norm / (total + 1e-6)).clamp(max=1)
    for grad in (*gradients, *copies):
        local(grad).mul_(scale.to(local(grad).device))  # It may wait on the host.
    return total


def _summed(grad: Tensor) -> Tensor:
    """Return a gradient without partial placements: no rank has a summand only."""
    if isinstance(grad, DTensor) and any(each.is_partial() for each in grad.placements):
        return grad.redistribute(placements=[
            Replicate() if each.is_partial() else each for each in grad.placements])
    return grad
