"""Portals of torchgpipe 0.0.7: a skip tensor leaves its partition and reappears in a later one.

The autograd graph has a separate edge for each skip, which partitions in between never see. A
*phony* passes along it; the tensor and its gradient pass through the portal::

    forward     tensor ──PortalBlue──▶ phony ──PortalCopy──▶ phony ──PortalOrange──▶ tensor
                      in: portal.tensor     moved over the copy streams     out: portal.tensor
    backward    grad ◀──PortalBlue── · ◀──PortalCopy── · ◀──PortalOrange── grad
                      out: portal.grad      moved back                      in: portal.grad

[Note: Tensor life of a portal]
A portal releases its tensor after its last use. Its *life* is the number of remaining uses::

                              stash (blue)     pop (orange)     pop again, in backward
    without checkpoint  2 ──▶ 1            ──▶ 0
    with checkpoint     3 ──▶ 2            ──▶ 1            ──▶ 0
    stash, recomputed   1 ──▶ 0            no further use: its own graph is the first one's
"""

from typing import Any

import torch
from torch import Tensor

from torchgpipe.base.context import context
from torchgpipe.engine.backward_order import copy_tensor, get_phony
from torchgpipe.engine.streams import AbstractStream, current_stream, get_device
from torchgpipe.legacy.pipeline import Batch
from torchgpipe.skip.layout import SkipLayout
from torchgpipe.skip.transfer import Key, Namespace, SkipTracker

__all__ = [
    'Portal',
    'PortalBlue',
    'PortalCopy',
    'PortalOrange',
    'SkipTrackerThroughPortals',
    'SkipTrackerThroughPotals',
]


class Portal:
    """The place of a skip tensor between partitions, and then of its gradient.

    >>> portal = Portal(torch.ones(2), tensor_life=2)
    >>> phony = portal.blue()
    >>> portal.orange(phony)
    tensor([1., 1.])
    >>> portal.orange(phony)
    Traceback (most recent call last):
    RuntimeError: tensor in portal has been removed

    Args:
        tensor: The skip tensor, or ``None``, which has no node in the graph.
        tensor_life: The number of uses: 2 without checkpointing, 3 with it, 1 when it is stashed
            again in a recomputation.
    """

    __slots__ = ('grad', 'tensor', 'tensor_life')

    def __init__(self, tensor: Tensor | None, tensor_life: int) -> None:
        self.grad: Tensor | None = None
        self.tensor: Tensor | None = None
        self.tensor_life = 0
        self.put_tensor(tensor, tensor_life)

    def blue(self) -> Tensor:
        """Take the tensor in, and return the phony that represents it."""
        tensor = self.use_tensor()
        if tensor is None:
            return get_phony(torch.device('cpu'), requires_grad=False)
        # From here on, only the graph has the tensor's history. The nodes of the graph own this
        # portal, so it must not own the graph.
        if self.tensor is not None:
            self.tensor = self.tensor.detach()
        return PortalBlue.apply(self, tensor)  # type: ignore[no-any-return,no-untyped-call]

    def orange(self, phony: Tensor) -> Tensor | None:
        """Return the tensor, in exchange for the phony."""
        self.check_tensor_life()
        if self.tensor is None:
            return self.use_tensor()
        tensor: Tensor = PortalOrange.apply(self, phony)  # type: ignore[no-untyped-call]
        return tensor

    def copy(
        self, prev_stream: AbstractStream, next_stream: AbstractStream, phony: Tensor
    ) -> Tensor:
        """Move the tensor to another device, and return the phony that represents it there."""
        self.check_tensor_life()
        if self.tensor is None:
            return get_phony(torch.device('cpu'), requires_grad=False)
        return PortalCopy.apply(  # type: ignore[no-any-return,no-untyped-call]
            self, prev_stream, next_stream, phony
        )

    def check_tensor_life(self) -> None:
        """Raise :exc:`RuntimeError` if the tensor is no longer there."""
        if self.tensor_life <= 0:
            raise RuntimeError('tensor in portal has been removed')

    def put_tensor(self, tensor: Tensor | None, tensor_life: int) -> None:
        """Keep a tensor until it has been used ``tensor_life`` times."""
        self.tensor_life = tensor_life
        self.tensor = tensor if tensor_life > 0 else None

    def use_tensor(self) -> Tensor | None:
        """Return the tensor; release it after the last use."""
        self.check_tensor_life()
        tensor = self.tensor
        self.put_tensor(tensor, self.tensor_life - 1)
        return tensor

    def put_grad(self, grad: Tensor) -> None:
        """Keep a gradient until it is used."""
        self.grad = grad

    def use_grad(self) -> Tensor:
        """Return the gradient and release it."""
        if self.grad is None:
            raise RuntimeError('grad in portal has been removed or never set')
        grad = self.grad
        self.grad = None
        return grad


class PortalBlue(torch.autograd.Function):
    """The entrance of a portal: takes the tensor, returns a phony."""

    @staticmethod
    def forward(ctx: Any, portal: Portal, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.portal = portal
        return get_phony(tensor.device, requires_grad=False).detach()

    @staticmethod
    def backward(ctx: Any, grad_phony: Tensor | None) -> tuple[None, Tensor | None]:
        # None if this pass did not run through PortalOrange, because the tensor was not used, but
        # through another output of the cell.
        portal: Portal = ctx.portal
        return None, None if portal.grad is None else portal.use_grad()


class PortalOrange(torch.autograd.Function):
    """The exit of a portal: takes the phony, returns the tensor."""

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
    """The copy from one device to another, on the copy streams: takes and returns a phony."""

    @staticmethod
    def forward(
        ctx: Any,
        portal: Portal,
        prev_stream: AbstractStream,
        next_stream: AbstractStream,
        phony: Tensor,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.portal = portal
        ctx.streams = prev_stream, next_stream
        ctx.prev_compute = current_stream(get_device(prev_stream))
        compute = current_stream(get_device(next_stream))
        assert portal.tensor is not None
        portal.put_tensor(
            copy_tensor(portal.tensor, prev_stream, next_stream, compute), portal.tensor_life
        )
        return get_phony(get_device(next_stream), requires_grad=False).detach()

    @staticmethod
    def backward(ctx: Any, grad_phony: Tensor | None) -> tuple[None, None, None, None]:
        portal: Portal = ctx.portal
        prev_stream, next_stream = ctx.streams
        if portal.grad is not None:
            portal.put_grad(
                copy_tensor(portal.use_grad(), next_stream, prev_stream, ctx.prev_compute)
            )
        return None, None, None, None


class SkipTrackerThroughPortals(SkipTracker):
    """The skip tensors of one micro-batch, with portals for skips to another partition.

    Args:
        skip_layout: The skips that go to another partition.
    """

    def __init__(self, skip_layout: SkipLayout) -> None:
        super().__init__()
        self.skip_layout = skip_layout
        self.portals: dict[Key, Portal] = {}
        self._phonies: dict[Key, Tensor] = {}

    def save(self, batch: Batch, ns: Namespace | None, name: str, tensor: Tensor | None) -> None:
        """Keep a skip tensor: [Note: Tensor life of a portal]."""
        if not self.skip_layout.requires_copy(ns, name):
            super().save(batch, ns, name, tensor)
            return
        portal = self.portals.get((ns, name))
        again = portal is not None and context.recomputing
        if again:
            life = 1
        elif context.checkpointing:
            life = 3
        else:
            life = 2
        if portal is None:
            portal = self.portals[ns, name] = Portal(tensor, life)
        else:
            portal.put_tensor(tensor, life)
        self._phonies[ns, name] = portal.blue()

    def load(self, batch: Batch, ns: Namespace | None, name: str) -> Tensor | None:
        """Return a skip tensor; :exc:`KeyError` if there is none."""
        if not self.skip_layout.requires_copy(ns, name):
            return super().load(batch, ns, name)
        return self.portals[ns, name].orange(self._phonies[ns, name])

    def copy(
        self,
        batch: Batch,
        prev_stream: AbstractStream,
        next_stream: AbstractStream,
        ns: Namespace | None,
        name: str,
    ) -> None:
        """Move a skip tensor to another device."""
        self._phonies[ns, name] = self.portals[ns, name].copy(
            prev_stream, next_stream, self._phonies[ns, name]
        )


#: As torchgpipe 0.0.7 spelled it.
SkipTrackerThroughPotals = SkipTrackerThroughPortals
