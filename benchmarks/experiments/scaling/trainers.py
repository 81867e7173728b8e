"""The gradients of a mini-batch in one process of a mesh: by torchgpipe, and by PyTorch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.experiments.scaling.meshes import ALONE, TORCHGPIPE, Contender, Work
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.trainer.gpt import Block

#: Returns the context of a micro-batch, or of a mini-batch, after which gradients may be reduced.
Context = Callable[[bool], AbstractContextManager[object]]

#: Computes the gradients of a mini-batch, after which they may be reduced.
Compute = Callable[[bool], Tensor | None]


class Trainer(NamedTuple):
    """The model of a process.

    Attributes:
        model: The module with the parameters of this process.
        gradients: Computes them, and returns the mean loss of the samples of this replica, or of
            all; ``None`` in a process without the loss. The argument is whether to reduce them.
        axes: The axis of each process group, by its name.
    """

    model: nn.Module
    gradients: Compute
    axes: dict[str, str]


def trainer(contender: Contender, work: Work, device: torch.device) -> Trainer:
    """Create the model of a contender. All processes of the mesh call it."""
    if contender == ALONE:
        module, share = work.model().to(device), work._replace(batch=work.alone)
        return Trainer(module, _loop(module, share, 0, 1, device), {})
    data, pipe, tensor = contender.mesh.axes.values()
    mesh = init_mesh(data, pipe, tensor, device_type=device.type)
    axes = {
        str(mesh.get_group(axis).group_name): axis
        for axis, size in contender.mesh.axes.items()
        if size > 1
    }
    model, gradients = _MAKERS[contender.library](contender, work, mesh, device)
    if isinstance(model, DistributedGPipe):
        # Its messages have groups of their own.
        for edge, group in model._rank.edges.groups.items():
            if get_rank() in edge:
                axes[str(group.group_name)] = 'pipe'
    return Trainer(model, gradients, axes)


Made = tuple[nn.Module, Compute]


def _samples(work: Work, mesh: DeviceMesh, device: torch.device) -> tuple[Tensor, Tensor]:
    place = mesh.get_local_rank('data')
    x, y = work.samples(place, mesh['data'].size())
    return x.to(device), y.to(device)


def _pipeline(contender: Contender, work: Work, mesh: DeviceMesh, device: torch.device) -> Made:
    model = DistributedGPipe(work.model(), mesh=mesh, **work.options(contender.mesh))
    samples = _samples(work, mesh, device)

    def gradients(reduces: bool) -> Tensor | None:
        with nullcontext() if reduces else model.no_sync():
            loss: Tensor = model.step(*samples, work.loss_of, schedule='1f1b')
        return loss

    return model, gradients


def _ddp(contender: Contender, work: Work, mesh: DeviceMesh, device: torch.device) -> Made:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(work.model().to(device), process_group=mesh.get_group('data'))
    return model, _loop(
        model,
        work,
        mesh.get_local_rank('data'),
        contender.mesh.data,
        device,
        lambda reduces: nullcontext() if reduces else model.no_sync(),
    )


def _fsdp(contender: Contender, work: Work, mesh: DeviceMesh, device: torch.device) -> Made:
    model: Any = _sharded(work.model().to(device), mesh)

    def context(reduces: bool) -> AbstractContextManager[object]:
        model.set_requires_gradient_sync(reduces)
        return nullcontext()

    return model, _loop(
        model, work, mesh.get_local_rank('data'), contender.mesh.data, device, context
    )


def _sharded(module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shard each block, and all other parameters as the root's."""
    from torch.distributed.fsdp import fully_shard

    for block in [child for child in module.modules() if isinstance(child, Block)]:
        fully_shard(block, mesh=mesh['data'], **options)
    fully_shard(module, mesh=mesh['data'], **options)
    return module


def _pipelining(contender: Contender, work: Work, mesh: DeviceMesh, device: torch.device) -> Made:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    j, n = mesh.get_local_rank('pipe'), contender.mesh.pipe
    balance = work.balance(n)
    begin = sum(balance[:j])
    module: nn.Module = work.model()[begin : begin + balance[j]].to(device)
    if contender.mesh.shard:  # Users of pipelines keep parameters until the end of backward.
        module = _sharded(module, mesh, reshard_after_forward=False)
    stage = PipelineStage(module, j, n, device, group=mesh.get_group('pipe'))
    m = work.chunks(contender.mesh.data)
    # The schedule divides all gradients at its end, also the ones of earlier mini-batches.
    divides_losses = work.accumulated > 1

    def loss_of(scores: Tensor, target: Tensor) -> Tensor:
        loss = work.loss_of(scores, target)
        return loss / m if divides_losses else loss

    schedule = Schedule1F1B(stage, m, loss_fn=loss_of, scale_grads=not divides_losses)
    x, y = _samples(work, mesh, device)

    def gradients(reduces: bool) -> Tensor | None:
        losses: list[Tensor] = []
        schedule.step(
            *[x] * (j == 0),
            target=y if j == n - 1 else None,
            losses=losses if j == n - 1 else None,
            return_outputs=False,
        )
        if not losses:
            return None
        return torch.stack(losses).sum().detach() / (1 if divides_losses else m)

    return module, gradients


_MAKERS = {
    TORCHGPIPE: _pipeline,
    'DDP': _ddp,
    'FSDP2': _fsdp,
    'pipelining': _pipelining,
    'pipelining + FSDP2': _pipelining,
}


def _loop(
    model: nn.Module,
    work: Work,
    place: int,
    replicas: int,
    device: torch.device,
    context: Context = lambda reduces: nullcontext(),
) -> Compute:
    """Return a function that trains on one micro-batch after the other.

    Args:
        model: The model.
        work: The mini-batch of all replicas.
        place: The number of this replica.
        replicas: The number of replicas.
        device: The device of this process.
        context: The context of a micro-batch.
    """
    m = work.chunks(replicas)
    x, y = (tensor.to(device).chunk(m) for tensor in work.samples(place, replicas))
    return partial(_gradients, model, [*zip(x, y)], work.loss_of, context)


def _gradients(
    model: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    context: Context,
    reduces: bool,
) -> Tensor:
    losses = []
    for i, (x, y) in enumerate(batches):
        with context(reduces and i == len(batches) - 1):
            loss = loss_of(model(x), y) / len(batches)
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()
