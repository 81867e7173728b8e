"""Autograd functions that copy tensors between streams, and let one stream wait for another.

Between partition ``j-1`` on device A and partition ``j`` on device B, one micro-batch travels over
a copy stream on each side, so that the compute streams go on computing::

    compute A ──Wait──▶ copy A ──Copy──▶ copy B ──Wait──▶ compute B        forward
    compute A ◀──Wait── copy A ◀──Copy── copy B ◀──Wait── compute B        backward

Who owns what: the copy is allocated on copy stream B and read on compute stream B; its source is
allocated on compute stream A and read on the copy streams. Either may lose its last reference
while the other stream still reads it, so both uses are recorded with the allocator.
"""
from typing import Any

import torch
from torch import Tensor

from torchgpipe.engine.observer import observers
from torchgpipe.engine.stream import (AbstractStream, current_stream, get_device, record_stream,
                                      use_stream, wait_stream)

__all__ = ['Copy', 'Wait', 'copy_tensor']

Grads = tuple[Tensor | None, ...]


def copy_tensor(tensor: Tensor, source: AbstractStream, target: AbstractStream,
                compute: AbstractStream) -> Tensor:
    """Copy a tensor to the device of ``target``, whose compute stream will read it."""
    ends = [observer.copy(source, target) for observer in observers]
    # Between two GPUs the copy runs on the source's current stream, and the target's current
    # stream waits for it. To or from the CPU it is over when `to` returns.
    with use_stream(source), use_stream(target):
        copied = tensor.to(get_device(target))
    record_stream(tensor, source)
    record_stream(copied, compute)
    for end in ends:
        end()
    return copied


def _like(ctx: Any, input: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Let outputs require grad where their inputs do, not where any input does."""
    ctx.mark_non_differentiable(*[y for x, y in zip(input, output) if not x.requires_grad])
    return output


class Copy(torch.autograd.Function):
    """Copy tensors from one stream's device to another's: ``Copy.apply(prev, next, *tensors)``.

    Takes tensors of any shapes, and gives a tuple of them. In backward, gradients are copied the
    other way.

    >>> from torchgpipe.engine.stream import CPUStream
    >>> Copy.apply(CPUStream, CPUStream, torch.ones(2))
    (tensor([1., 1.]),)
    """

    @staticmethod
    def forward(ctx: Any, prev_stream: AbstractStream,
                next_stream: AbstractStream, *input: Tensor) -> tuple[Tensor, ...]:
        ctx.streams = prev_stream, next_stream
        # In backward, autograd's threads have current streams of their own.
        ctx.prev_compute = current_stream(get_device(prev_stream))
        ctx.set_materialize_grads(False)
        compute = current_stream(get_device(next_stream))
        # A tensor that is there already is handed on: [Note: Identity without a view].
        return _like(ctx, input, tuple(
            copy_tensor(x, prev_stream, next_stream, compute).detach() for x in input))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        prev_stream, next_stream = ctx.streams
        return (None, None, *(
            None if grad is None else copy_tensor(grad, next_stream, prev_stream, ctx.prev_compute)
            for grad in grads))


class Wait(torch.autograd.Function):
    """Let one stream wait for another: ``Wait.apply(prev, next, *tensors)``.

    In forward ``next`` waits for ``prev``, in backward ``prev`` waits for ``next``. The tensors
    only mark the place in the graph, and are given back as a tuple.

    >>> from torchgpipe.engine.stream import CPUStream
    >>> Wait.apply(CPUStream, CPUStream, torch.ones(2))
    (tensor([1., 1.]),)
    """

    @staticmethod
    def forward(ctx: Any, prev_stream: AbstractStream,
                next_stream: AbstractStream, *input: Tensor) -> tuple[Tensor, ...]:
        ctx.streams = prev_stream, next_stream
        ctx.set_materialize_grads(False)
        wait_stream(next_stream, prev_stream)
        # [Note: Identity without a view]
        return _like(ctx, input, tuple(x.detach() for x in input))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        prev_stream, next_stream = ctx.streams
        wait_stream(prev_stream, next_stream)
        return (None, None, *grads)
