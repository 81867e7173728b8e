"""Sums of gradients over ranks, in buckets; parts of tensors, and clipping by the norm.

A gradient is freed when its bucket has a copy of it. So there is at most one bucket in addition to
one set of gradients. The sums are views of the bucket::

    gradients of this rank    g0 g1 g2 │ g3 g4 │          freed, bucket by bucket
    bucket                             └─ copy ─▶ [g3 g4] ─ all-reduce ─▶ [s3 s4]

Reductions run beside the computation.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from torchgpipe.base.structure import BUCKET, Gradients
from torchgpipe.shard.clipping import total_norm


def added(gradients: Gradients, more: Gradients) -> Gradients:
    """Return the sum of gradients for each tensor."""
    sums: dict[int, tuple[Tensor, Tensor]] = {}
    for x, gradient in (*gradients, *more):
        if id(x) in sums:
            gradient = sums[id(x)][1] + gradient
        sums[id(x)] = x, gradient
    return [*sums.values()]


class Sum(NamedTuple):
    """A sum of gradients over replicas that has started."""

    bucket: list[Tensor]
    #: Their gradients, and for each of them whether there is one.
    flat: Tensor
    work: Any


def start_sums(
    gradients: dict[Tensor, Tensor | None],
    group: dist.ProcessGroup,
    dtype: torch.dtype | None = None,
) -> list[Sum]:
    """Start to add up gradients over replicas.

    Args:
        gradients: By parameter, the gradient of this rank. It is emptied bucket by bucket, so that
            there is no second set of gradients.
        dtype: The dtype of the sums, on all ranks; by default the dtype of each parameter.
    """
    sums = []
    for bucket in buckets([*gradients]):
        parts = []
        flags = []
        for x in bucket:
            gradient = gradients.pop(x)
            flags.append(float(gradient is not None))
            part = local(like(x, gradient, dtype)).reshape(-1)
            parts += [part, part.new_zeros(_gap_after(part))]
            gradient = None
        parts.append(parts[0].new_tensor(flags))
        flat = torch.cat(parts)
        parts.clear()
        sums.append(Sum(bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    return sums


def end_sums(sums: list[Sum]) -> Gradients:
    """Return the sums of gradients, for parameters with a gradient on any rank.

    Args:
        sums: Sums that have started. The list is emptied.
    """
    results: Gradients = []
    counts = []
    while sums:
        count = _end_sum(*sums.pop(0), results)
        counts.append(count)
    # One look at the device for all buckets, because it waits for them.
    anywhere = torch.cat(counts).tolist() if counts else ()
    return [result for result, count in zip(results, anywhere) if count]


def _end_sum(bucket: list[Tensor], flat: Tensor, work: Any, results: Gradients) -> Tensor:
    """Append the sums of a bucket; return for each parameter how many ranks had a gradient."""
    work.wait()
    begin = 0
    for x in bucket:
        total = flat[begin : begin + local(x).numel()]
        begin += len(total) + _gap_after(total)
        results.append((x, _in_form_of(x, total)))
    return flat[begin:].clone()


def _gap_after(part: Tensor) -> int:
    """Return the number of zeros after a part, so that the next one is aligned to 16 bytes.

    Optimizers are slower with gradients that are not.
    """
    return -len(part) % max(1, 16 // part.itemsize)


def _in_form_of(x: Tensor, total: Tensor) -> Tensor:
    """Return the sum for a parameter: a view of the bucket, except for a part of a parameter."""
    if not isinstance(x, DTensor):
        return total.view(x.shape)  # Autograd copies it if the parameter has other strides.
    result = torch.empty_like(x, dtype=total.dtype)
    local(result).copy_(total.view_as(local(result)))
    return result


def buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters whose gradients are reduced in one message: of one dtype, BUCKET bytes."""

    def kind(x: Tensor) -> str:
        return str(x.dtype)

    for _, same in groupby(sorted(parameters, key=kind), kind):
        bucket = []
        size = 0
        for x in same:
            bucket.append(x)
            size += local(x).nbytes
            if size >= BUCKET:
                yield bucket
                bucket = []
                size = 0
        yield from [bucket] if bucket else []


def gathered_over(group: dist.ProcessGroup, x: Tensor) -> list[Tensor]:
    """Return the tensor of each rank of a group."""
    tensors = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(tensors, x, group)
    return tensors


def like(x: Tensor, grad: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Return a gradient in the placements of its parameter; zeros if there is none.

    Args:
        dtype: The dtype of the result, which is the same on all ranks; by default, zeros have the
            dtype of the parameter.
    """
    if grad is None:
        return torch.zeros_like(x, dtype=dtype)
    check_dense(x, grad)
    if isinstance(grad, DTensor) and isinstance(x, DTensor):
        grad = grad.redistribute(placements=x.placements)
    return grad if dtype is None else grad.to(dtype)


def check_dense(x: Tensor, grad: Tensor) -> None:
    """Raise if the gradient of a parameter is sparse."""
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f'the gradient of a parameter of shape {tuple(x.shape)} is sparse, but '
            'ranks add up dense ones: nn.Embedding(…, sparse=False)'
        )


def split_axes(x: Tensor) -> set[str]:
    """Return the axes of a mesh along which a tensor is split."""
    if isinstance(x, DTensor):
        return {
            name
            for name, placement in zip(x.device_mesh.mesh_dim_names or (), x.placements)
            if not placement.is_replicate()
        }
    return set()


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def is_counted(grad: Tensor, places: Mapping[str, int]) -> bool:
    """Return whether this rank counts its part of a gradient.

    Of several ranks with the same part, only the first one counts it.

    Args:
        places: The number of this rank along each axis of the mesh along which other ranks have
            the same gradient or parts of it.
    """
    split = split_axes(grad)
    return not any(place for axis, place in places.items() if axis not in split)


@torch.no_grad()
def clip(
    gradients: Sequence[Tensor],
    copies: Sequence[Tensor],
    places: Mapping[str, int],
    max_norm: float,
    norm_type: float,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """Scale gradients, in place, to a norm; return their previous norm.

    Args:
        copies: Further gradients of this rank, which another rank counts.
        norm_type: The order of the norm; ``inf`` for the largest value.

    Raises:
        ValueError: The order is 0.
    """
    parts = []
    for gradient in map(_over_ranks, gradients):
        if is_counted(gradient, places):
            parts.append(local(gradient))
    total = total_norm(parts, norm_type, group, device)
    scale = (max_norm / (total + 1e-6)).clamp(max=1)
    for gradient in (*gradients, *copies):
        local(gradient).mul_(scale.to(local(gradient).device))  # It may wait on the host.
    return total


def _over_ranks(grad: Tensor) -> Tensor:
    """Return a gradient without partial placements: no rank has a summand only."""
    if not isinstance(grad, DTensor):
        return grad
    placements = [*grad.placements]
    for axis, placement in enumerate(placements):
        if placement.is_partial():
            placements[axis] = Replicate()
    return grad.redistribute(placements=placements)
