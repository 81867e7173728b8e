"""Halves of a backward: gradients of weights of linear layers and convolutions are put off.

::

    forward     x, weight, bias ──▶ y
    I           gradient of x ◀── gradient of y          x and the gradient of y are kept
    W           weight.grad, bias.grad += …              from what was kept

So ``I`` does what the partition before waits for, and ``W`` the rest (Qi et al., "Zero Bubble
Pipeline Parallelism", 2023). A parameter tells by its type, :class:`Weight`, that its gradient may
be put off; the layer that uses it is left as it is. Whatever else uses it computes its gradient in
``I``: other functions, and these under autocast, whose casts stand between the two.

Who owns what: until ``W``, a list of the cell's owns the input and the gradient of the output of
each of its calls. All of it is on the compute stream of the cell.
"""
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchgpipe.private import innermost_hooks, without_torch_function

__all__ = ['PutOff', 'Weight']

#: What computes some gradients of weights, and adds them up.
Work = list[Callable[[], None]]


class PutOff:
    """Where calls in a partition put gradients of weights off to, if anywhere.

    It is set for each action. A recomputation may run in a thread of autograd's, so it is not set
    by thread.
    """

    work: Work | None = None


class Weight(nn.Parameter):
    """A parameter whose gradient may come later: a leaf that nobody looks at before the end."""

    put_off: PutOff

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function on it; split some."""
        with without_torch_function():
            if func in _SPLIT:
                output = _SPLIT[func](*args, **(kwargs or {}))
                if output is not None:
                    return output
            return func(*args, **(kwargs or {}))


def _work(input: Tensor, weight: Tensor, bias: Tensor | None) -> Work | None:
    """Tell where a call puts its gradients of weights off to, if it does."""
    splits = (isinstance(weight, Weight) and (isinstance(bias, Weight) or bias is None)
              and type(input) is Tensor and input.layout is torch.strided
              and not input.is_complex() and torch.is_grad_enabled()
              and not torch.is_autocast_enabled(input.device.type) and _is_run_again_alike())
    return weight.put_off.work if splits else None  # type: ignore[attr-defined]


def _is_run_again_alike() -> bool:
    """Tell whether calls here see a :class:`Weight` in their recomputation, too, if there is one.

    What a layer checkpoints itself is run again in backward, where modules have their parameters.
    """
    hooks = innermost_hooks()
    return hooks is None or getattr(hooks[0], '__module__', '').startswith('torchgpipe.')


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    work = _work(input, weight, bias)
    if work is None:
        return None
    return _Linear.apply(work, input, weight, bias)  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    """A linear layer that computes the gradient of its input only."""

    @staticmethod
    def forward(ctx: Any, work: Work, input: Tensor, weight: Weight, bias: Weight | None
                ) -> Tensor:
        ctx.work, ctx.leaves = work, (weight, bias)  # What is unpacked may be another tensor.
        ctx.save_for_backward(input, weight)
        return F.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        ctx.work.append(partial(_linear_weights, input.detach(), grad, ctx.leaves))
        return None, grad @ weight if ctx.needs_input_grad[1] else None, None, None


def _linear_weights(input: Tensor, grad: Tensor, leaves: tuple[Weight, Weight | None]) -> None:
    weight, bias = leaves
    grad = grad.reshape(-1, grad.shape[-1])
    if weight.requires_grad:
        _add(weight, grad.t() @ input.reshape(-1, input.shape[-1]))
    if bias is not None:
        _add(bias, grad.sum(0))


def _convolution(input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1,
                 padding: Any = 0, dilation: Any = 1, groups: int = 1) -> Any:
    work = _work(input, weight, bias)
    if work is None or input.dim() != weight.dim() or isinstance(padding, str):
        return None
    numbers = [_each(x, weight.dim() - 2) for x in (stride, padding, dilation)]
    return _Convolution.apply(  # type: ignore[no-untyped-call]
        work, input, weight, bias, numbers, groups)


def _each(number: Any, dims: int) -> list[int]:
    numbers = [number] if isinstance(number, int) else list(number)
    return numbers * dims if len(numbers) == 1 else numbers


class _Convolution(torch.autograd.Function):
    """A convolution that computes the gradient of its input only."""

    @staticmethod
    def forward(ctx: Any, work: Work, input: Tensor, weight: Weight, bias: Weight | None,
                numbers: Sequence[list[int]], groups: int) -> Tensor:
        ctx.work, ctx.leaves = work, (weight, bias)
        ctx.how = *numbers, False, [0] * len(numbers[0]), groups
        ctx.save_for_backward(input, weight)
        return torch.ops.aten.convolution(  # type: ignore[no-any-return]
            input, weight, bias, *ctx.how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        ctx.work.append(partial(
            _convolution_weights, input.detach(), grad, ctx.leaves, ctx.how))
        wanted = [ctx.needs_input_grad[1], False, False]
        input_grad, _, _ = torch.ops.aten.convolution_backward(
            grad, input, weight, None, *ctx.how, wanted)
        return None, input_grad, None, None, None, None


def _convolution_weights(input: Tensor, grad: Tensor, leaves: tuple[Weight, Weight | None],
                         how: Sequence[Any]) -> None:
    weight, bias = leaves
    wanted = [False, weight.requires_grad, bias is not None]
    _, weight_grad, bias_grad = torch.ops.aten.convolution_backward(
        grad, input, weight, None if bias is None else [*bias.shape], *how, wanted)
    if weight_grad is not None:
        _add(weight, weight_grad)
    if bias is not None:
        _add(bias, bias_grad)


def _add(leaf: Tensor, grad: Tensor) -> None:
    if leaf.grad is None:
        leaf.grad = grad
    else:
        leaf.grad += grad


#: What can be split, and how.
_SPLIT: dict[Any, Callable[..., Any]] = {
    F.linear: _linear, F.conv1d: _convolution, F.conv2d: _convolution, F.conv3d: _convolution}
