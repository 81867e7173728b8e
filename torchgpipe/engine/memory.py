"""The memory of tensors: in-place changes, sharing and size."""
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchgpipe.errors import nested

__all__ = ['check_nested', 'is_among', 'share_memory', 'size_of', 'storage_id', 'versions']


def storage_id(tensor: Tensor) -> int:
    """Tell memories apart, also where they are empty or lie on the meta device.

    A memory has one Python object for as long as it lives. ``data_ptr()`` is 0 for those, and
    counts as a write to a memory that is copied on write.
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
