"""A style for sequence parallelism: a linear layer that gathers the tokens of its input.

Autograd saves the tokens of this rank, not the gathered ones, which backward gathers again::

    forward     x of a rank ── gather ──▶ x ── weight of a rank ──▶ y, by features
                └─ saved
    backward    x of a rank ── gather ──▶ x ──────────────────┐
                                          gradient of y ──────┴──▶ gradient of the weight
                                               └── weight ──▶ summands ── reduce, scatter ──▶ of x

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022).
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional as F


class SequenceColwiseParallel(ParallelStyle):
    """Split the outputs of a linear layer whose input is divided by tokens.

    It takes the place of ``ColwiseParallel(input_layouts=Shard(1))``, which keeps the gathered
    tokens for backward.

    >>> from torch.distributed.tensor import Shard
    >>> from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel
    >>> from torchgpipe.distributed import SequenceColwiseParallel
    >>> tensor_plan = {
    ...     '*.norm': SequenceParallel(),
    ...     '*.up': SequenceColwiseParallel(),
    ...     '*.down': RowwiseParallel(output_layouts=Shard(1)),
    ... }

    Args:
        sequence_dim: The dimension of the input that has the tokens. Ranks have equally many.
        use_local_output: Whether the output is a plain tensor, this rank's part of the features.
            Otherwise, it is a DTensor, such as scores for ``parallel_cross_entropy``.

    Raises:
        TypeError: The module is not an ``nn.Linear``.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = True) -> None:
        super().__init__()
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise TypeError(
                f'SequenceColwiseParallel is for nn.Linear, but this is a {type(module).__name__}'
            )
        for name, parameter in [*module.named_parameters(recurse=False)]:
            rows = distribute_tensor(parameter, device_mesh, [Shard(0)])
            part = nn.Parameter(rows, parameter.requires_grad)
            module.register_parameter(name, part)
        module.sequence_style = self  # type: ignore[assignment]
        module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
        return module


def _forward(module: Any, x: Tensor) -> Tensor:
    """Return the features of this rank for all tokens.

    Args:
        x: The tokens of this rank: a tensor, or a DTensor that is divided by tokens.
    """
    style = module.sequence_style
    mesh = module.weight.device_mesh
    if isinstance(x, DTensor):
        x = x.to_local()
    weight = module.weight.to_local()
    bias = module.bias
    if bias is not None:
        bias = bias.to_local()
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    # Tokens are gathered and saved in the dtype of the product.
    y: Tensor = _GatheredLinear.apply(  # type: ignore[no-untyped-call]
        x.to(dtype), weight, bias, mesh, style.sequence_dim
    )
    if style.use_local_output:
        return y
    # Ranks may have unequal numbers of features.
    shape = torch.Size((*y.shape[:-1], module.weight.size(0)))
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size)
    last = Shard(y.dim() - 1)
    return DTensor.from_local(
        y,
        mesh,
        [last],
        run_check=False,
        shape=shape,
        stride=tuple(stride),
    )


class _GatheredLinear(torch.autograd.Function):
    """The product of all tokens with this rank's part of a weight, in the dtype of tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mesh: DeviceMesh,
        dim: int,
    ) -> Tensor:
        """Gather the tokens, and keep only the ones of this rank."""
        ctx.save_for_backward(x, weight)
        ctx.mesh = mesh
        ctx.dim = dim
        return F.linear(_redistributed(x, mesh, Shard(dim), Replicate()), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Gather the tokens again for the gradient of the weight."""
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        of_input = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_input = _redistributed(
                gradient @ weight.to(x.dtype),  # freed before there are the gathered tokens
                ctx.mesh,
                Partial(),
                Shard(ctx.dim),
            )
        rows = gradient.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            tokens = _redistributed(x, ctx.mesh, Shard(ctx.dim), Replicate())
            of_weight = rows.t() @ tokens.flatten(0, -2)
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_input, of_weight, of_bias, None, None


def _redistributed(
    x: Tensor,
    mesh: DeviceMesh,
    source: Placement,
    target: Placement,
) -> Tensor:
    """Return this rank's part of a tensor in another placement."""
    placed = DTensor.from_local(x, mesh, [source], run_check=False)
    result: Tensor = placed.redistribute(placements=[target]).to_local()
    return result
