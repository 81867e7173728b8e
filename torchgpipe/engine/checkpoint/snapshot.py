"""The value of a tensor at a given time, in a copy that the first write creates.

[Note: Copy on write] On the CPU, a copy shares its memory
with the tensor until someone writes to either (copy-on-write). A kernel has to ask before it
writes, so this finds every change, also one that does not count as a new version of the tensor,
and it is free for what never changes. It exists for ordinary tensors only. Others, and those on
other devices, have to be copied at once. And PyTorch fails to resize a memory that is shared in
this way, so what may be resized gets a memory of its own before (:func:`own_memory`).
"""
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Buffer

from torchgpipe.engine.memory import storage_id, versions
from torchgpipe.private import data_address, lazy_clone

__all__ = ['Snapshot', 'Memories', 'copy_of', 'copy_on_write', 'is_plain', 'own_memory',
           'view_of', 'with_grad']

#: Copies of memories, by :func:`storage_id` of what they were copied from.
Memories = dict[int, Tensor]


def is_plain(x: Any) -> bool:
    """Tell an ordinary tensor, whose memory can be had, from a sparse one or another type."""
    return type(x) in (Tensor, nn.Parameter, Buffer) and x.layout is torch.strided


def copy_of(x: Tensor, memories: Memories) -> Tensor:
    """Copy a tensor, on write if that can be; tensors that share a memory share its copy.

    Args:
        x: The tensor.
        memories: The copies to share; a new one is added.
    """
    if not is_plain(x):
        return x.detach().clone()
    copy = copy_on_write(x, memories)
    if copy is None:
        copy = memories[storage_id(x)] = _view(x.untyped_storage().clone(), x)
    return copy


def copy_on_write(x: Tensor, memories: Memories) -> Tensor | None:
    """Do the same, but only if it can be on write, or has been done."""
    if not is_plain(x):
        return None
    key = storage_id(x)
    if key in memories:
        return view_of(memories[key], x)
    copy = _on_write(x)
    if copy is not None:
        memories[key] = copy
    return copy


def _on_write(x: Tensor) -> Tensor | None:
    # What `torch.load` gives cannot be resized and knows no allocator. To write to it, were it
    # copied on write, would end the process.
    if not x.is_cpu or not x.untyped_storage().resizable():
        return None
    try:
        return lazy_clone(x.detach())
    except RuntimeError:  # The memory is not PyTorch's own, as where processes share it.
        return None


def view_of(copy: Tensor, x: Tensor) -> Tensor:
    """Return a tensor that lies in the memory of a copy as one lies in its own."""
    return _view(copy.untyped_storage(), x)


def _view(memory: torch.UntypedStorage, x: Tensor) -> Tensor:
    view = torch.empty(0, dtype=x.dtype, device=x.device)
    return view.set_(memory, x.storage_offset(), x.size(), x.stride())


class Snapshot:
    """A tensor as it was: which one it was, and its value.

    The tensor itself is not owned: it may carry a graph, and the graph owns this object.

    Args:
        tensor: The tensor.
        value: A copy of it.
    """

    __slots__ = ('_on_write', '_requires_grad', '_tensor', '_value', '_versions')

    def __init__(self, tensor: Tensor, value: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._requires_grad = tensor.requires_grad
        self._value = value
        self._versions = versions([tensor])
        #: Whether the copy is one on write.
        self._on_write = _share_memory(tensor, value)

    def is_still(self, now: Any) -> bool:
        """Tell without waiting for a device whether this is there now, with the same value."""
        if self._is_unwritten(now):
            return True
        tensor, value = self._tensor(), self._value
        # Some kernels ask for the right to write and only read.
        return (tensor is not None and tensor is now and tensor.is_cpu
                and (tensor.shape, tensor.dtype) == (value.shape, value.dtype)
                and is_plain(tensor) and torch.equal(tensor, value))

    def _is_unwritten(self, now: Any) -> bool:
        """Return whether nobody has written since, be it the same value."""
        tensor = self._tensor()
        return (self._on_write and tensor is not None and tensor is now
                and _share_memory(tensor, self._value))

    def was_written(self, now: Any) -> bool:
        """Return whether the value is another one now, where a copy on write does not tell it."""
        tensor = self._tensor()
        if self._on_write or tensor is None or tensor is not now:
            return False
        # PyTorch compares no values of other layouts; and those of a tensor that is split over
        # processes by a collective, to which others need not come.
        if tensor.layout is not torch.strided or not is_plain(tensor):
            return versions([tensor]) != self._versions
        return not torch.equal(self._value, tensor)

    def restored(self, now: Any, memories: Memories) -> Any:
        """Return what a recomputation may use, and write to, in place of what is there now."""
        if self._is_unwritten(now):
            # The first pass did not write to it, so neither will the recomputation.
            return with_grad(now, self._requires_grad)
        value = copy_of(self._value, memories)
        if now is not None and now.shape != value.shape:
            own_memory(value)
        if isinstance(now, nn.Parameter):
            return nn.Parameter(value, self._requires_grad)
        return value.requires_grad_(self._requires_grad)


def own_memory(tensor: Tensor) -> None:
    """Let a copy on write, or what it is a copy of, have its own memory from now on."""
    if is_plain(tensor):
        tensor.data_ptr()  # Who asks for the address may write.


def _share_memory(tensor: Tensor, copy: Tensor) -> bool:
    """Return whether nobody has written to a tensor or to its copy on write."""
    return is_plain(tensor) and tensor.is_cpu \
        and data_address(tensor) == data_address(copy)


def with_grad(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Return a tensor that requires grad or not, over the same memory."""
    if tensor.requires_grad is requires_grad:
        return tensor
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), requires_grad)
    return tensor.detach().requires_grad_(requires_grad)
