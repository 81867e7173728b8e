"""The gradients of a mini-batch in one process of a mesh: by torchgpipe, and by PyTorch."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from benchmarks.experiments.scaling.meshes import ALONE, TORCHGPIPE, Contender, Work
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.trainer.gpt import Block


class Loop:
    """A model in one process, which trains on one micro-batch after the other.

    Attributes:
        model: The module with the parameters of this process.
        axes: The axis of each process group, by its name.
    """

    model: nn.Module

    def __init__(self, contender: Contender, work: Work, device: torch.device) -> None:
        self.axes: dict[str, str] = {}
        self._mesh: Any = None
        place, replicas = 0, 1
        if contender != ALONE:
            data, pipe, tensor = contender.mesh.axes.values()
            self._mesh = init_mesh(data, pipe, tensor, device_type=device.type)
            place, replicas = self._mesh.get_local_rank('data'), data
            for axis, size in contender.mesh.axes.items():
                if size > 1:
                    self.axes[str(self._mesh.get_group(axis).group_name)] = axis
        self._contender = contender
        self._work = work
        self._device = device
        self._chunks = work.chunks(replicas)
        samples, targets = work.samples(place, replicas)
        self._samples = samples.to(device)
        self._targets = targets.to(device)
        self._build()

    def _build(self) -> None:
        self.model = self._work.model().to(self._device)

    def gradients(self, reduces: bool) -> Tensor | None:
        """Compute gradients.

        Args:
            reduces: Whether to reduce them over replicas.

        Returns:
            The mean loss of the samples of this replica, or of all; ``None`` in a process without
            the loss.
        """
        losses = []
        batches = zip(self._samples.chunk(self._chunks), self._targets.chunk(self._chunks))
        for i, (x, y) in enumerate(batches):
            with self._context(reduces and i == self._chunks - 1):
                loss = self._work.loss_of(self.model(x), y) / self._chunks
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def _context(self, reduces: bool) -> AbstractContextManager[object]:
        """Return the context of a micro-batch, after which gradients may be reduced."""
        return nullcontext()


class Pipeline(Loop):
    """A model of torchgpipe, which trains by 1F1B."""

    model: DistributedGPipe

    def _build(self) -> None:
        options = self._work.options(self._contender.mesh)
        model = DistributedGPipe(self._work.model(), mesh=self._mesh, **options)
        # Its messages have groups of their own.
        for edge, group in model._rank.edges.groups.items():
            if get_rank() in edge:
                self.axes[str(group.group_name)] = 'pipe'
        self.model = model

    def gradients(self, reduces: bool) -> Tensor | None:
        """Compute gradients, as in a :class:`Loop`."""
        with self._context(reduces):
            loss: Tensor = self.model.step(
                self._samples, self._targets, self._work.loss_of, schedule='1f1b'
            )
        return loss

    def _context(self, reduces: bool) -> AbstractContextManager[object]:
        return nullcontext() if reduces else self.model.no_sync()


class DDP(Loop):
    """A replica of DistributedDataParallel."""

    model: DistributedDataParallel

    def _build(self) -> None:
        model = self._work.model().to(self._device)
        group = self._mesh.get_group('data')
        self.model = DistributedDataParallel(model, process_group=group)

    def _context(self, reduces: bool) -> AbstractContextManager[object]:
        return nullcontext() if reduces else self.model.no_sync()


class FSDP(Loop):
    """A shard of FSDP2."""

    model: Any

    def _build(self) -> None:
        self.model = sharded(self._work.model().to(self._device), self._mesh)

    def _context(self, reduces: bool) -> AbstractContextManager[object]:
        self.model.set_requires_gradient_sync(reduces)
        return nullcontext()


def sharded(module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Shard each block, and all other parameters as the root's."""
    for block in [child for child in module.modules() if isinstance(child, Block)]:
        fully_shard(block, mesh=mesh['data'], **options)
    fully_shard(module, mesh=mesh['data'], **options)
    return module


class Pipelining(Loop):
    """A stage of torch.distributed.pipelining, which trains by 1F1B, with or without FSDP2."""

    def _build(self) -> None:
        j, n = self._mesh.get_local_rank('pipe'), self._contender.mesh.pipe
        self._is_first, self._is_last = j == 0, j == n - 1
        balance = self._work.balance(n)
        begin = sum(balance[:j])
        layers = self._work.model()[begin : begin + balance[j]]
        self.model = layers.to(self._device)
        if self._contender.mesh.shard:
            # Users of pipelines keep parameters until the end of backward.
            sharded(self.model, self._mesh, reshard_after_forward=False)

        # The schedule divides all gradients at its end, also the ones of earlier mini-batches.
        self._divides_losses = self._work.accumulated > 1
        group = self._mesh.get_group('pipe')
        self._schedule = Schedule1F1B(
            PipelineStage(self.model, j, n, self._device, group=group),
            self._chunks,
            loss_fn=self._loss,
            scale_grads=not self._divides_losses,
        )

    def _loss(self, scores: Tensor, target: Tensor) -> Tensor:
        loss = self._work.loss_of(scores, target)
        return loss / self._chunks if self._divides_losses else loss

    def gradients(self, reduces: bool) -> Tensor | None:
        """Compute gradients, as in a :class:`Loop`."""
        losses: list[Tensor] = []
        inputs = [self._samples] if self._is_first else []
        outputs: dict[str, Any] = {}
        if self._is_last:
            outputs = {'target': self._targets, 'losses': losses}
        self._schedule.step(*inputs, **outputs, return_outputs=False)
        if not self._is_last:
            return None
        loss = torch.stack(losses).detach()
        return loss.sum() if self._divides_losses else loss.mean()


TRAINERS = {
    ALONE.library: Loop,
    TORCHGPIPE: Pipeline,
    'DDP': DDP,
    'FSDP2': FSDP,
    'pipelining': Pipelining,
    'pipelining + FSDP2': Pipelining,
}
