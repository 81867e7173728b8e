"""Within ``DistributedDataParallel``: shards are not averaged, gathered rows have a factor.

When it wraps a module, DDP copies the first rank's parameters to all ranks, except parameters that
it was told to ignore. Shards would be overwritten silently, so the first forward pass checks that
DDP ignores them.

DDP takes the mean of gradients over all ranks. This is too small if each rank has its own rows
until these are gathered::

                     own rows ──▶ backbone ──▶ gather ──▶ layers behind ──▶ loss of all rows
    its gradient                  of own rows    │        of all rows
    of one process                the sum        │        what each rank has
    by DDP                        1/n of it      │        the mean over the group: the same
                                         × n ◀───┘

The n ranks of a group have the same loss. Behind the gather they have the same gradients, whose
mean is correct. Before the gather, a rank has one term of the gradient, and one process has the
sum over the group, which is n times the mean. So the backward of the gather multiplies gradients
by n, and each parameter's gradient is correct wherever it is used. The gather is within the
forward pass, or behind it. In the second case, the outputs of the module are the rows.
"""

from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchgpipe.base.private import active_ddp, ignore_in_ddp
from torchgpipe.base.structure import flatten
from torchgpipe.shard.collectives import broadcast
from torchgpipe.shard.parameter import sharded_parameters, storage_dim
from torchgpipe.shard.world import current

_checked: WeakSet[nn.Module] = WeakSet()

#: Modules in a forward pass with gradients, and whether rows were gathered in it.
_gathered: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def register_ddp_parameters_to_ignore(module: nn.Module) -> list[str]:
    """Make ``DistributedDataParallel`` ignore sharded parameters, which differ by rank.

    Call it on all ranks, before wrapping, with the same module that is wrapped. It copies the
    shards of the first replica to all replicas, as DDP does with other parameters. Use
    :func:`average_gradients` to average the gradients of shards over replicas. ::

        ts.register_ddp_parameters_to_ignore(model)
        model = DistributedDataParallel(model)

    Args:
        module: The module to be wrapped.

    Returns:
        The names of the sharded parameters in the module.
    """
    sharded = sharded_parameters(module)
    ignore_in_ddp(module, list(sharded))
    world = current()
    for shard in dict.fromkeys(shard for _, shard in sorted(sharded.items(), key=itemgetter(0))):
        if world.data_size > 1 and not shard.is_meta:
            sent = shard.detach().to(world.mesh.device_type).contiguous()
            shard.detach().copy_(broadcast(sent, world.data_group))
    return list(sharded)


def check_wrapped() -> None:
    """Raise in the first forward pass of a DDP that treats shards as copies of one tensor."""
    ddp = active_ddp()
    if ddp is None or ddp in _checked:
        return
    wrapped = {*dist.get_process_group_ranks(ddp.process_group)}
    taken = [
        name
        for name, parameter in ddp.module.named_parameters()
        if storage_dim(parameter) is not None and name not in ddp.parameters_to_ignore
    ]
    if taken and len(wrapped & {*dist.get_process_group_ranks(current().tensor_group)}) > 1:
        raise ValueError(
            f'DistributedDataParallel has given all ranks the shards of one: {", ".join(taken)}. '
            'Make the model anew and call ts.register_ddp_parameters_to_ignore, before it is '
            'wrapped, with the very module that is wrapped; or wrap it with process_group='
            'ts.distributed.get_data_group()'
        )
    _checked.add(ddp)


# --- gathered rows
# ----------------------------------------------------------------------------------


def register_ddp_gathered_features(ddp: DistributedDataParallel) -> None:
    """Add up gradients over a group whose features are gathered, in the wrapped module or behind.

    Each rank has its own samples, and the loss is the mean over the samples of the group. Then
    a rank's gradient is the term of its own samples, and the terms of a group are added up, not
    averaged::

        backbone = DistributedDataParallel(backbone)
        ts.register_ddp_gathered_features(backbone)
        ...
        features = ts.distributed.gather(backbone(x), dim=0)
        loss = criterion(head(features), ts.distributed.gather(y, dim=0))

    The wrapped module may include the gather, and layers behind it. The gather is a
    :func:`ts.distributed.gather` along any dimension except the last one. If the forward pass has
    no gather, all computed outputs with a dimension are treated as gathered behind the module.

    Do not call it if nothing is gathered. If all ranks of a group have the same batch, the mean
    over all ranks is correct.

    Args:
        ddp: The wrapped module. Its process group consists of whole groups, such as all ranks.

    Raises:
        ValueError: Its process group has only some ranks of this group.
    """
    ranks = dist.get_process_group_ranks(ddp.process_group)
    group_ranks = dist.get_process_group_ranks(current().tensor_group)
    if not {*group_ranks} <= {*ranks}:
        raise ValueError(
            'gradients of gathered features are added up over the whole group, but the process '
            f'group of DistributedDataParallel has the ranks {ranks}, the group the ranks '
            f'{group_ranks}. Wrap the module without process_group='
        )
    ddp.register_forward_pre_hook(_begin)
    ddp.register_forward_hook(_end)


def _begin(ddp: nn.Module, args: Any) -> None:
    _gathered.pop(ddp, None)
    if torch.is_grad_enabled():
        _gathered[ddp] = False


def _end(ddp: nn.Module, args: Any, output: Any) -> Any:
    """Count outputs that may be gathered: computed tensors that are not a loss or a scale."""
    if _gathered.pop(ddp, True):
        return None
    try:
        tensors, structure = flatten(output)
    except TypeError as error:
        raise TypeError(
            'features are gathered behind DistributedDataParallel, which gives '
            f'{type(output).__name__} with something in it that is no tensor, tuple, list, dict, '
            'dataclass or plain value, so that its features cannot be found: let it give '
            'tensors'
        ) from error
    return structure([counted(x) if x.grad_fn is not None and x.dim() else x for x in tensors])


def has_local_rows(x: Tensor, dim: int) -> bool:
    """Return whether a tensor has this rank's own rows, in a module that counts them.

    The last dimension has the features, which sharded layers split.

    Raises:
        ValueError: Autograd does not record the gather.
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
            'torch.distributed.all_gather'
        )
    _gathered[ddp] = True
    return x.requires_grad


def counted(x: Tensor) -> Tensor:
    """Return a tensor whose gradient is multiplied by n, the number of ranks of the group."""
    n = current().tensor_size
    same = x.view_as(x)
    same.register_hook(lambda gradient: gradient * n)
    return same
