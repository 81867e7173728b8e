"""Offload: tensors move to host memory, and return before they are needed.

One stream of each device carries them, beside the one that computes::

    compute        cell i ──▶ cell i+1 ──▶ …          … ──▶ backward of i+1 ──▶ recomputation of i
                     └wait┐                                                      ┌wait┘
    host stream           x ──▶ host                                 host ──▶ x'

Who owns what: x is allocated on another stream than that which copies it, and x' on another one
than that which computes with it, so both uses are recorded with the allocator. Memory of the host
is pinned, or no copy would be late; PyTorch itself lets copies from it and to it end before it is
used again.

Who changes x in place after the cell may do so before it was copied, or afterwards. As where it
does not wait, that raises: an alias without memory tells the version of x.
"""
import torch
from torch import Tensor

from torchgpipe.base.private import unseen
from torchgpipe.base.structure import Tensors, is_plain
from torchgpipe.engine.streams import (AbstractStream, get_device, record_stream, use_stream,
                                       wait_stream)

__all__ = ['Offload']


class Offload:
    """Some tensors, which wait in the memory of the host.

    Args:
        stream: The stream that carries them.
    """

    __slots__ = ('_moved', '_stream', 'aliases')

    def __init__(self, stream: AbstractStream) -> None:
        self._stream = stream
        self._moved: list[bool] = []
        #: Tensors without memory that have the versions of those for which copies wait.
        self.aliases: list[Tensor] = []

    def store(self, tensors: Tensors, compute: AbstractStream) -> Tensors:
        """Return copies that wait; tensors that are not on the device of the stream stay.

        Args:
            tensors: The tensors, of any shapes.
            compute: The stream on which they are by now.
        """
        device = get_device(self._stream)
        self._moved = [x.device == device and is_plain(x) and x.numel() > 0 for x in tensors]
        wait_stream(self._stream, compute)
        with unseen(), use_stream(self._stream):
            self.aliases = [_without_memory(x) for x in tensors]
            return tuple(self._to_host(x) if moved else x
                         for x, moved in zip(tensors, self._moved))

    def _to_host(self, x: Tensor) -> Tensor:
        host = torch.empty_like(x, device='cpu', pin_memory=True, requires_grad=False)
        host.copy_(x.detach(), non_blocking=True)
        record_stream(x, self._stream)
        return host.requires_grad_(x.requires_grad)

    def fetch(self, tensors: Tensors, compute: AbstractStream) -> Tensors:
        """Return the tensors back for which these have waited.

        Args:
            tensors: What :meth:`store` gave.
            compute: The stream that will use them.
        """
        with unseen(), use_stream(self._stream):
            fetched = tuple(self._to_device(x, compute) if moved else x
                            for x, moved in zip(tensors, self._moved))
        wait_stream(compute, self._stream)
        return fetched

    def _to_device(self, x: Tensor, compute: AbstractStream) -> Tensor:
        y = x.detach().to(get_device(self._stream), non_blocking=True)
        record_stream(y, compute)
        return y.requires_grad_(x.requires_grad)


def _without_memory(x: Tensor) -> Tensor:
    """Return a tensor that has the version of another one, and nothing else of it."""
    alias = x.detach()
    alias.data = torch.empty(0, dtype=x.dtype, device=x.device)
    return alias
