"""Replicas: what several ranks computed of one gradient is put together to that of one process.

::

    4 ranks, groups of 2        gradient of               each rank has       one process has
    group 0: rank 0, rank 1     a sharded layer           its shard's         the mean over groups
    group 1: rank 2, rank 3     a whole layer, behind     its own samples'    the sum over a group,
                                which features are                            the mean over groups
                                gathered over a group
                                a whole layer else        its group's         the mean over groups

``DistributedDataParallel`` takes the mean over all ranks, which is right in the last row only.
"""
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchgpipe.private import ignore_in_ddp
from torchgpipe.shard import world
from torchgpipe.shard.collectives import all_reduce
from torchgpipe.shard.entries import sharded_parameters

__all__ = ['average_gradients', 'register_ddp_gathered_features',
           'register_ddp_parameters_to_ignore']


def register_ddp_parameters_to_ignore(module: nn.Module) -> list[str]:
    """Tell ``DistributedDataParallel`` to leave sharded parameters alone, which differ by rank.

    Call it with the very module that is wrapped, before that. Their gradients are averaged over
    replicas by :func:`average_gradients`. ::

        ts.register_ddp_parameters_to_ignore(model)
        model = DistributedDataParallel(model)

    Args:
        module: The module that is going to be wrapped.

    Returns:
        The names of the sharded parameters in the module.
    """
    names = list(sharded_parameters(module))
    ignore_in_ddp(module, names)
    return names


def register_ddp_gathered_features(ddp: DistributedDataParallel) -> None:
    """Tell ``DistributedDataParallel`` that features are gathered over the group behind it.

    Each rank has samples of its own, and the loss is the mean over those of the group. Then a
    rank's gradient is the part of its own samples, and parts of a group are added up, not
    averaged::

        backbone = DistributedDataParallel(backbone)
        ts.register_ddp_gathered_features(backbone)
        ...
        features = ts.distributed.gather(backbone(x), dim=0)
        loss = criterion(head(features), ts.distributed.gather(y, dim=0))

    Do not call it where nothing is gathered: where all ranks of a group see the same batch, the
    mean over all ranks is right. It is a communication hook, of which a module can have one.

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
    replicas = len(ranks) // here.tensor_size

    def add_up(group: dist.ProcessGroup,
               bucket: dist.GradBucket  # type: ignore[name-defined]
               ) -> torch.futures.Future[Tensor]:
        work = dist.all_reduce(bucket.buffer().div_(replicas), group=group, async_op=True)
        added: torch.futures.Future[Tensor] = work.get_future().then(
            lambda future: future.value()[0])
        return added

    ddp.register_comm_hook(ddp.process_group, add_up)


@torch.no_grad()
def average_gradients(module: nn.Module) -> None:
    """Average gradients over the replicas of a group, but those that DDP has averaged already.

    Call it on all ranks after the last ``backward()`` before an optimizer's step, and before
    :func:`clip_grad_norm_`. With one group it does nothing. Without ``DistributedDataParallel``,
    all gradients of the module are averaged. A gradient that some replicas do not have counts as
    zero there.

    Args:
        module: The module, with ``DistributedDataParallel`` in it or around it or without.
    """
    here = world.current()
    if here.data_size == 1:
        return
    parameters = _not_averaged(module)
    kinds = torch.tensor([_kind(parameter.grad) for parameter in parameters],
                         device=here.mesh.device_type)
    all_reduce(kinds, here.data_group, dist.ReduceOp.MAX)
    for parameter, kind in zip(parameters, kinds.tolist()):
        if kind:
            _average(parameter, kind - 1)


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
    # Backends go through a memory in its order, which may be another one on another rank.
    sent = sent.coalesce() if sparse_dims else sent.contiguous()
    all_reduce(sent, here.data_group)
    if sent is not gradient:
        gradient.copy_(sent)


def _not_averaged(module: nn.Module) -> list[Tensor]:
    """Give the parameters whose gradients no DDP within averages over all replicas."""
    replicas = {*dist.get_process_group_ranks(world.current().data_group)}
    averaged = {id(parameter)
                for ddp in module.modules() if isinstance(ddp, DistributedDataParallel)
                and replicas <= {*dist.get_process_group_ranks(ddp.process_group)}
                for name, parameter in ddp.module.named_parameters()
                if name not in ddp.parameters_to_ignore}
    return [parameter for parameter in module.parameters()
            if parameter.requires_grad and id(parameter) not in averaged]
