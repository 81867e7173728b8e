"""A process of a mesh: it trains the model of each contender, and counts sent bytes."""

import gc
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, distributed
from torch.optim import SGD

from benchmarks.experiments.scaling.meshes import ALONE, Contender, Mesh, Work
from benchmarks.experiments.scaling.trainers import TRAINERS, Loop
from torchgpipe.base.devices import synchronize
from torchgpipe.distributed import DistributedGPipe
from torchgpipe.dry_run.counters import Counter, calls_seen
from torchgpipe.timeline import record
from torchgpipe.trainer.processes import Interval

#: The axis of an operation, its name, and its bytes.
Operation = tuple[str, str, int]


def sent(name: str, bytes: int, size: int) -> float:
    """Return the bytes that a rank sends in an operation, of rings of ranks.

    >>> sent('allreduce', 100, 4), sent('allgather', 100, 4), sent('send', 100, 4)
    (150.0, 75.0, 100.0)

    Args:
        name: The name of the operation.
        bytes: The size of its input or its output, whichever is larger.
        size: The number of ranks.
    """
    if 'recv' in name:
        return 0.0
    if 'send' in name:
        return float(bytes)
    steps = 2 if 'reduce' in name and 'scatter' not in name else 1
    return steps * bytes * (size - 1) / size


def totals(operations: Iterable[Operation], mesh: Mesh) -> dict[str, float]:
    """Return the bytes that a rank sends, by axis."""
    result: dict[str, float] = {}
    for axis, name, bytes in operations:
        size = mesh.axes.get(axis, mesh.size)
        result[axis] = result.get(axis, 0.0) + sent(name, bytes, size)
    return {axis: value for axis, value in result.items() if value}


#: Steps after which all buffers of a library exist: DDP makes its buckets again in the second one.
COUNTED = 2

#: The learning rate of SGD.
RATE = 0.1


class Answer(NamedTuple):
    """A process's measurements of a step.

    Attributes:
        span: The time of the step.
        loss: The loss of the replica, or of all; ``None`` in a process without it.
        bubble: The bubble of a recorded step, from 0 to 1.
    """

    span: Interval
    loss: float | None
    bubble: float | None = None


class Counts(NamedTuple):
    """A process's counts of the first steps.

    Attributes:
        losses: The loss of each step, as in an :class:`Answer`.
        peak: The peak of all tensors of the model and its step, in bytes.
        sent: The bytes of a step, by axis.
    """

    losses: list[float | None]
    peak: int
    sent: dict[str, float]


class Worker:
    """The models of all contenders in this process.

    Args:
        work: The mini-batch, and the model.
        device: The type of devices.
    """

    def __init__(self, work: Work, device: str) -> None:
        self._work = work
        self._device = (
            torch.device('cpu')
            if device == 'cpu'
            else torch.device(device, torch.accelerator.current_device_index())
        )
        self._trainers: dict[Contender, tuple[Loop, SGD]] = {}

    def reference(self) -> float | None:
        """Return the loss of the whole mini-batch before the first step; in one process only."""
        if distributed.get_rank():
            return None
        model, work = self._work.model(), self._work
        x, y = (tensor.split(work.micro_batch) for tensor in work.samples(0, 1))
        with torch.no_grad():
            losses = [work.loss_of(model(x_i), y_i) for x_i, y_i in zip(x, y)]
        return torch.stack(losses).mean().item()

    def build(self, contender: Contender) -> Counts | None:
        """Create a model, take the first steps, and count memory and collectives.

        The counter sees all tensors since the model's creation, and each change of a memory's
        size, because FSDP frees parameters by such a change.
        """
        if self._is_idle(contender):
            return None
        losses, counter = [], Counter()
        with calls_seen(), counter:
            replica = TRAINERS[contender.library](contender, self._share(contender), self._device)
            self._trainers[contender] = replica, SGD(replica.model.parameters(), RATE)
            for _ in range(COUNTED):
                gc.collect()
                counter.at(None)
                losses.append(_value(self._step(contender)))
            counter.at(None)
        *before, last = counter.entries
        peak = sum(entry.bytes for entry in before) + last.peak
        operations: list[Operation] = []
        for collective in last.collectives:
            axis = replica.axes.get(collective.group)
            if axis is not None:
                operations.append((axis, collective.name, collective.bytes))
        return Counts(losses, peak, totals(operations, contender.mesh))

    def _share(self, contender: Contender) -> Work:
        """Return the work of a contender. The loop in one process has its own mini-batch."""
        if contender == ALONE:
            return self._work._replace(batch=self._work.alone)
        return self._work

    def step(self, contender: Contender) -> Answer | None:
        """Take a step."""
        if self._is_idle(contender):
            return None
        losses: list[Tensor | None] = []
        span = Interval.of(lambda: losses.append(self._step(contender)))
        return Answer(span, _value(losses[0]))

    def record(self, contender: Contender) -> Answer | None:
        """Take a step, and record the bubble if the model is a pipeline."""
        model = None if self._is_idle(contender) else self._trainers[contender][0].model
        if not isinstance(model, DistributedGPipe):
            return self.step(contender)
        with record(model) as timeline:
            answer = self.step(contender)
        return answer and answer._replace(bubble=timeline.bubble)

    def _is_idle(self, contender: Contender) -> bool:
        return contender == ALONE and distributed.get_rank() > 0

    def _step(self, contender: Contender) -> Tensor | None:
        replica, optimizer = self._trainers[contender]
        for k in reversed(range(self._work.accumulated)):
            loss = replica.gradients(k == 0)
        optimizer.step()
        optimizer.zero_grad()
        synchronize([self._device])
        return loss


def _value(loss: Tensor | None) -> float | None:
    return None if loss is None else loss.item()
