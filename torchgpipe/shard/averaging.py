"""Gradients before a step: mean over replicas, and loss scale.

::

    4 ranks, groups of 2        gradient of               each rank has       one process has
    group 0: rank 0, rank 1     a sharded layer           its shard's         the mean over groups
    group 1: rank 2, rank 3     a plain layer, behind     its own samples'    the sum over a group,
                                which features are                            the mean over groups
                                gathered over a group
                                a plain layer else        its group's         the mean over groups
    experts that are spread   the sum over all    the mean over groups: a part of the sum

``DistributedDataParallel`` takes the mean over all ranks, which is correct only for a plain layer
without gathered features. It has to be told about the others. All of this is correct only if
replicas have the same parameters.
"""

from collections.abc import Mapping
from operator import itemgetter
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchgpipe.base.private import Scaler
from torchgpipe.shard.collectives import all_reduce, gathered
from torchgpipe.shard.digests import differing, digests_of
from torchgpipe.shard.nn.experts import Experts
from torchgpipe.shard.world import current, device_type, is_initialized

#: Modules whose replicas have been compared.
_compared: WeakSet[nn.Module] = WeakSet()


@torch.no_grad()
def average_gradients(module: nn.Module) -> None:
    """Average gradients over the replicas of a group, if DDP has not averaged them already.

    Call it on all ranks after the last ``backward()`` before an optimizer's step, and before
    ``clip_grad_norm_``. With one group it does nothing. Without ``DistributedDataParallel``, all
    gradients of the module are averaged. A gradient that some replicas do not have counts as zero
    there. The gradients of spread experts are sums over replicas, and are divided. The first
    time, replicas compare their parameters.

    Args:
        module: The module, with ``DistributedDataParallel`` in it or around it, or without.

    Raises:
        RuntimeError: A parameter does not have the same values in all replicas. All ranks raise
            this error.
    """
    world = current()
    if world.data_size == 1:
        return
    parameters = _not_averaged(module)
    for layer in module.modules():
        if isinstance(layer, Experts) and layer.communicates:
            for weight in layer.spread_parameters():
                parameters.pop(weight, None)
                if weight.grad is not None:
                    weight.grad.div_(world.data_size)
    if not parameters:
        return
    if module not in _compared:
        _compare({name: parameter for parameter, name in parameters.items()})
        _compared.add(module)

    kinds = torch.tensor(
        [_kind(parameter.grad) for parameter in parameters], device=world.mesh.device_type
    )
    all_reduce(kinds, world.data_group, dist.ReduceOp.MAX)
    for parameter, kind in zip(parameters, kinds.tolist()):
        if kind:
            _average(parameter, kind - 1)


def _compare(parameters: Mapping[str, Tensor]) -> None:
    """Check that replicas have the same parameters; averaging gradients cannot ensure it."""
    world = current()
    device = torch.device(world.mesh.device_type)
    different = differing(digests_of(parameters), world.data_group, device)
    names: dict[str, None] = {}
    for rank_names in gathered(different, world.tensor_group):
        names.update(dict.fromkeys(rank_names))
    if names:
        raise RuntimeError(
            f'replicas of a group have other values of {", ".join(names)}: their gradients are '
            'not those of one model. Let all ranks make the model after the same '
            'torch.manual_seed, or load the same; or wrap it in DistributedDataParallel, after '
            'ts.register_ddp_parameters_to_ignore, which give all replicas the values of the '
            'first one'
        )


def _kind(gradient: Tensor | None) -> int:
    """Return the kind of a gradient, for replicas without it: none, dense, or its sparse dims."""
    if gradient is None:
        return 0
    if gradient.is_sparse:
        return 1 + gradient.sparse_dim()
    return 1


def _average(parameter: Tensor, sparse_dims: int) -> None:
    world = current()
    if parameter.grad is None:
        zeros = torch.zeros_like(parameter)
        parameter.grad = zeros.to_sparse(sparse_dims) if sparse_dims else zeros
    sent = parameter.grad.div_(world.data_size)
    if sent.device.type != world.mesh.device_type:
        sent = sent.to(world.mesh.device_type)
    if not sparse_dims:
        # Backends process memory in its order, which may differ between ranks.
        sent = sent.contiguous()
    all_reduce(sent, world.data_group)
    if sent is not parameter.grad:
        parameter.grad.copy_(sent)


def _not_averaged(module: nn.Module) -> dict[Tensor, str]:
    """Return the parameters that no inner DDP averages over all replicas, with their first names.

    They are in the order of names, because ranks may register them in different orders.
    """
    replicas = {*dist.get_process_group_ranks(current().data_group)}
    averaged = set()
    for ddp in module.modules():
        if isinstance(ddp, DistributedDataParallel):
            if not replicas <= {*dist.get_process_group_ranks(ddp.process_group)}:
                continue
            for name, parameter in ddp.module.named_parameters():
                if name not in ddp.parameters_to_ignore:
                    averaged.add(parameter)
    names: dict[Tensor, str] = {}
    by_name = sorted(module.named_parameters(remove_duplicate=False), key=itemgetter(0))
    for name, parameter in by_name:
        if parameter.requires_grad and parameter not in averaged:
            names.setdefault(parameter, name)
    return names


# --- the scale
# ----------------------------------------------------------------------------------


class GradScaler(Scaler):
    """:class:`torch.amp.GradScaler` for many processes: all ranks skip a step, or none does.

    A gradient that is not finite in one shard is found on one rank only. That rank would skip the
    step and reduce the scale; the others would take the step, and continue with another scale. So
    ranks exchange the result, once for each optimizer and step. Without parallel groups, all
    processes do. A rank without parameters makes an optimizer of ``[torch.zeros(())]``. An
    optimizer may have parts of split layers (DTensors) and plain parameters, which PyTorch's
    scalers do not support together. ::

        scaler = ts.GradScaler()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        ts.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    Args:
        See :class:`torch.amp.GradScaler`.
    """

    def found(
        self, where: dict[torch.device, Tensor], scale: Tensor
    ) -> dict[torch.device, Tensor]:
        """Return the result over all ranks, in place of the results on this rank's devices."""
        flags = [torch.zeros_like(scale)]
        for flag in where.values():
            flags.append(flag.to(scale))
        groups, device_type = _ranks_of_a_step()
        any_found = torch.stack(flags).amax(0).to(device_type)
        for group in groups:
            all_reduce(any_found, group, dist.ReduceOp.MAX)
        return {scale.device: any_found.to(scale.device)}

    @torch.no_grad()
    def parts(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return an object with the local parts of an optimizer's parameters and gradients."""
        from torchgpipe.shard.sums import local  # Its import of DTensor takes time.

        parameters = []
        for group in optimizer.param_groups:
            for x in group['params']:
                gradient = None if x.grad is None else local(x.grad)
                if gradient is x.grad:
                    parameters.append(x)
                else:
                    part = local(x).detach()
                    part.grad = gradient
                    parameters.append(part)
        return SimpleNamespace(param_groups=[{'params': parameters}])


def _ranks_of_a_step() -> tuple[list[dist.ProcessGroup], str]:
    """Return the groups that together have all ranks of a step, and the type of their devices."""
    if is_initialized():
        world = current()
        return [world.tensor_group, world.data_group], world.mesh.device_type
    if dist.is_initialized():
        assert dist.group.WORLD is not None
        return [dist.group.WORLD], device_type()
    return [], 'cpu'
