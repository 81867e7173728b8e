"""Replicas: what several ranks computed of one gradient is put together to that of one process.

::

    4 ranks, groups of 2        gradient of               each rank has       one process has
    group 0: rank 0, rank 1     a sharded layer           its shard's         the mean over groups
    group 1: rank 2, rank 3     a whole layer, behind     its own samples'    the sum over a group,
                                which features are                            the mean over groups
                                gathered over a group
                                a whole layer else        its group's         the mean over groups

``DistributedDataParallel`` takes the mean over all ranks, which is right in the last row only. It
is told of the others. All of that is right only where replicas have the same parameters.
"""
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchgpipe.private import ignore_in_ddp
from torchgpipe.shard import world
from torchgpipe.shard.collectives import all_reduce, broadcast
from torchgpipe.shard.entries import sharded_parameters
from torchgpipe.shard.rows import count_rows

__all__ = ['average_gradients', 'register_ddp_gathered_features',
           'register_ddp_parameters_to_ignore']

#: Modules whose replicas have been compared.
_compared: WeakSet[nn.Module] = WeakSet()


def register_ddp_parameters_to_ignore(module: nn.Module) -> list[str]:
    """Tell ``DistributedDataParallel`` to leave sharded parameters alone, which differ by rank.

    Call it with the very module that is wrapped, before that, and on all ranks: as DDP gives all
    ranks the parameters of the first one, this gives all replicas the shards of the first one.
    Their gradients are averaged over replicas by :func:`average_gradients`. ::

        ts.register_ddp_parameters_to_ignore(model)
        model = DistributedDataParallel(model)

    Args:
        module: The module that is going to be wrapped.

    Returns:
        The names of the sharded parameters in the module.
    """
    sharded = sharded_parameters(module)
    ignore_in_ddp(module, list(sharded))
    for parameter in dict.fromkeys(sharded.values()):
        _take_from_first(parameter)
    return list(sharded)


@torch.no_grad()
def _take_from_first(shard: Tensor) -> None:
    """Give a shard the values that it has in the first replica."""
    here = world.current()
    if here.data_size > 1 and not shard.is_meta:
        sent = shard.detach().to(here.mesh.device_type).contiguous()
        shard.copy_(broadcast(sent, here.data_group))


def register_ddp_gathered_features(ddp: DistributedDataParallel) -> None:
    """Tell ``DistributedDataParallel`` that features are gathered over the group in it or behind.

    Each rank has samples of its own, and the loss is the mean over those of the group. Then a
    rank's gradient is the part of its own samples, and parts of a group are added up, not
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
    here = world.current()
    ranks = dist.get_process_group_ranks(ddp.process_group)
    if not {*dist.get_process_group_ranks(here.tensor_group)} <= {*ranks}:
        raise ValueError(
            'gradients of gathered features are added up over the whole group, but the process '
            f'group of DistributedDataParallel has the ranks {ranks}, the group the ranks '
            f'{dist.get_process_group_ranks(here.tensor_group)}. Wrap the module without '
            'process_group=')
    count_rows(ddp)


@torch.no_grad()
def average_gradients(module: nn.Module) -> None:
    """Average gradients over the replicas of a group, but those that DDP has averaged already.

    Call it on all ranks after the last ``backward()`` before an optimizer's step, and before
    :func:`clip_grad_norm_`. With one group it does nothing. Without ``DistributedDataParallel``,
    all gradients of the module are averaged. A gradient that some replicas do not have counts as
    zero there. The first time, replicas compare their parameters.

    Args:
        module: The module, with ``DistributedDataParallel`` in it or around it or without.

    Raises:
        RuntimeError: On all ranks: a parameter has not the same values in all replicas.
    """
    here = world.current()
    if here.data_size == 1:
        return
    named = _not_averaged(module)
    if not named:
        return
    if module not in _compared:
        _compare(named)
        _compared.add(module)
    parameters = list(named.values())
    kinds = torch.tensor([_kind(parameter.grad) for parameter in parameters],
                         device=here.mesh.device_type)
    all_reduce(kinds, here.data_group, dist.ReduceOp.MAX)
    for parameter, kind in zip(parameters, kinds.tolist()):
        if kind:
            _average(parameter, kind - 1)


def _compare(parameters: dict[str, Tensor]) -> None:
    """See that replicas have the same parameters, as averaged gradients do not make them so."""
    here = world.current()
    sums = torch.stack([_checksum(parameter).to(here.mesh.device_type)
                        for parameter in parameters.values()])
    largest = all_reduce(torch.stack([sums, ~sums]), here.data_group, dist.ReduceOp.MAX)
    differs = all_reduce((largest[0] != ~largest[1]).int(), here.tensor_group, dist.ReduceOp.MAX)
    if differs.any():
        names = [name for name, other in zip(parameters, differs.tolist()) if other]
        raise RuntimeError(
            f'replicas of a group have other values of {", ".join(names)}: their gradients are '
            'not those of one model. Let all ranks make the model after the same '
            'torch.manual_seed, or load the same; or wrap it in DistributedDataParallel, after '
            'ts.register_ddp_parameters_to_ignore, which give all replicas the values of the '
            'first one')


def _checksum(parameter: Tensor) -> Tensor:
    """Return the sum of what stands in the memory of a parameter, taken for whole numbers."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}.get(parameter.itemsize, torch.int64)
    return parameter.detach().reshape(-1).view(integer).sum(dtype=torch.int64)


def _kind(gradient: Tensor | None) -> int:
    """Say what another replica has to know of a gradient that it does not have."""
    return 0 if gradient is None else 1 + (gradient.sparse_dim() if gradient.is_sparse else 0)


def _average(parameter: Tensor, sparse_dims: int) -> None:
    here = world.current()
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter).to_sparse(sparse_dims) if sparse_dims else (
            torch.zeros_like(parameter))
    gradient = parameter.grad
    sent = gradient.div_(here.data_size)
    if sent.device.type != here.mesh.device_type:
        sent = sent.to(here.mesh.device_type)
    if not sparse_dims:
        # Backends go through a memory in its order, which may be another one on another rank.
        sent = sent.contiguous()
    all_reduce(sent, here.data_group)
    if sent is not gradient:
        gradient.copy_(sent)


def _not_averaged(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that no DDP within averages over all replicas, by their names."""
    replicas = {*dist.get_process_group_ranks(world.current().data_group)}
    averaged = {id(parameter)
                for ddp in module.modules() if isinstance(ddp, DistributedDataParallel)
                and replicas <= {*dist.get_process_group_ranks(ddp.process_group)}
                for name, parameter in ddp.module.named_parameters()
                if name not in ddp.parameters_to_ignore}
    return {name: parameter for name, parameter in module.named_parameters()
            if parameter.requires_grad and id(parameter) not in averaged}
