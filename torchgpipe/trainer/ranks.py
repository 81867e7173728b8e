"""Values that ranks exchange outside of a step."""

from math import isfinite
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

#: The exit code after a loss that is not finite: another attempt would end the same way.
NOT_FINITE = 3


def from_first_rank(value: Any, device: torch.device) -> Any:
    """Return the value of the first rank, on all ranks."""
    message = [value]
    dist.broadcast_object_list(message, device=device)
    return message[0]


def check_finite(model: nn.Module, step: int, loss: float, norm: float) -> None:
    """Stop all ranks before the optimizer would spread values that are not finite.

    Raises:
        SystemExit: The loss or the norm of gradients, which all ranks have, is not finite.
    """
    if isfinite(loss) and isfinite(norm):
        return
    is_finite = all(bool(gradient.isfinite().all()) for gradient in _local_gradients(model))
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, is_finite)
    ranks = [rank for rank, answer in enumerate(answers) if not answer]
    click.echo(
        f'step {step}: the loss is {loss}, the norm of gradients {norm}; gradients are not finite '
        f'on ranks {ranks}. The optimizer has not used them',
        err=True,
    )
    dist.destroy_process_group()
    raise SystemExit(NOT_FINITE)


def _local_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients of this rank, and its parts of gradients that ranks share."""
    gradients = []
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is not None:
            gradients.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return gradients
