"""The contenders: the same cells, trained by each schedule and in other ways.

Stages of torch.distributed.pipelining and of a DistributedGPipe have a process each.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from benchmarks.harness.memory import peak_of_activations
from benchmarks.harness.options import places
from benchmarks.models.stacks import STACKS
from torchgpipe import GPipe
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.schedule import NAMES, make
from torchgpipe.timeline import record
from torchgpipe.trainer.processes import Interval, Processes, seconds


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
        count = cells // n
        all_cells = STACKS[stack].build(cells, depth)
        self._layers = all_cells[count * rank : count * (rank + 1)]
        self._model = DistributedGPipe(
            all_cells, [count] * n, mesh=init_mesh(pipe=n), chunks=chunks, checkpoint='never'
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


#: Cells for each device, so that a schedule may have two stages there.
CELLS = 2

#: Those in processes: of torchgpipe.distributed, and of torch.distributed.pipelining.
OWN = {'gpipe, processes': 'gpipe', '1f1b, processes': '1f1b'}
OTHERS = {'torch GPipe': 'ScheduleGPipe', 'torch 1F1B': 'Schedule1F1B'}

Step = Callable[[Tensor, Tensor], Tensor]


class Run(NamedTuple):
    """The seconds of a step, and its loss."""

    seconds: float
    loss: float


class Contender(Protocol):
    """One way to train the cells."""

    def run(self) -> Run:
        """Take a step."""

    def peak(self) -> int:
        """Take a step, and give the peak of its activations in bytes."""


def contenders(
    cells: nn.Sequential, data: tuple[Tensor, Tensor], n: int, m: int, processes: Processes | None
) -> dict[str, Contender]:
    """Return all of them by name, the baseline first.

    Args:
        cells: ``CELLS`` for each device.
        data: Input and target.
        n: The number of devices.
        m: The number of micro-batches.
        processes: One for each device, if they can be had.
    """

    def pipeline(
        name: str, devices: Sequence[str], step: Any = _by_schedule, threads: int = n
    ) -> Contender:
        model = GPipe(
            cells,
            [len(cells) // len(devices)] * len(devices),
            devices=devices,
            chunks=m,
            checkpoint='never',
        )
        return Pipeline(cells, data, partial(step, model, name), threads, model)

    result = {
        'in sequence': _Here(cells, data, partial(_in_sequence, cells, m), threads=1),
        'plain call': pipeline('', [f'cpu:{j}' for j in range(n)], _by_the_plain_call),
    }
    for name in NAMES:
        stages = sum(map(len, make(name, n, 1).stages))
        result[name] = pipeline(name, [f'cpu:{j}' for j in places(name, stages)])
    for name in ('1f1b', 'zb-h1'):  # No bubbles: the difference is the cost of the split.
        result[f'{name}, one worker'] = pipeline(name, ['cpu'] * n, threads=1)
    for name, scheme in (OWN | OTHERS).items() if processes else ():
        result[name] = _There(processes, scheme)
    return result


def _in_sequence(cells: nn.Sequential, m: int, input: Tensor, target: Tensor) -> Tensor:
    """Train on one micro-batch after the other, without any pipeline."""
    losses = []
    for x, y in zip(input.chunk(m), target.chunk(m)):
        loss = F.mse_loss(cells(x), y) / m
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def _by_the_plain_call(model: GPipe, name: str, input: Tensor, target: Tensor) -> Tensor:
    loss = F.mse_loss(model(input), target)
    loss.backward()
    return loss.detach()


def _by_schedule(model: GPipe, name: str, input: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = model.step(input, target, F.mse_loss, schedule=name)
    return loss


class _Here:
    """In this process.

    Args:
        cells: Whose gradients are dropped before each step.
        data: Input and target.
        step: Computes gradients, and gives the loss.
        threads: The intra-op threads that workers share.
    """

    def __init__(
        self, cells: nn.Module, data: tuple[Tensor, Tensor], step: Step, threads: int
    ) -> None:
        self._cells = cells
        self._call = partial(step, *data)
        self._threads = threads

    def run(self) -> Run:
        self._prepare()
        begin = time.perf_counter()
        loss = self._call()
        return Run(time.perf_counter() - begin, loss.item())

    def peak(self) -> int:
        self._prepare()
        return peak_of_activations(self._call)

    def _prepare(self) -> None:
        self._cells.zero_grad()
        torch.set_num_threads(self._threads)


class Pipeline(_Here):
    """In this process, by a pipeline.

    Args:
        args: As above.
        model: The pipeline.
    """

    def __init__(
        self, cells: nn.Module, data: tuple[Tensor, Tensor], step: Step, threads: int, model: GPipe
    ) -> None:
        super().__init__(cells, data, step, threads)
        self._model = model

    def bubble(self) -> float:
        """Take a step, and give the part of the devices' time in which they do nothing."""
        self._prepare()
        with record(self._model) as timeline:
            self._call()
        return timeline.bubble


class _There:
    """In processes, one thread each."""

    def __init__(self, processes: Processes, name: str) -> None:
        self._processes = processes
        self._name = name

    def run(self) -> Run:
        answers = self._processes.call('step', self._name)
        return Run(seconds([answer.span for answer in answers]), answers[-1].loss)

    def peak(self) -> int:
        return sum(answer.peak for answer in self._processes.call('step', self._name, True))
