"""The contenders: the same cells, trained by each schedule and in other ways.

Stages of torch.distributed.pipelining and of a DistributedGPipe have a process each.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from benchmarks.harness.memory import peak_of_activations
from benchmarks.harness.options import places
from benchmarks.models.stacks import STACKS
from torchgpipe import GPipe
from torchgpipe.base.devices import CPU
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.schedule import NAMES, make
from torchgpipe.timeline import record
from torchgpipe.trainer.processes import Interval, Processes, seconds


class Answer(NamedTuple):
    """A process's measurements of a step.

    Attributes:
        span: The time of the step.
        loss: The loss of the mini-batch; of the last process only.
        peak: The peak of activations in bytes, if they are counted.
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
        count = cells // n
        all_cells = STACKS[stack].build(cells, depth)
        self._layers = all_cells[count * rank : count * (rank + 1)]
        self._model = DistributedGPipe(
            all_cells, [count] * n, mesh=init_mesh(pipe=n), chunks=chunks, checkpoint='never'
        )
        self._is_first, self._is_last = rank == 0, rank == n - 1
        self._schedules = {}
        for name in names:
            stage = pipelining.PipelineStage(self._layers, rank, n, CPU)
            schedule = getattr(pipelining, name)
            self._schedules[name] = schedule(stage, chunks, loss_fn=F.mse_loss)

    def step(self, name: str, count_memory: bool = False) -> Answer:
        """Take a step by a schedule: of torch, if it has a class of that name."""
        self._layers.zero_grad()
        losses: list[Tensor] = []
        peaks: list[int] = []

        def step() -> None:
            if name in self._schedules:
                self._step_of_torch(name, losses)
            else:
                loss = self._model.step(self._input, self._target, F.mse_loss, schedule=name)
                losses.append(loss)

        def counted_step() -> None:
            peaks.append(peak_of_activations(step))

        span = Interval.of(counted_step if count_memory else step)
        loss = torch.stack(losses).mean().item() if losses else None
        return Answer(span, loss, peaks[0] if peaks else None)

    def _step_of_torch(self, name: str, losses: list[Tensor]) -> None:
        """Take a step, and add the losses of micro-batches in the last process."""
        inputs = [self._input] if self._is_first else []
        outputs = {'target': self._target, 'losses': losses} if self._is_last else {}
        self._schedules[name].step(*inputs, **outputs, return_outputs=False)


#: Cells for each device, so that a schedule may have two stages there.
CELLS = 2

#: Schedules in processes: of torchgpipe.distributed, and of torch.distributed.pipelining.
OWN = {'gpipe, processes': 'gpipe', '1f1b, processes': '1f1b'}
OTHERS = {'torch GPipe': 'ScheduleGPipe', 'torch 1F1B': 'Schedule1F1B'}


class Run(NamedTuple):
    """The seconds of a step, and its loss."""

    seconds: float
    loss: float


def contenders(
    cells: nn.Sequential, data: tuple[Tensor, Tensor], n: int, m: int, processes: Processes | None
) -> dict[str, 'Contender']:
    """Return all of them by name, the baseline first.

    Args:
        cells: ``CELLS`` for each device.
        data: Input and target.
        n: The number of devices.
        m: The number of micro-batches.
        processes: One for each device, if they can be had.
    """

    def pipeline(devices: Sequence[str], schedule: str | None, threads: int = n) -> Contender:
        balance = [len(cells) // len(devices)] * len(devices)
        model = GPipe(cells, balance, devices=devices, chunks=m, checkpoint='never')
        step = partial(_by_pipeline, model, schedule, *data)
        return InProcess(cells, step, threads, model)

    result: dict[str, Contender] = {
        'in sequence': InProcess(cells, partial(_in_sequence, cells, m, *data), threads=1),
        'plain call': pipeline([f'cpu:{j}' for j in range(n)], None),
    }
    for name in NAMES:
        stages = sum(map(len, make(name, n, 1).stages))
        result[name] = pipeline([f'cpu:{j}' for j in places(name, stages)], name)
    for name in ('1f1b', 'zb-h1'):  # No bubbles: the difference is the cost of the split.
        result[f'{name}, one worker'] = pipeline(['cpu'] * n, name, threads=1)
    if processes:
        for name, schedule in (OWN | OTHERS).items():
            result[name] = InProcesses(processes, schedule)
    return result


def _in_sequence(cells: nn.Sequential, m: int, input: Tensor, target: Tensor) -> Tensor:
    """Train on one micro-batch after the other, without any pipeline."""
    losses = []
    for x, y in zip(input.chunk(m), target.chunk(m)):
        loss = F.mse_loss(cells(x), y) / m
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def _by_pipeline(model: GPipe, schedule: str | None, input: Tensor, target: Tensor) -> Tensor:
    """Train by a schedule, or by the plain call."""
    if schedule is None:
        loss = F.mse_loss(model(input), target)
        loss.backward()
        return loss.detach()
    loss = model.step(input, target, F.mse_loss, schedule=schedule)
    return loss


class InProcess:
    """A way to train the cells in this process.

    Args:
        cells: The cells, whose gradients are dropped before each step.
        step: Computes gradients, and returns the loss.
        threads: The intra-op threads that workers share.
        model: The pipeline, if it is one.
    """

    def __init__(
        self,
        cells: nn.Module,
        step: Callable[[], Tensor],
        threads: int,
        model: GPipe | None = None,
    ) -> None:
        self._cells = cells
        self._step = step
        self._threads = threads
        self._model = model

    def run(self) -> Run:
        """Take a step."""
        self._prepare()
        begin = time.perf_counter()
        loss = self._step()
        return Run(time.perf_counter() - begin, loss.item())

    def peak(self) -> int:
        """Take a step, and return the peak of its activations in bytes."""
        self._prepare()
        return peak_of_activations(self._step)

    def bubble(self) -> float | None:
        """Take a step, and return the part of the devices' time in which they do nothing."""
        if self._model is None:
            return None
        self._prepare()
        with record(self._model) as timeline:
            self._step()
        return timeline.bubble

    def _prepare(self) -> None:
        self._cells.zero_grad()
        torch.set_num_threads(self._threads)


class InProcesses:
    """A way to train the cells in processes, with one thread each.

    Args:
        processes: The processes.
        schedule: The name of the schedule.
    """

    def __init__(self, processes: Processes, schedule: str) -> None:
        self._processes = processes
        self._schedule = schedule

    def run(self) -> Run:
        """Take a step."""
        answers = self._processes.call('step', self._schedule)
        return Run(seconds([answer.span for answer in answers]), answers[-1].loss)

    def peak(self) -> int:
        """Take a step, and return the peak of its activations in bytes."""
        return sum(answer.peak for answer in self._processes.call('step', self._schedule, True))

    def bubble(self) -> None:
        """Return that the bubble is not known."""


Contender = InProcess | InProcesses
