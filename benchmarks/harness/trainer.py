"""A worker that trains a model, step by step, and measures time and memory."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.harness.memory import peak_memory, size_of_partition
from torchgpipe.trainer.processes import Interval


class Step(NamedTuple):
    """When a step was, and its loss."""

    span: Interval
    loss: float


class Trainer:
    """A model in training, or this rank's part of one.

    Args:
        model: The model.
        optimizer: Changes its parameters.
        loss: Gives the model's loss on the next batch.
        clip: Changes the gradients of parameters, before the optimizer does its step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[], Tensor],
        clip: Callable[[Iterable[nn.Parameter]], object] = lambda parameters: None,
    ) -> None:
        self.model = model
        self._optimizer = optimizer
        self._loss = loss
        self._clip = clip

    def step(self) -> Step:
        """Train on a batch; its gradients stay."""
        losses: list[Tensor] = []
        span = Interval.of(lambda: losses.append(self._step()))
        return Step(span, losses[0].item())

    def _step(self) -> Tensor:
        self._optimizer.zero_grad()
        loss = self._loss()
        loss.backward()
        self._clip(self.model.parameters())
        self._optimizer.step()
        return loss.detach()

    def figures(self) -> dict[str, Any]:
        """Return the bytes of tensors that stay from step to step, and the peak within one.

        This is for the CPU. It takes one more step, after at least one, in which the optimizer has
        made its state. Memory of kernels and of communication other than tensors is not counted.
        """
        self._optimizer.zero_grad()
        without_gradients = sum(size_of_partition(self.model, self._optimizer).values())
        peak = without_gradients + peak_memory(self._step, [torch.device('cpu')])
        return {**size_of_partition(self.model, self._optimizer), 'peak': peak}
