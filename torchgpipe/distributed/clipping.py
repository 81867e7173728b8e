"""Clipping: the norm of all gradients, of which each rank has some, or parts of some."""
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchgpipe.distributed.replicas import local

__all__ = ['clip']


@torch.no_grad()
def clip(gradients: Sequence[Tensor], counted: Iterable[bool], max_norm: float, norm_type: float,
         group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """Scale gradients, in place, to a norm; return what it was.

    Args:
        gradients: Those of this rank.
        counted: Which of them are in the norm; another rank counts the others.
        max_norm: The largest norm that they may have.
        norm_type: The type of the norm; ``inf`` for the largest value.
        group: The ranks that have other gradients.
        device: That of this rank.
    """
    power = 1. if norm_type == float('inf') else norm_type
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    for grad, counts in zip(gradients, counted):
        if counts:
            norm = torch.linalg.vector_norm(grad, norm_type)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            norms.append(norm.to(device, torch.float64) ** power)
    stacked = torch.stack(norms)
    total = stacked.amax() if norm_type == float('inf') else stacked.sum()
    if group is not None:
        operation = dist.ReduceOp.MAX if norm_type == float('inf') else dist.ReduceOp.SUM
        dist.all_reduce(total, operation, group)
    total = total ** (1 / power)
    scale = (max_norm / (total + 1e-6)).clamp(max=1)
    for grad in gradients:
        local(grad).mul_(scale)
    return total
