"""A stage in a process of its own: of torch.distributed.pipelining, and of a DistributedGPipe."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import distributed
from torch.nn import functional as F

from benchmarks.harness.memory import peak_of_activations
from benchmarks.models.stacks import STACKS
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.trainer.processes import Interval


class Answer(NamedTuple):
    """A process's measurements of a step.

    Attributes:
        span: The time of the step. loss: The loss of the mini-batch; of the last process only.
        peak: The peak of activations in bytes, if that was asked for.
    """

    span: Interval
    loss: float | None
    peak: int | None


class Stage:
    """The stage of this process.

    Args:
        stack: The name of a stack.
        cells: Cells of the stack, which the processes share equally.
        depth: Layers of a cell.
        chunks: Micro-batches of a mini-batch.
        names: Names of classes in :mod:`torch.distributed.pipelining`.

    A stage of torchgpipe.distributed has the same layers.
    """

    def __init__(
        self, stack: str, cells: int, depth: int, chunks: int, names: Sequence[str]
    ) -> None:
        from torch.distributed import pipelining

        rank, n = distributed.get_rank(), distributed.get_world_size()
        self._input, self._target = STACKS[stack].data(chunks)
        own = cells // n
        all_cells = STACKS[stack].build(cells, depth)
        self._layers = all_cells[own * rank : own * (rank + 1)]
        self._model = DistributedGPipe(
            all_cells, [own] * n, mesh=init_mesh(pipe=n), chunks=chunks, checkpoint='never'
        )
        self._is_first, self._is_last = rank == 0, rank == n - 1
        self._schedules = {
            name: getattr(pipelining, name)(
                pipelining.PipelineStage(self._layers, rank, n, torch.device('cpu')),
                chunks,
                loss_fn=F.mse_loss,
            )
            for name in names
        }

    def step(self, name: str, count_memory: bool = False) -> Answer:
        """Take a step by a schedule: of torch, if it has a class of that name."""
        for parameter in self._layers.parameters():
            parameter.grad = None
        losses: list[torch.Tensor] = []
        torch_step = (
            partial(
                self._schedules[name].step,
                *[self._input] * self._is_first,
                target=self._target if self._is_last else None,
                losses=losses if self._is_last else None,
                return_outputs=False,
            )
            if name in self._schedules
            else None
        )
        call = torch_step or partial(self._own_step, name, losses)
        peaks: list[int] = []
        span = Interval.of(
            lambda: peaks.append(peak_of_activations(call)) if count_memory else call()
        )
        loss = torch.stack(losses).mean().item() if losses else None
        return Answer(span, loss, peaks[0] if peaks else None)

    def _own_step(self, name: str, losses: list[torch.Tensor]) -> None:
        losses.append(self._model.step(self._input, self._target, F.mse_loss, schedule=name))
