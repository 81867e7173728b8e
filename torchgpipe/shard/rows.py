"""Rows: samples that each rank has of its own until they are gathered, in DDP.

::

                     own rows ──▶ backbone ──▶ gather ──▶ layers behind ──▶ loss of all rows
    its gradient                  of own rows    │        of all rows
    of one process                the sum        │        what each rank has
    by DDP                        1/n of it      │        the mean over the group: the same
                                         × n ◀───┘

The n ranks of a group have the same loss. Behind the gather they have the same gradients, whose
mean, which ``DistributedDataParallel`` takes, is right. In front of it a rank has a term of the
gradient, and one process the sum over the group: n times the mean. So a gradient is multiplied by
n on its way back from where rows meet, and each parameter is right, wherever it is used.

They meet in a gather within the forward pass, or else behind it, and then its outputs are rows.
"""
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchgpipe.private import active_ddp
from torchgpipe.shard.world import current
from torchgpipe.structure import flatten

__all__ = ['count_rows', 'counted', 'of_own_rows']

#: Modules in a forward pass with gradients, and whether rows have met in it.
_met: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def count_rows(ddp: DistributedDataParallel) -> None:
    """Let gradients of rows count n times, where they meet in a module or behind it."""
    ddp.register_forward_pre_hook(_begin)
    ddp.register_forward_hook(_end)


def _begin(ddp: nn.Module, args: Any) -> None:
    _met.pop(ddp, None)
    if torch.is_grad_enabled():
        _met[ddp] = False


def _end(ddp: nn.Module, args: Any, output: Any) -> Any:
    if _met.pop(ddp, True):
        return None
    try:
        tensors, structure = flatten(output)
    except TypeError as error:
        raise TypeError(
            'features are gathered behind DistributedDataParallel, which gives '
            f'{type(output).__name__} with something in it that is no tensor, tuple, list, dict, '
            'dataclass or plain value, so that its features can not be found: let it give '
            'tensors') from error
    return structure([counted(x) if _is_of_rows(x) else x for x in tensors])


def _is_of_rows(x: Tensor) -> bool:
    """Return whether an output may be gathered: it is computed, and not a loss or a scale."""
    return x.grad_fn is not None and x.dim() > 0


def of_own_rows(x: Tensor, dim: int) -> bool:
    """Return whether these are rows of this rank's own, in a module that counts them.

    The last dimension is that of features, which sharded layers split.

    Raises:
        ValueError: Autograd does not see that they are gathered.
    """
    ddp = active_ddp()
    if ddp is None or ddp not in _met or x.dim() > 1 and dim in (-1, x.dim() - 1):
        return False
    if not torch.is_grad_enabled():
        raise ValueError(
            'rows are gathered within DistributedDataParallel where no gradient is recorded, and '
            'it can not be told what a gradient has to count: under torch.no_grad, in a '
            'checkpoint or in a pipeline. Use checkpoint(…, use_reentrant=False), or gather '
            'behind DistributedDataParallel; what needs no gradient goes by '
            'torch.distributed.all_gather')
    _met[ddp] = True
    return x.requires_grad


def counted(x: Tensor) -> Tensor:
    """Return a tensor whose gradient counts n times, for the n ranks of the group."""
    n = current().tensor_size
    same = x.view_as(x)
    same.register_hook(lambda gradient: gradient * n)
    return same
