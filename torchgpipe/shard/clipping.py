"""Clipping: the norm of all gradients, where some of them are shards."""
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from torchgpipe.shard import world
from torchgpipe.shard.collectives import all_reduce
from torchgpipe.shard.tags import storage_dim

__all__ = ['clip_grad_norm_']


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float,
                    norm_type: float = 2.0, error_if_nonfinite: bool = False,
                    foreach: bool | None = None) -> Tensor:
    """Clip the norm of all gradients: :func:`torch.nn.utils.clip_grad_norm_` for shards.

    The norm is that of one process, the same on all ranks of a group. All of them have to call
    it, with the same parameters in the same order, after gradients were averaged
    (:func:`average_gradients`). A parameter that is given twice counts once.

    Args:
        parameters: Parameters, or one, sharded or not.
        max_norm: The norm that gradients may have afterwards.
        norm_type: The order of the norm, as ``1``, ``2`` or ``inf``.
        error_if_nonfinite: Raise on all ranks if the norm is infinite or not a number.
        foreach: See :func:`torch.nn.utils.clip_grad_norm_`.

    Returns:
        The norm before, without dimensions.

    Raises:
        RuntimeError: The norm is not finite, if that was asked for.
    """
    several = [parameters] if isinstance(parameters, Tensor) else parameters
    unique = list(dict.fromkeys(several))
    shards = [storage_dim(parameter) is not None for parameter in unique]
    if not any(shards):
        # A generator without parameters is handed on, so that PyTorch warns of it.
        return nn.utils.clip_grad_norm_(unique or several, max_norm, norm_type,
                                        error_if_nonfinite, foreach)
    norms = _norms(unique, shards, float(norm_type))
    total = nn.utils.get_total_norm(norms.unbind(), norm_type, error_if_nonfinite, foreach=False)
    nn.utils.clip_grads_with_norm_(unique, max_norm, total, foreach)
    return total


def _norms(parameters: list[Tensor], shards: list[bool], norm_type: float) -> Tensor:
    """Return the norm of each whole gradient, the same on all ranks to the last bit.

    The norm of shards is the norm of their norms, of any order. Gradients that are whole on each
    rank may differ there in the last bits, so those of the first rank count.
    """
    here = world.current()
    device = next((parameter.grad.device for parameter in parameters
                   if parameter.grad is not None), parameters[0].device)
    own = torch.stack([_norm(parameter, norm_type).to(device) for parameter in parameters])
    # A sum with zeros, as backends that can do anything on a device can do this.
    table = own.new_zeros(here.tensor_size, len(own), device=here.mesh.device_type)
    table[here.tensor_rank] = own
    all_reduce(table, here.tensor_group)
    of_shards = torch.linalg.vector_norm(table, norm_type, dim=0)
    return torch.where(torch.tensor(shards, device=table.device), of_shards, table[0]).to(device)


def _norm(parameter: Tensor, norm_type: float) -> Tensor:
    """Return the norm of a gradient; without one, what changes the norm of no other."""
    gradient = parameter.grad
    if gradient is None or not gradient.numel():
        return parameter.new_tensor(0.0 if norm_type >= 0 else float('inf'))
    norm: Tensor = torch.linalg.vector_norm(gradient, norm_type)
    return norm
