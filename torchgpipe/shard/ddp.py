"""Within ``DistributedDataParallel``: shards are not averaged, gathered rows have a factor.

When it wraps a module, it sets the parameters of all ranks to those of the first one, but for
those that it was told to leave alone. Shards would be overwritten without a word, so the first
forward pass checks that it was told.

It takes the mean of gradients over all ranks, which is too little where ranks have rows of their
own until these are gathered::

                     own rows ──▶ backbone ──▶ gather ──▶ layers behind ──▶ loss of all rows
    its gradient                  of own rows    │        of all rows
    of one process                the sum        │        what each rank has
    by DDP                        1/n of it      │        the mean over the group: the same
                                         × n ◀───┘

The n ranks of a group have the same loss. Behind the gather they have the same gradients, whose
mean is right. In front of it a rank has a term of the gradient, and one process the sum over the
group: n times the mean. So a gradient is multiplied by n on its way back from the gather, and each
parameter is right, wherever it is used. The gather is within the forward pass, or else behind it,
and then what the module returns are the rows.
"""
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchgpipe.base.private import active_ddp, ignore_in_ddp
from torchgpipe.base.structure import flatten
from torchgpipe.shard.collectives import broadcast
from torchgpipe.shard.tags import sharded_parameters, storage_dim
from torchgpipe.shard.world import current

__all__ = ['check_wrapped', 'counted', 'of_own_rows', 'register_ddp_gathered_features',
           'register_ddp_parameters_to_ignore']

_checked: WeakSet[nn.Module] = WeakSet()

#: Modules in a forward pass with gradients, and whether rows were gathered in it.
_gathered: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def register_ddp_parameters_to_ignore(module: nn.Module) -> list[str]:
    """Tell ``DistributedDataParallel`` to leave sharded parameters alone, which differ by rank.

    Call it with the very module that is wrapped, before that, and on all ranks: as DDP sets the
    parameters of all ranks to those of the first one, this sets the shards of all replicas to
    those of the first one. Their gradients are averaged over replicas by
    :func:`average_gradients`. ::

        ts.register_ddp_parameters_to_ignore(model)
        model = DistributedDataParallel(model)

    Args:
        module: The module that is going to be wrapped.

    Returns:
        The names of the sharded parameters in the module.
    """
    sharded = sharded_parameters(module)
    ignore_in_ddp(module, list(sharded))
    here = current()
    for shard in dict.fromkeys(sharded.values()):
        if here.data_size > 1 and not shard.is_meta:
            sent = shard.detach().to(here.mesh.device_type).contiguous()
            shard.detach().copy_(broadcast(sent, here.data_group))
    return list(sharded)


def check_wrapped() -> None:
    """Raise in the first forward pass of a DDP for which shards are copies of one tensor."""
    ddp = active_ddp()
    if ddp is None or ddp in _checked:
        return
    wrapped = {*dist.get_process_group_ranks(ddp.process_group)}
    taken = [name for name, parameter in ddp.module.named_parameters()
             if storage_dim(parameter) is not None and name not in ddp.parameters_to_ignore]
    if taken and len(wrapped & {*dist.get_process_group_ranks(current().tensor_group)}) > 1:
        raise ValueError(
            f'DistributedDataParallel has given all ranks the shards of one: {", ".join(taken)}. '
            'Make the model anew and call ts.register_ddp_parameters_to_ignore, before it is '
            'wrapped, with the very module that is wrapped; or wrap it with process_group='
            'ts.distributed.get_data_group()')
    _checked.add(ddp)


# --- gathered rows
# ----------------------------------------------------------------------------------


def register_ddp_gathered_features(ddp: DistributedDataParallel) -> None:
    """Tell ``DistributedDataParallel`` that features are gathered over the group in it or behind.

    Each rank has samples of its own, and the loss is the mean over those of the group. Then a
    rank's gradient is the term of its own samples, and terms of a group are added up, not
    averaged::

        backbone = DistributedDataParallel(backbone)
        ts.register_ddp_gathered_features(backbone)
        ...
        features = ts.distributed.gather(backbone(x), dim=0)
        loss = criterion(head(features), ts.distributed.gather(y, dim=0))

    What is behind the gather may be in the wrapped module, too, and so may the gather, a
    :func:`ts.distributed.gather` along any dimension but the last one. If there is none in its
    forward pass, its outputs are gathered: all that are computed and have a dimension.

    Do not call it where nothing is gathered: where all ranks of a group see the same batch, the
    mean over all ranks is right.

    Args:
        ddp: The wrapped module. Its process group is made of whole groups, as that of all ranks.

    Raises:
        ValueError: Its process group has some ranks of this group only.
    """
    ranks = dist.get_process_group_ranks(ddp.process_group)
    own = dist.get_process_group_ranks(current().tensor_group)
    if not {*own} <= {*ranks}:
        raise ValueError(
            'gradients of gathered features are added up over the whole group, but the process '
            f'group of DistributedDataParallel has the ranks {ranks}, the group the ranks '
            f'{own}. Wrap the module without process_group=')
    ddp.register_forward_pre_hook(_begin)
    ddp.register_forward_hook(_end)


def _begin(ddp: nn.Module, args: Any) -> None:
    _gathered.pop(ddp, None)
    if torch.is_grad_enabled():
        _gathered[ddp] = False


def _end(ddp: nn.Module, args: Any, output: Any) -> Any:
    """Count outputs that may be gathered: those that are computed, and are no loss or scale."""
    if _gathered.pop(ddp, True):
        return None
    try:
        tensors, structure = flatten(output)
    except TypeError as error:
        raise TypeError(
            'features are gathered behind DistributedDataParallel, which gives '
            f'{type(output).__name__} with something in it that is no tensor, tuple, list, dict, '
            'dataclass or plain value, so that its features cannot be found: let it give '
            'tensors') from error
    return structure([counted(x) if x.grad_fn is not None and x.dim() else x for x in tensors])


def of_own_rows(x: Tensor, dim: int) -> bool:
    """Return whether these are rows of this rank's own, in a module that counts them.

    The last dimension is that of features, which sharded layers split.

    Raises:
        ValueError: Autograd does not see that they are gathered.
    """
    ddp = active_ddp()
    if ddp is None or ddp not in _gathered or x.dim() > 1 and dim in (-1, x.dim() - 1):
        return False
    if not torch.is_grad_enabled():
        raise ValueError(
            'rows are gathered within DistributedDataParallel where no gradient is recorded, and '
            'it cannot be told what a gradient has to count: under torch.no_grad, in a '
            'checkpoint or in a pipeline. Use checkpoint(…, use_reentrant=False), or gather '
            'behind DistributedDataParallel; what needs no gradient goes by '
            'torch.distributed.all_gather')
    _gathered[ddp] = True
    return x.requires_grad


def counted(x: Tensor) -> Tensor:
    """Return a tensor whose gradient counts n times, for the n ranks of the group."""
    n = current().tensor_size
    same = x.view_as(x)
    same.register_hook(lambda gradient: gradient * n)
    return same
