"""State dicts: shards gathered into whole tensors, and whole tensors cut into this rank's shards.

::

    rank 0   shard 0 ─┐ collect                      relocate  ┌─▶ shard 0   rank 0
    rank 1   shard 1 ─┴─────────▶ whole tensors ───────────────┴─▶ shard 1   rank 1
                                  (of any number of ranks)

Both go through a state dict tensor by tensor. A state of an optimizer is cut as its parameter is,
if it has the parameter's shape.
"""
import copy
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchgpipe.shard import sizes, world
from torchgpipe.shard.agreement import agreed, same_everywhere
from torchgpipe.shard.collectives import broadcast
from torchgpipe.shard.entries import (Entries, Sharded, check_keys, check_shapes, name_of,
                                      optimizer_entries, place, sharded_parameters, split_dim)
from torchgpipe.shard.parameter import global_shape, part_shape

__all__ = ['collect_optimizer_state_dict', 'collect_state_dict', 'relocate_optimizer_state_dict',
           'relocate_state_dict']


def collect_state_dict(model: nn.Module, state_dict: Mapping[str, Any], prefix: str = '', *,
                       rank0_only: bool = False, device: torch.device | str | None = None
                       ) -> dict[str, Any]:
    """Gather the shards of a state dict into whole tensors: the state dict of the plain model.

    All ranks of a group have to call it. ::

        torch.save(ts.collect_state_dict(model, model.state_dict()), 'model.pt')

    One tensor is gathered after the other. A rank that gets the result holds it and one shard more
    at most; a rank that gets none, one shard. What is no shard is given on as it is.

    Args:
        model: The model with sharded layers.
        state_dict: Its state dict, or a part of it, the same keys on all ranks.
        prefix: What stands before the model's names in the keys, as ``'module.'`` for
            ``DistributedDataParallel``. Other keys are given on.
        rank0_only: Let the first rank of each group have the result, and others an empty one.
        device: Where the result is to be; where it is now, if not given.

    Raises:
        ValueError: A tensor has not the shape of the model's shard.
        RuntimeError: Another rank of the group failed, which is named; or ranks have other keys.
    """
    entries = _collect(state_dict, sharded_parameters(model, prefix), rank0_only, device)
    return _filled(state_dict, entries)


def relocate_state_dict(model: nn.Module, state_dict: Mapping[str, Any], prefix: str = '', *,
                        strict: bool = True) -> dict[str, Any]:
    """Cut whole tensors into this rank's shards, without communication.

    ::

        whole = torch.load('model.pt', mmap=True)
        model.load_state_dict(ts.relocate_state_dict(model, whole))

    One tensor is read after the other, so a mapping that reads them from a file when they are
    asked for takes the memory of one whole tensor. The number of ranks of the group that the
    tensors were collected from, if any, does not matter.

    Args:
        model: The model with sharded layers.
        state_dict: Whole tensors, as of :func:`collect_state_dict` or of the plain model.
        prefix: What stands before the model's names in the keys. Other keys are given on.
        strict: See that there are all of the model's keys, and no others behind the prefix.

    Raises:
        ValueError: Keys are missing, or the model does not have them, or tensors have other shapes
            than the model's; all of them are named.
    """
    if strict:
        check_keys([prefix + key for key in model.state_dict()],
                   [key for key in state_dict if key.startswith(prefix)])
    return _filled(state_dict, _relocate(state_dict, sharded_parameters(model, prefix)))


def collect_optimizer_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any], *,
                                 rank0_only: bool = False,
                                 device: torch.device | str | None = None) -> dict[str, Any]:
    """Gather the shards of an optimizer's state dict: that of the plain model's optimizer.

    A state of the shape of its parameter is a shard as the parameter is. One without dimensions,
    as a count of steps, is whole. ::

        ts.collect_optimizer_state_dict(optimizer, optimizer.state_dict())

    Args:
        optimizer: The optimizer, with sharded parameters.
        state_dict: Its state dict.
        rank0_only, device: As for :func:`collect_state_dict`.

    Raises:
        ValueError: A sharded parameter has a state of another shape, so that it can not be known
            how it is to be gathered; or the optimizer has other parameters.
        RuntimeError: As for :func:`collect_state_dict`.
    """
    with agreed('collecting the state of an optimizer'):
        entries, sharded = optimizer_entries(optimizer, state_dict)
    return _nested(state_dict, _collect(entries, sharded, rank0_only, device))


def relocate_optimizer_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any]
                                  ) -> dict[str, Any]:
    """Cut the states of an optimizer into this rank's shards, without communication.

    ::

        optimizer.load_state_dict(ts.relocate_optimizer_state_dict(optimizer, whole))

    Args:
        optimizer: The optimizer, with sharded parameters.
        state_dict: The state dict of :func:`collect_optimizer_state_dict`, or that of the
            optimizer of the plain model.

    Raises:
        ValueError: The optimizer has other parameters, or states have other shapes than theirs.
    """
    entries, sharded = optimizer_entries(optimizer, state_dict)
    return _nested(state_dict, _relocate(entries, sharded))


# --- collect and relocate
# ---------------------------------------------------------------------------------------


@torch.no_grad()
def _collect(entries: Entries, sharded: Sharded, rank0_only: bool,
             device: torch.device | str | None) -> dict[Any, Any]:
    keeps = world.current().tensor_rank == 0 or not rank0_only
    firsts: dict[Any, Any] = {}
    with agreed('collecting a state dict'):
        shards = {key: entries[key] for key in entries if key in sharded}
        check_shapes(shards, {key: part_shape(sharded[key]) for key in shards})
        ties = {key: firsts.setdefault(place(shard), key) for key, shard in shards.items()}
        collected = {key: None if key in shards else _moved(entries[key], device)
                     for key in entries if keeps}
    same_everywhere('the shards of a state dict', [
        (key, ties[key], shard.dtype, tuple(global_shape(sharded[key])))
        for key, shard in shards.items()])
    buffers: dict[torch.device, Tensor] = {}
    for key, shard in shards.items():
        if ties[key] == key:
            whole = _gathered(key, shard, sharded[key], keeps, device, buffers)
        if keeps:
            collected[key] = whole if ties[key] == key else collected[ties[key]]
    return collected


def _gathered(key: Any, shard: Tensor, parameter: Tensor, keeps: bool,
              device: torch.device | str | None, buffers: dict[torch.device, Tensor]
              ) -> Tensor | None:
    """Return the whole tensor, or help others to get it.

    Each rank in turn sends its shard to all others. That works for shards of unequal sizes, and on
    each backend, and takes the memory of one shard. That memory serves for all tensors: gloo's
    threads may hold what they have sent for a while, and would hold many one after the other.
    """
    here = world.current()
    dim, shape = split_dim(parameter), global_shape(parameter)
    parts = [[*shape[:dim], length, *shape[dim + 1:]]
             for length in sizes.lengths(shape[dim], here.tensor_size)]
    with agreed(f'collecting {name_of(key)}'):
        whole = (torch.empty(shape, dtype=shard.dtype, device=device or shard.device) if keeps
                 else None)
        buffer = _buffer(prod(parts[0]), shard, buffers)
    begin = 0
    for rank, part in enumerate(parts):
        piece = buffer[:prod(part)]
        if rank == here.tensor_rank:
            piece.view(part).copy_(shard)
        # As bytes, since backends do not know all types.
        broadcast(piece.view(torch.uint8), here.tensor_group, rank)
        if whole is not None:
            whole.narrow(dim, begin, part[dim]).copy_(piece.view(part))
        begin += part[dim]
    return whole


def _buffer(length: int, shard: Tensor, buffers: dict[torch.device, Tensor]) -> Tensor:
    """Return memory on the device that shards are sent from: a tensor's before, if it does."""
    where, size = _device(shard), length * shard.element_size()
    if where not in buffers or buffers[where].numel() < size:
        buffers[where] = torch.empty(size, dtype=torch.uint8, device=where)
    return buffers[where][:size].view(shard.dtype)


@torch.no_grad()
def _relocate(entries: Entries, sharded: Sharded) -> dict[Any, Any]:
    relocated: dict[Any, Any] = {}
    wrong: dict[Any, Any] = {}
    for key in entries:
        if key in sharded:
            relocated[key] = _part(key, entries[key], sharded[key], wrong)
        else:
            relocated[key] = entries[key]
    check_shapes(wrong, {key: global_shape(sharded[key]) for key in wrong})
    return relocated


def _part(key: Any, whole: Tensor, parameter: Tensor, wrong: dict[Any, Tensor]) -> Tensor | None:
    """Return this rank's shard in a memory of its own, so that the whole tensor can be freed."""
    here = world.current()
    dim, shape = split_dim(parameter), global_shape(parameter)
    if whole.shape != shape:
        wrong[key] = whole
        return None
    begin, length = sizes.part(shape[dim], here.tensor_size, here.tensor_rank)
    return whole.narrow(dim, begin, length).clone()


def _device(shard: Tensor) -> torch.device:
    """Return where a shard is sent from: the group may not communicate on each device."""
    kind = world.current().mesh.device_type
    return shard.device if shard.device.type == kind else torch.device(kind)


def _moved(value: Any, device: torch.device | str | None) -> Any:
    return value.to(device) if isinstance(value, Tensor) and device is not None else value


# --- state dicts of the kind that was given
# ---------------------------------------------------------------------------------------


def _filled(state_dict: Mapping[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict of other entries; modules keep versions of theirs as an attribute."""
    if not isinstance(state_dict, dict):
        return entries
    filled = copy.copy(state_dict)
    filled.clear()
    filled.update(entries)
    return filled


def _nested(state_dict: Mapping[str, Any], entries: dict[tuple[Any, str], Any]) -> dict[str, Any]:
    """Return the state dict of an optimizer with other states."""
    states: dict[Any, dict[str, Any]] = {}
    for (number, name), value in entries.items():
        states.setdefault(number, {})[name] = value
    return {**state_dict, 'state': states}
