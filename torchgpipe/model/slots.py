"""Slots: the places of parameters and buffers in modules, and new tensors for them."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.base.structure import is_plain


class TensorSlot(NamedTuple):
    """The place of a parameter or a buffer, and the tensor there."""

    module: nn.Module
    name: str
    tensor: Tensor


#: The first slot of each meta tensor, by the tensor's id. The slot keeps the tensor alive, so that
#: its id is not reused.
FirstSlots = dict[int, TensorSlot]


def slots_in(module: nn.Module, recurse: bool = True) -> Iterator[TensorSlot]:
    """Yield the parameters and buffers of a module, with their places."""
    for part in module.modules() if recurse else [module]:
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield TensorSlot(part, name, tensor)


def put(slot: TensorSlot, make: Callable[[], Tensor], first_slots: FirstSlots) -> None:
    """Put a new tensor into a slot; slots that shared a tensor get the new one of the first slot.

    Args:
        make: Returns the values. It is called for the first slot of a tensor only.
    """
    module, name, before = slot
    first = first_slots.setdefault(id(before), slot)
    if first is slot:
        setattr(module, name, like(before, make()))
    else:
        setattr(module, name, getattr(first.module, first.name))


def like(before: Tensor, value: Tensor) -> Tensor:
    """Return a value as a parameter or buffer, with the attributes of an earlier one."""
    new = value
    if isinstance(before, nn.Parameter):
        new = nn.Parameter(value, before.requires_grad)
    if is_plain(before):  # Attributes of a DTensor are its parts.
        new.__dict__.update(before.__dict__)
    return new


def allocate(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor with memory like one on the meta device, which may be split.

    A buffer is zero: a layer may accept weights without it.
    """
    if is_plain(tensor):
        # Of a tensor on the meta device, `empty_like` imports 33 MB of PyTorch's Python code.
        value = torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device
        )
    else:
        value = torch.empty_like(tensor, device=device, requires_grad=False)
    if not isinstance(tensor, nn.Parameter):
        value.zero_()
    return value
