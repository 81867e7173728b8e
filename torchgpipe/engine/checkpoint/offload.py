"""Offload: inputs of checkpointed cells wait for backward in the memory of the host.

One stream of each device copies them, concurrently with the compute stream::

    compute        cell i ──▶ cell i+1 ──▶ …          … ──▶ backward of i+1 ──▶ recomputation of i
                     └wait┐                                                      ┌wait┘
    host stream           x ──▶ host                                 host ──▶ x'

Ownership: x is allocated on the compute stream or a copy stream, and read on the host stream. x'
is allocated on the host stream and read on the compute stream. Both uses are recorded with the
allocator. Host memory is pinned, because copies are asynchronous only with pinned memory. PyTorch
reuses pinned memory only after copies from it and to it have ended.

An operation that changes x in place after the cell may run before or after the copy. It raises in
backward, as without offload: an alias without memory has the version of x.
"""

import torch
from torch import Tensor

from torchgpipe.base.private import alias_of, unseen
from torchgpipe.base.structure import Tensors, is_plain
from torchgpipe.engine.streams import (
    AbstractStream,
    get_device,
    record_stream,
    use_stream,
    wait_stream,
)


class Offload:
    """Tensors that a stream copies to host memory, where they are kept until they are needed."""

    def __init__(self, stream: AbstractStream) -> None:
        self._stream = stream
        self._moved: list[bool] = []
        #: Tensors without memory that have the versions of the stored tensors.
        self.aliases: list[Tensor] = []

    def store(self, tensors: Tensors, compute: AbstractStream) -> Tensors:
        """Return copies in host memory. Tensors on another device than the stream's stay.

        Args:
            compute: The stream on which the tensors are available.
        """
        device = get_device(self._stream)
        stored = []
        wait_stream(self._stream, compute)
        with unseen(), use_stream(self._stream):
            for x in tensors:
                moves = x.device == device and is_plain(x) and x.numel() > 0
                self._moved.append(moves)
                # An alias without memory shows a later change of x, and lets x be freed.
                self.aliases.append(_without_memory(x))
                stored.append(self._to_host(x) if moves else x)
        return tuple(stored)

    def wait(self, compute: AbstractStream) -> None:
        """Let a stream wait for the copies, before it writes to the tensors."""
        wait_stream(compute, self._stream)

    def _to_host(self, x: Tensor) -> Tensor:
        host = torch.empty_like(x, device='cpu', pin_memory=True, requires_grad=False)
        host.copy_(x.detach(), non_blocking=True)
        record_stream(x, self._stream)  # rule 13: x belongs to the compute stream
        return host.requires_grad_(x.requires_grad)

    def fetch(self, tensors: Tensors, compute: AbstractStream) -> Tensors:
        """Return the tensors, copied back to the device.

        Args:
            compute: The stream that will use them.
        """
        fetched = []
        with unseen(), use_stream(self._stream):
            for x, moved in zip(tensors, self._moved):
                fetched.append(self._to_device(x, compute) if moved else x)
        wait_stream(compute, self._stream)
        return tuple(fetched)

    def _to_device(self, x: Tensor, compute: AbstractStream) -> Tensor:
        y = x.detach().to(get_device(self._stream), non_blocking=True)
        record_stream(y, compute)  # rule 13: y belongs to the host stream
        return y.requires_grad_(x.requires_grad)


def _without_memory(x: Tensor) -> Tensor:
    """Return a tensor that shares only the version with another one."""
    alias = alias_of(x)
    alias.data = torch.empty(0, dtype=x.dtype, device=x.device)
    return alias
