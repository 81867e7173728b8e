"""The gradients of a mini-batch in one process of a mesh: by torchgpipe, and by PyTorch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.experiments.scaling.meshes import ALONE, TORCHGPIPE, Contender, Work, loss_of
from benchmarks.models.gpt import Block
from torchgpipe.distributed import DistributedGPipe, init_mesh

#: Returns the context of a micro-batch, which may be the last one.
Context = Callable[[bool], AbstractContextManager[object]]


class Trainer(NamedTuple):
    """The model of a process.

    Attributes:
        model: The module with the parameters of this process.
        gradients: Computes them, and returns the mean loss of the samples of this replica, or of
            all; ``None`` in a process without the loss.
        axes: The axis of each process group, by its name.
    """

    model: nn.Module
    gradients: Callable[[], Tensor | None]
    axes: dict[str, str]


def trainer(contender: Contender, work: Work, device: torch.device) -> Trainer:
    """Create the model of a contender. All processes of the mesh call it."""
    if contender == ALONE:
        module, own = work.model().to(device), work._replace(batch=work.alone)
        return Trainer(module, _loop(module, own, 0, 1, device), {})
    data, pipe, tensor = contender.mesh.axes.values()
    mesh = init_mesh(data, pipe, tensor, device_type=device.type)
    axes = {
        str(mesh.get_group(axis).group_name): axis
        for axis, size in contender.mesh.axes.items()
        if size > 1
    }
    model, gradients = _MAKERS[contender.library](contender, work, mesh, device)
    return Trainer(model, gradients, axes)


Made = tuple[nn.Module, Callable[[], Tensor | None]]


def _samples(work: Work, mesh: DeviceMesh, device: torch.device) -> tuple[Tensor, Tensor]:
    place = mesh.get_local_rank('data')
    x, y = work.samples(place, mesh['data'].size())
    return x.to(device), y.to(device)


def _pipeline(contender: Contender, work: Work, mesh: DeviceMesh, device: torch.device) -> Made:
    model = DistributedGPipe(work.model(), mesh=mesh, **work.options(contender.mesh))
    samples = _samples(work, mesh, device)
    return model, partial(model.step, *samples, loss_of, schedule='1f1b')


def _ddp(contender: Contender, work: Work, mesh: DeviceMesh, device: torch.device) -> Made:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(work.model().to(device), process_group=mesh.get_group('data'))
    return model, _loop(
        model,
        work,
        mesh.get_local_rank('data'),
        contender.mesh.data,
        device,
        lambda last: nullcontext() if last else model.no_sync(),
    )


def _fsdp(contender: Contender, work: Work, mesh: DeviceMesh, device: torch.device) -> Made:
    model: Any = _sharded(work.model().to(device), mesh)

    def context(last: bool) -> AbstractContextManager[object]:
        model.set_requires_gradient_sync(last)
        return nullcontext()

    return model, _loop(
        model, work, mesh.get_local_rank('data'), contender.mesh.data, device, context
    )


def _sharded(module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shard each block, and all other parameters as the root's."""
    from torch.distributed.fsdp import fully_shard

    for block in [each for each in module.modules() if isinstance(each, Block)]:
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
    schedule = Schedule1F1B(stage, work.chunks(contender.mesh.data), loss_fn=loss_of)
    x, y = _samples(work, mesh, device)

    def gradients() -> Tensor | None:
        losses: list[Tensor] = []
        schedule.step(
            *[x] * (j == 0),
            target=y if j == n - 1 else None,
            losses=losses if j == n - 1 else None,
            return_outputs=False,
        )
        return torch.stack(losses).mean().detach() if losses else None

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
    context: Context = lambda last: nullcontext(),
) -> Callable[[], Tensor]:
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
    x, y = (each.to(device).chunk(m) for each in work.samples(place, replicas))
    return partial(_gradients, model, [*zip(x, y)], context)


def _gradients(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], context: Context
) -> Tensor:
    losses = []
    for i, (x, y) in enumerate(batches):
        with context(i == len(batches) - 1):
            loss = loss_of(model(x), y) / len(batches)
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()
