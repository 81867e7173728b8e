"""The order of backward, copies and waits: autograd functions that move values unchanged.

:func:`fork` and :func:`join` set the order of backward by edges without data. ``fork`` branches a
phony off a tensor, and ``join`` merges it into another tensor. In backward, nodes before the fork
wait until nodes after the join have been started::

    forward    a ──Tie──▶ a'           backward    a ◀──Tie◀── a'
                    └phony┐                             ▲phony (no gradient)
               b ─────────Tie──▶ b'                b ◀──┴─Tie◀── b'

    1. The second ``Tie`` runs as soon as the gradient of b' is available.
    2. The first ``Tie`` waits for the second, even if the gradient of a' comes first.

A phony (:func:`get_phony`) is a tensor without elements, which carries only the edge.

:class:`Recompute` and :class:`Checkpoint` run a checkpointed call again. ``Recompute`` is tied to
an output, so that it runs before the gradient is available. ``Checkpoint`` is in the path of every
gradient, so it ensures that the call has run again.

:class:`Copy` copies tensors between streams, and :class:`Wait` lets one stream wait for another.
Let partition ``j-1`` be on device A and partition ``j`` on device B. A micro-batch passes through
a copy stream on each side, so that the compute streams continue to compute::

    compute A ──Wait──▶ copy A ──Copy──▶ copy B ──Wait──▶ compute B        forward
    compute A ◀──Wait── copy A ◀──Copy── copy B ◀──Wait── compute B        backward

Ownership: the copy is allocated on copy stream B and read on compute stream B. Its source is
allocated on compute stream A and read on the copy streams. Either may lose its last reference
while the other stream still reads it, so both uses are recorded with the allocator.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.base.structure import Grads, Tensors
from torchgpipe.engine.observer import observers
from torchgpipe.engine.streams import (
    AbstractStream,
    current_stream,
    get_device,
    record_stream,
    use_stream,
    wait_stream,
)

# Filled once per device, never emptied, read-only afterwards.
_phonies: dict[tuple[torch.device, bool], Tensor] = {}


def get_phony(device: torch.device, *, requires_grad: bool) -> Tensor:
    """Return the empty tensor of a device, always the same object for the same arguments.

    >>> import torch
    >>> get_phony(torch.device('cpu'), requires_grad=True).shape
    torch.Size([0])

    Args:
        device: The device of the tensor.
        requires_grad: Whether an autograd function with this argument makes a node in the graph.

    Returns:
        A tensor of shape ``(0,)``. It is shared, so detach it before it becomes an output of an
        autograd function.
    """
    key = (device, requires_grad)
    phony = _phonies.get(key)
    if phony is None:
        # The tensor outlives the call, so it must not be an inference tensor. The caller's stream
        # does not matter, because a tensor without elements has no memory to free.
        with torch.inference_mode(False):
            phony = torch.empty(0, device=device, requires_grad=requires_grad)
        phony = _phonies.setdefault(key, phony)
    return phony


# [Note: Identity without a view]
# Rule 11: An autograd function of the engine that passes a tensor on returns a detached alias of
# it, never the tensor itself or a view of it. The functions of this package that pass a tensor on
# return `tensor.detach()`. Autograd treats the result as a new tensor, not as a view, so that the
# next layer may change it in place. The result shares its version counter with the input. So
# autograd detects a change of a tensor that an earlier layer has saved. Returning the input itself
# would forbid the change; `.data` would hide it.


def tie(
    input: Tensor,
    *phonies: Tensor,
) -> tuple[Tensor, Tensor]:
    """Join a tensor with phonies, and branch another phony off it, by one node.

    Args:
        input: A tensor of any shape.
        phonies: Phonies that were branched off other tensors.

    Returns:
        The tensor, which requires grad if it or a phony does, and the phony of shape ``(0,)``.
        Without grad, nothing is added to the graph.
    """
    requires_grad = input.requires_grad or any(phony.requires_grad for phony in phonies)
    if not requires_grad or not torch.is_grad_enabled():
        return input, get_phony(input.device, requires_grad=False)
    return Tie.apply(input, *phonies)  # type: ignore[no-any-return,no-untyped-call]


def fork(input: Tensor) -> tuple[Tensor, Tensor]:
    """Branch a phony off a tensor.

    >>> a = torch.ones(2, requires_grad=True)
    >>> b = torch.ones(3, requires_grad=True)
    >>> a2, phony = fork(a)
    >>> b2 = join(b, phony)  # in backward, a2 comes after b2
    >>> (a2.sum() + b2.sum()).backward()
    >>> a.grad, b.grad
    (tensor([1., 1.]), tensor([1., 1., 1.]))
    """
    return tie(input)


def join(input: Tensor, phony: Tensor) -> Tensor:
    """Merge a phony into a tensor: see :func:`fork`. It requires grad then if the phony does."""
    return tie(input, phony)[0]


class Tie(torch.autograd.Function):
    """The autograd function behind :func:`tie`: ``Tie.apply(input, *phonies)``."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        *phonies: Tensor,
    ) -> tuple[Tensor, Tensor]:
        # No gradient of zeros, if only the phony is used.
        ctx.set_materialize_grads(False)
        ctx.number = len(phonies)
        phony = get_phony(input.device, requires_grad=False)
        return input.detach(), phony.detach()  # [Note: Identity without a view]

    @staticmethod
    def backward(
        ctx: Any,
        grad_input: Tensor | None,
        grad_phony: Tensor | None,
    ) -> Grads:
        return grad_input, *[None] * ctx.number


class Checkpoint(torch.autograd.Function):
    """Mark the output of a checkpointed call; in backward, ensure that its graph is filled.

    Takes ``(recomputation, number, *phonies, *output)`` and returns the output and a phony. It is
    a ``Tie`` as well: step 4 of the note "How checkpointing works".
    """

    @staticmethod
    def forward(
        ctx: Any,
        recomputation: Any,
        number: int,
        *tensors: Tensor,
    ) -> Tensors:
        ctx.set_materialize_grads(False)
        ctx.recomputation = recomputation
        ctx.number = number
        phony = get_phony(tensors[-1].device, requires_grad=False)
        marked = [y.detach() for y in tensors[number:]]  # [Note: Identity without a view]
        return *marked, phony.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        # The layers' own nodes run next, and take the tensors of the recomputation.
        ctx.recomputation.recompute(ctx)
        phonies = [None] * ctx.number
        *grads_of_output, _ = grads
        return None, None, *phonies, *grads_of_output


class Recompute(torch.autograd.Function):
    """Run a checkpointed call again before its gradient is available. In a step, `R` does so.

    Takes ``(phony, recomputation)`` and returns a phony: step 2 of the note "How checkpointing
    works".
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor, recomputation: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.recomputation = recomputation
        return phony.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None]:
        ctx.recomputation.recompute(ctx)
        return None, None


#: The names in torchgpipe 0.0.7.
Fork = Join = Tie


def find_grad(tensors: Sequence[Tensor]) -> int | None:
    """Return the index of the first tensor that requires grad, or ``None``.

    Tensors on the CPU come last. So a node on the tensor runs in backward in the same thread as
    the node that returned it together with others.
    """
    first = None
    for k, x in enumerate(tensors):
        if not x.requires_grad:
            continue
        if not x.is_cpu:
            return k
        if first is None:
            first = k
    return first


def copy_tensor(
    tensor: Tensor,
    source: AbstractStream,
    target: AbstractStream,
    compute: AbstractStream,
) -> Tensor:
    """Copy a tensor to the device of ``target``, whose compute stream will read it."""
    ends = [observer.copy(source, target) for observer in observers]
    # Between two GPUs the copy runs on the source's current stream, and the target's current
    # stream waits for it. To or from the CPU the copy is complete when `to` returns.
    with use_stream(source), use_stream(target):
        copied = tensor.to(get_device(target))
    record_stream(tensor, source)  # rule 13
    record_stream(copied, compute)
    for end in ends:
        end()
    return copied


def _like(ctx: Any, input: Tensors, output: Tensors) -> Tensors:
    """Make each output require grad only if its own input does."""
    frozen = [y for x, y in zip(input, output) if not x.requires_grad]
    ctx.mark_non_differentiable(*frozen)
    return output


class Copy(torch.autograd.Function):
    """Copy tensors from one stream's device to another's: ``Copy.apply(prev, next, *tensors)``.

    Takes tensors of any shapes, and returns a tuple of copies. In backward, gradients are copied
    in the opposite direction.

    >>> from torchgpipe.engine.streams import CPUStream
    >>> Copy.apply(CPUStream, CPUStream, torch.ones(2))
    (tensor([1., 1.]),)
    """

    @staticmethod
    def forward(
        ctx: Any,
        prev_stream: AbstractStream,
        next_stream: AbstractStream,
        *input: Tensor,
    ) -> Tensors:
        ctx.streams = prev_stream, next_stream
        # In backward, autograd's threads have their own current streams.
        ctx.prev_compute = current_stream(get_device(prev_stream))
        ctx.set_materialize_grads(False)
        compute = current_stream(get_device(next_stream))
        copies = []
        for x in input:
            copy = copy_tensor(x, prev_stream, next_stream, compute)
            # A tensor on the target device is passed on: [Note: Identity without a view].
            copies.append(copy.detach())
        return _like(ctx, input, tuple(copies))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        prev_stream, next_stream = ctx.streams
        copies: list[Tensor | None] = []
        for grad in grads:
            if grad is not None:
                grad = copy_tensor(grad, next_stream, prev_stream, ctx.prev_compute)
            copies.append(grad)
        return None, None, *copies


class Wait(torch.autograd.Function):
    """Make one stream wait for another: ``Wait.apply(prev, next, *tensors)``.

    In forward ``next`` waits for ``prev``, in backward ``prev`` waits for ``next``. The tensors
    only mark the place in the graph, and are returned as a tuple.

    >>> from torchgpipe.engine.streams import CPUStream
    >>> Wait.apply(CPUStream, CPUStream, torch.ones(2))
    (tensor([1., 1.]),)
    """

    @staticmethod
    def forward(
        ctx: Any,
        prev_stream: AbstractStream,
        next_stream: AbstractStream,
        *input: Tensor,
    ) -> Tensors:
        ctx.streams = prev_stream, next_stream
        ctx.set_materialize_grads(False)
        wait_stream(next_stream, prev_stream)
        output = tuple([x.detach() for x in input])  # [Note: Identity without a view]
        return _like(ctx, input, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        prev_stream, next_stream = ctx.streams
        wait_stream(prev_stream, next_stream)
        return None, None, *grads


def graph_leaves(nodes: list[Any]) -> list[Tensor]:
    """Return the tensors that receive gradients from a graph."""
    leaves = []
    visited = {None, *nodes}
    while nodes:
        node = nodes.pop()
        # Phonies only tie nodes to each other.
        if hasattr(node, 'variable') and node.variable.numel():
            leaves.append(node.variable)
        for next_node, _ in node.next_functions:
            if next_node not in visited:
                visited.add(next_node)
                nodes.append(next_node)
    return leaves
