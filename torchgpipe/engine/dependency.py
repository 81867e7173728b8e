"""Nodes in the autograd graph without data: order of backward, and start of a recomputation.

``fork`` takes a phony off a tensor, ``join`` puts it onto another one. In backward, whatever comes
before the fork waits until whatever comes after the join has been started::

    forward    a ──Tie──▶ a'           backward    a ◀──Tie◀── a'
                    └phony┐                             ▲phony (no gradient)
               b ─────────Tie──▶ b'                b ◀──┴─Tie◀── b'

    1. The second one runs as soon as the gradient of b' is there.
    2. The first one has to wait for it, also when the gradient of a' came first.

A phony is a tensor without elements: it carries the edge, and no data.

Two more nodes have a checkpointed call run again: one that is tied to an output, so that it comes
before the gradient is there, and one behind which nothing can do without.
"""
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.private import retains_graph

__all__ = ['Checkpoint', 'Fork', 'Join', 'Recompute', 'Tie', 'find_grad', 'fork', 'get_phony',
           'join', 'tie']

# Filled once per device, never emptied, read-only afterwards.
_phonies: dict[tuple[torch.device, bool], Tensor] = {}


def get_phony(device: torch.device, *, requires_grad: bool) -> Tensor:
    """Return the empty tensor of a device, always the same object for the same arguments.

    >>> import torch
    >>> get_phony(torch.device('cpu'), requires_grad=True).shape
    torch.Size([0])

    Args:
        device: Where the tensor lies.
        requires_grad: Whether an autograd function that takes it makes a node in the graph.

    Returns:
        A tensor of shape ``(0,)``. It is shared, so detach it before it becomes an output of an
        autograd function.
    """
    key = (device, requires_grad)
    phony = _phonies.get(key)
    if phony is None:
        # The caller's inference mode may not stick to a tensor that outlives the call. Its stream
        # does not: a tensor without elements has no memory that an allocator would take back.
        with torch.inference_mode(False):
            phony = torch.empty(0, device=device, requires_grad=requires_grad)
        phony = _phonies.setdefault(key, phony)
    return phony


# [Note: Identity without a view]
# The functions of this package that hand a tensor on return `tensor.detach()`. Autograd treats
# that as a new tensor, not as a view, so that the next layer may change it in place; and it shares
# its version counter with the input, so that autograd notices if such a change spoils what
# an earlier layer has saved. Returning the input itself would forbid the change; `.data` would
# hide it.


def tie(input: Tensor, *phonies: Tensor) -> tuple[Tensor, Tensor]:
    """Join a tensor with phonies, and branch another one off it, by one node.

    Args:
        input: A tensor of any shape.
        phonies: What came of other tensors beside these.

    Returns:
        The tensor, which requires grad if it or a phony does, and the phony of shape ``(0,)``.
        Without grad, nothing is added to the graph.
    """
    if torch.is_grad_enabled() and (input.requires_grad or any(
            [phony.requires_grad for phony in phonies])):
        return Tie.apply(input, *phonies)  # type: ignore[no-any-return,no-untyped-call]
    return input, get_phony(input.device, requires_grad=False)


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
    """Merge a phony into a tensor, which requires grad then if the phony does: see :func:`fork`.
    """
    return tie(input, phony)[0]


class Tie(torch.autograd.Function):
    """The autograd function behind :func:`tie`: ``Tie.apply(input, *phonies)``."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, *phonies: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.number = len(phonies)
        phony = get_phony(input.device, requires_grad=False)
        return input.detach(), phony.detach()  # [Note: Identity without a view]

    @staticmethod
    def backward(ctx: Any, grad_input: Tensor | None, grad_phony: Tensor | None
                 ) -> tuple[Tensor | None, ...]:
        return grad_input, *[None] * ctx.number


class Checkpoint(torch.autograd.Function):
    """Mark the output of a checkpointed call; in backward, see that its graph is filled.

    Takes ``(phony, recomputation, *output)`` and gives the output: step 4 of the note "How
    checkpointing works".
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor, recomputation: Any,
                *output: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.recomputation = recomputation
        return tuple(y.detach() for y in output)  # [Note: Identity without a view]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.recomputation.fill()
        return (None, None, *grads)


class Recompute(torch.autograd.Function):
    """Run a checkpointed call again, before its gradient is there. In a step, `R` does so.

    Takes ``(phony, recomputation, input)`` and gives a phony: step 2 of the note "How
    checkpointing works".
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor, recomputation: Callable[[], Any],
                input: tuple[Tensor, ...]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.recomputation = recomputation  # weakly: [Note: Ownership of a recomputation]
        ctx.save_for_backward(*input)
        return phony.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, ...]:
        recomputation = ctx.recomputation()
        assert recomputation is not None, 'Checkpoint, which runs next, owns it'
        recomputation.fill()
        if not retains_graph():
            recomputation.forget()
        return None, None, None


#: As torchgpipe 0.0.7 named them.
Fork = Join = Tie


def find_grad(tensors: Sequence[Tensor]) -> int | None:
    """Return the index of the first tensor that requires grad, or ``None``.

    One on the CPU comes last: so a node that is hung on the tensor runs in backward in the same
    thread as the node that gave it beside others.
    """
    found = [k for k, x in enumerate(tensors) if x.requires_grad]
    return next((k for k in found if not tensors[k].is_cpu), found[0] if found else None)
