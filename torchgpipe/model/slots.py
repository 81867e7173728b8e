"""Slots: the places of parameters and buffers in modules, and new tensors for them."""

from collections.abc import Iterator
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


def put(slot: TensorSlot, value: Tensor, first_slots: FirstSlots) -> None:
    """Put a value into a slot; slots that shared a tensor get the first slot's tensor again."""
    module, name, before = slot
    first = first_slots.setdefault(id(before), slot)
    if first is slot:
        setattr(module, name, like(before, value))
    else:
        setattr(module, name, getattr(first.module, first.name))


def like(before: Tensor, value: Tensor) -> Tensor:
    """Return a value as a parameter or buffer, with the attributes of an earlier one."""
    new = value
    if isinstance(before, nn.Parameter):
        new = nn.Parameter(value, before.requires_grad)
    if is_plain(before):
        new.__dict__.update(before.__dict__)
    return new


def allocated(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor with memory like one on the meta device, which may be split.

    Buffers are zero, because a module may leave out a buffer that weights do not have.
    """
    value = torch.empty_like(tensor, device=device, requires_grad=False)
    if not isinstance(tensor, nn.Parameter):
        value.zero_()
    return value
