"""The memory of tensors: in-place changes, sharing, copies and size."""
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Buffer

from torchgpipe.errors import nested

__all__ = ['Memories', 'check_nested', 'copy_of', 'is_among', 'is_plain', 'share_memory',
           'size_of', 'storage_id', 'versions', 'view_of']

#: Copies of memories, by :func:`storage_id` of what they were copied from.
Memories = dict[int, Tensor]


def storage_id(tensor: Tensor) -> int:
    """Tell memories apart, also where they are empty or lie on the meta device.

    A memory has one Python object for as long as it lives. ``data_ptr()`` is 0 for those.
    """
    return id(tensor.untyped_storage())


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """Count the changes in place that were made to tensors, or to their memory through others.

    Those that were made in inference mode are not counted.
    """
    try:
        return [x._version for x in tensors]
    except RuntimeError:
        return [0 if x.is_inference() else x._version for x in tensors]


def share_memory(some: Iterable[Tensor], others: Iterable[Tensor]) -> bool:
    """Return whether any of some tensors lies in the memory of any of the others."""
    memories = {storage_id(x) for x in others if x.layout is torch.strided}
    return any(storage_id(x) in memories for x in some if x.layout is torch.strided)


def is_among(x: Tensor, others: Iterable[Tensor]) -> bool:
    """Return whether a tensor has the very same elements, in place, as one of the others."""
    return any(x is y or _place(x) == _place(y) for y in others
               if x.layout is y.layout is torch.strided)


def _place(x: Tensor) -> tuple[object, ...]:
    return storage_id(x), x.storage_offset(), x.shape, x.stride()


def check_nested(x: Tensor) -> None:
    """Refuse a nested tensor of the layout whose sizes cannot be asked for."""
    if x.layout is torch.strided:
        raise nested()


def size_of(x: Tensor) -> int:
    """Return the bytes of a tensor's elements; of a sparse one, with those of their indices."""
    if x.layout is torch.strided:
        return x.numel() * x.element_size()
    if x.layout is torch.sparse_coo:
        return size_of(x._values()) + size_of(x._indices())
    return x.values().numel() * x.element_size() + 8 * x._nnz()


def is_plain(x: Any) -> bool:
    """Tell an ordinary tensor, whose memory can be had, from a sparse one or another type."""
    return type(x) in (Tensor, nn.Parameter, Buffer) and x.layout is torch.strided


def copy_of(x: Tensor, memories: Memories) -> Tensor:
    """Copy a tensor; tensors that share a memory share its copy.

    Args:
        x: The tensor.
        memories: The copies to share; a new one is added.
    """
    x = x.detach()
    if not is_plain(x):
        return x.clone()
    memory, key = x.untyped_storage(), storage_id(x)
    copy = memories.get(key)
    if copy is None:
        # A tensor that fills its memory keeps its strides in a clone, and so the same layout.
        copy = memories[key] = x.clone() if memory.nbytes() == x.numel() * x.element_size() \
            else _view(memory.clone(), x)
        return copy
    return view_of(copy, x)


def view_of(copy: Tensor, x: Tensor) -> Tensor:
    """Return a tensor that lies in the memory of a copy as one lies in its own."""
    return _view(copy.untyped_storage(), x)


def _view(memory: torch.UntypedStorage, x: Tensor) -> Tensor:
    view = torch.empty(0, dtype=x.dtype, device=x.device)
    return view.set_(memory, x.storage_offset(), x.size(), x.stride())
