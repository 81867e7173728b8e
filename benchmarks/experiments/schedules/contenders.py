"""The contenders: the same cells, trained by each schedule and in other ways."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness.memory import peak_of_activations
from benchmarks.harness.options import places
from torchgpipe import GPipe
from torchgpipe.schedule import NAMES, make
from torchgpipe.timeline import record
from torchgpipe.trainer.processes import Processes, seconds

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

    found = {
        'in sequence': _Here(cells, data, partial(_in_sequence, cells, m), threads=1),
        'plain call': pipeline('', [f'cpu:{j}' for j in range(n)], _by_the_plain_call),
    }
    for name in NAMES:
        stages = sum(map(len, make(name, n, 1).stages))
        found[name] = pipeline(name, [f'cpu:{j}' for j in places(name, stages)])
    for name in ('1f1b', 'zb-h1'):  # No bubbles: the difference is the cost of the split.
        found[f'{name}, one worker'] = pipeline(name, ['cpu'] * n, threads=1)
    for name, scheme in (OWN | OTHERS).items() if processes else ():
        found[name] = _There(processes, scheme)
    return found


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
