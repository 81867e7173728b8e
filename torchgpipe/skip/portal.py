"""Portals: through one, a skip tensor leaves its partition and appears in a later one.

The autograd graph has an edge of its own for each skip, which the partitions between never see. A
*phony* runs along it; the tensor and its gradient go through the portal::

    forward     tensor ──PortalBlue──▶ phony ──PortalCopy──▶ phony ──PortalOrange──▶ tensor
                      in: portal.tensor     moved over the copy streams     out: portal.tensor
    backward    grad ◀──PortalBlue── · ◀──PortalCopy── · ◀──PortalOrange── grad
                      out: portal.grad      moved back                      in: portal.grad

A phony lies where the tensor is: autograd runs a node in its thread for the device of what the
node gave in forward, and the thread of another device may be busy.

[Note: Tensor life of a portal]
A portal lets go of its tensor when each that needs it has had it. Its *life* is how many there
are still to come::

                              stash (blue)     pop (orange)     pop again, in backward
    without checkpoint  2 ──▶ 1            ──▶ 0
    with checkpoint     3 ──▶ 2            ──▶ 1            ──▶ 0
    stash, recomputed   1 ──▶ 0            that is for nobody: its own graph is the first one's

That is what the API counts. In a pipeline a portal also lets go of its tensor when the cell that
pops it ends: from then on the node that runs the recomputation owns it, as long as autograd keeps
that node, and the recomputation has portals of its own.

[Note: Life of a gradient in a portal]
A backward pass may enter a portal by PortalOrange and end before PortalBlue, if it fails or if
only some gradients are asked for. What it leaves behind must not reach the next pass, nor live:
with ``create_graph`` it owns nodes that own the portal. So the pass owns it until it is used, by a
callback of the engine, and the portal only refers to it.
"""
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchgpipe.engine.copy import copy_tensor
from torchgpipe.engine.dependency import get_phony
from torchgpipe.engine.memory import versions
from torchgpipe.engine.stream import AbstractStream, current_stream, get_device
from torchgpipe.private import at_end_of_backward, backward_pass

__all__ = ['Portal', 'PortalBlue', 'PortalCopy', 'PortalOrange']


class Portal:
    """The place where a skip tensor is while it is in no partition, and then its gradient.

    >>> portal = Portal(torch.ones(2), tensor_life=2)
    >>> phony = portal.blue()
    >>> portal.orange(phony)
    tensor([1., 1.])
    >>> portal.orange(phony)
    Traceback (most recent call last):
    RuntimeError: tensor in portal has been removed

    Args:
        tensor: The skip tensor, or ``None``, for which there is no node in the graph.
        tensor_life: How many times it will be used: 2 without checkpointing, 3 with it, 1 when it
            is stashed again in a recomputation.
    """

    __slots__ = ('_holder', '_version', 'tensor', 'tensor_life')

    def __init__(self, tensor: Tensor | None, tensor_life: int) -> None:
        self.tensor: Tensor | None = None
        self.tensor_life = 0
        self._holder: Callable[[], _Holder | None] = _nobody
        self.put_tensor(tensor, tensor_life)

    def blue(self) -> Tensor:
        """Let the tensor in: give the phony that stands for it."""
        tensor = self.use_tensor()
        if tensor is None:
            return get_phony(torch.device('cpu'), requires_grad=False)
        # From here on only the graph knows where the tensor comes from. The nodes of the graph own
        # this portal, so it must not own the graph.
        if self.tensor is not None:
            self.tensor = self.tensor.detach()
        return PortalBlue.apply(self, tensor)  # type: ignore[no-any-return,no-untyped-call]

    def orange(self, phony: Tensor) -> Tensor | None:
        """Let the tensor out, in exchange for the phony."""
        self.check_tensor_life()
        if self.tensor is None:
            self.use_tensor()
            return None
        self._check_version()
        tensor: Tensor = PortalOrange.apply(self, phony)  # type: ignore[no-untyped-call]
        return tensor

    def copy(self, prev_stream: AbstractStream, next_stream: AbstractStream, phony: Tensor
             ) -> Tensor:
        """Move the tensor to another device, and give the phony that stands for it there."""
        self.check_tensor_life()
        if self.tensor is None:
            return get_phony(torch.device('cpu'), requires_grad=False)
        self._check_version()
        return PortalCopy.apply(  # type: ignore[no-any-return,no-untyped-call]
            self, prev_stream, next_stream, phony)

    def is_changed(self) -> bool:
        """Tell whether someone has changed the tensor in place since it was put here."""
        return self.tensor is not None and versions([self.tensor]) != self._version

    def _check_version(self) -> None:
        if self.is_changed():
            raise RuntimeError(changed_in_place('the memory of a skip tensor'))

    def check_tensor_life(self) -> None:
        """Raise :exc:`RuntimeError` if the tensor is no longer there."""
        if self.tensor_life <= 0:
            raise RuntimeError('tensor in portal has been removed')

    def put_tensor(self, tensor: Tensor | None, tensor_life: int) -> None:
        """Keep a tensor until it has been used ``tensor_life`` times."""
        self.tensor_life = tensor_life
        self.tensor = tensor if tensor_life > 0 else None
        self._version = [] if self.tensor is None else versions([self.tensor])

    def use_tensor(self) -> Tensor | None:
        """Give the tensor, and let go of it if that was the last time."""
        self.check_tensor_life()
        tensor = self.tensor
        self.tensor_life -= 1
        if self.tensor_life == 0:
            self.tensor = None
        return tensor

    @property
    def grad(self) -> Tensor | None:
        """The gradient that is in the portal, if any."""
        holder = self._holder()
        return None if holder is None else holder.grad

    def put_grad(self, grad: Tensor) -> None:
        """Keep a gradient until it is used: [Note: Life of a gradient in a portal]."""
        holder = _Holder(grad)
        if backward_pass() == -1:
            self._holder = lambda: holder
        else:
            at_end_of_backward(holder.drop)
            self._holder = weakref.ref(holder)

    def use_grad(self) -> Tensor:
        """Give the gradient and let go of it."""
        holder = self._holder()
        if holder is None or holder.grad is None:
            raise RuntimeError('grad in portal has been removed or never set')
        grad = holder.grad
        holder.drop()
        return grad


class _Holder:
    """A gradient on its way, owned by the backward pass."""

    __slots__ = ('__weakref__', 'grad')

    def __init__(self, grad: Tensor | None) -> None:
        self.grad = grad

    def drop(self) -> None:
        """Let go of it, when it is used or the pass ends."""
        self.grad = None


def _nobody() -> None:
    """Answer as a dead weak reference does."""


def changed_in_place(what: str) -> str:
    """Say what is wrong with a change in place that a skip should have seen, and did not."""
    return (f'{what} was changed in place between its stash and its pop, in another partition '
            'than the one that stashed it. Without a pipeline, the layer that pops would see that '
            'change; here it can not. Use an operation that is not in place, or stash a copy: '
            "stash('name', tensor.clone()).")


class PortalBlue(torch.autograd.Function):
    """The entrance of a portal: takes the tensor, gives a phony."""

    @staticmethod
    def forward(ctx: Any, portal: Portal, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.portal = portal
        return get_phony(tensor.device, requires_grad=False).detach()

    @staticmethod
    def backward(ctx: Any, grad_phony: Tensor | None) -> tuple[None, Tensor | None]:
        # None where this pass did not come through PortalOrange, since the tensor was not used,
        # but through another output of the cell.
        portal: Portal = ctx.portal
        return None, None if portal.grad is None else portal.use_grad()


class PortalOrange(torch.autograd.Function):
    """The exit of a portal: takes the phony, gives the tensor."""

    @staticmethod
    def forward(ctx: Any, portal: Portal, phony: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.portal = portal
        tensor = portal.use_tensor()
        assert tensor is not None
        return tensor.detach()  # [Note: Identity without a view]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None]:
        if grad is not None:
            ctx.portal.put_grad(grad)
        return None, None


class PortalCopy(torch.autograd.Function):
    """The way from one device to another, on the copy streams: takes a phony, gives another."""

    @staticmethod
    def forward(ctx: Any, portal: Portal, prev_stream: AbstractStream,
                next_stream: AbstractStream, phony: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.portal = portal
        ctx.streams = prev_stream, next_stream
        ctx.prev_compute = current_stream(get_device(prev_stream))
        compute = current_stream(get_device(next_stream))
        assert portal.tensor is not None
        portal.put_tensor(copy_tensor(portal.tensor, prev_stream, next_stream, compute),
                          portal.tensor_life)
        return get_phony(get_device(next_stream), requires_grad=False).detach()

    @staticmethod
    def backward(ctx: Any, grad_phony: Tensor | None) -> tuple[None, None, None, None]:
        portal: Portal = ctx.portal
        prev_stream, next_stream = ctx.streams
        if portal.grad is not None:
            portal.put_grad(copy_tensor(
                portal.use_grad(), next_stream, prev_stream, ctx.prev_compute))
        return None, None, None, None
