"""Clipping: the norm of gradients that ranks have in parts.

The norm of a gradient is the norm of its parts' norms, for any order. So each rank computes the
norms of its parts, and one sum of tables exchanges them::

    rank 0   [ a  0 ] ─┐                    ┌─▶ norm of [ a  b ]
    rank 1   [ 0  b ] ─┴─▶ sum  [ a  b ] ───┴─▶ the same, to the last bit

A sum passes on a norm that is not a number. A maximum does not: gloo drops it, depending on the
order of the ranks.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchgpipe.shard.collectives import all_reduce
from torchgpipe.shard.parameter import storage_dim
from torchgpipe.shard.world import current


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the norm of all gradients: :func:`torch.nn.utils.clip_grad_norm_` for shards.

    The norm equals the norm in one process, and is the same on all ranks of a group. All of them
    have to call it, with the same parameters in the same order, after gradients were averaged
    (``average_gradients``). A parameter that is given twice counts once.

    Args:
        parameters: Parameters, or one, sharded or not.
        max_norm: The largest norm of the gradients afterwards.
        norm_type: The order of the norm, such as ``1``, ``2`` or ``inf``.
        error_if_nonfinite: Raise on all ranks if the norm is infinite or not a number.
        foreach: See :func:`torch.nn.utils.clip_grad_norm_`.

    Returns:
        The previous norm, without dimensions.

    Raises:
        RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set.
    """
    several = [parameters] if isinstance(parameters, Tensor) else parameters
    unique = list(dict.fromkeys(several))
    is_shard = [storage_dim(parameter) is not None for parameter in unique]
    if not any(is_shard):
        # A generator without parameters is passed on, so that PyTorch warns about it.
        return nn.utils.clip_grad_norm_(
            unique or several, max_norm, norm_type, error_if_nonfinite, foreach
        )

    order = float(norm_type)
    with_gradients = [parameter for parameter in unique if parameter.grad is not None]
    device = (with_gradients or unique)[0].device
    norms = []
    for parameter in unique:
        gradient = parameter.new_empty(0) if parameter.grad is None else parameter.grad
        norms.append(_norm(gradient, order).to(device))

    world = current()
    table = _by_rank(torch.stack(norms), world.tensor_group, world.mesh.device_type)
    # Full gradients may differ in the last bits, so the first rank's gradients count.
    full_norms = torch.where(
        torch.tensor(is_shard, device=table.device),
        torch.linalg.vector_norm(table, order, dim=0),
        table[0],
    ).to(device)

    total = nn.utils.get_total_norm(
        full_norms.unbind(), norm_type, error_if_nonfinite, foreach=False
    )
    nn.utils.clip_grads_with_norm_(unique, max_norm, total, foreach)
    return total


def total_norm(
    parts: Iterable[Tensor],
    norm_type: float,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """Return the norm of the parts of gradients on all ranks of a group, in float64.

    Raises:
        ValueError: The order is 0. PyTorch counts gradients then, but parts are not gradients.
    """
    order = float(norm_type)
    if not order:
        raise ValueError(
            'the norm of gradients of which ranks have parts has an order other than 0: '
            'use norm_type=2.0, say'
        )
    norms = [torch.full((), _neutral(order), dtype=torch.float64, device=device)]
    for part in parts:
        norms.append(_norm(part, order).to(device, torch.float64))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
    if group is not None:
        total = torch.linalg.vector_norm(_by_rank(total[None], group, device), order)
    return total


def _norm(gradient: Tensor, order: float) -> Tensor:
    if not gradient.numel():  # An empty tensor has no maximum.
        return gradient.new_tensor(_neutral(order))
    norm: Tensor = torch.linalg.vector_norm(gradient, order)
    return norm


def _neutral(order: float) -> float:
    """Return a value that does not change a norm of norms."""
    return 0.0 if order >= 0 else float('inf')


def _by_rank(norms: Tensor, group: dist.ProcessGroup, device: torch.device | str) -> Tensor:
    """Return the norms of all ranks of a group, a row per rank."""
    table = norms.new_zeros(group.size(), len(norms), device=device)
    table[group.rank()] = norms
    return all_reduce(table, group)
