"""State dicts: shards gathered into full tensors, and full tensors split into shards.

::

    rank 0   shard 0 ─┐ collect                      relocate  ┌─▶ shard 0   rank 0
    rank 1   shard 1 ─┴─────────▶ full tensors ────────────────┴─▶ shard 1   rank 1
                                  (of any number of ranks)

Both process a state dict one tensor at a time. A state of an optimizer is split like its
parameter, if it has the parameter's shape. A parameter has one entry for each of its names.
"""

import copy
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchgpipe.shard.collectives import broadcast, gathered, raise_on_all_ranks
from torchgpipe.shard.entries import (
    Entries,
    Sharded,
    check_names,
    check_shapes,
    name_of,
    nested,
    optimizer_entries,
    views,
)
from torchgpipe.shard.parameter import (
    global_shape,
    lengths,
    local_range,
    place,
    sharded_parameters,
    storage_dim,
)
from torchgpipe.shard.world import current

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def collect_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str = '',
    *,
    rank0_only: bool = False,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """Gather the shards of a state dict into full tensors: the state dict of the plain model.

    All ranks of a group have to call it. ::

        torch.save(ts.collect_state_dict(model, model.state_dict()), 'model.pt')

    One tensor is gathered after the other. A rank that gets the result holds at most one further
    shard; a rank without the result holds one shard. Other values are passed on as they are.

    Args:
        model: The model with sharded layers.
        state_dict: Its state dict, or a part of it, the same keys on all ranks.
        prefix: The prefix of the model's names in the keys, such as ``'module.'`` for
            ``DistributedDataParallel``. Other keys are passed on.
        rank0_only: Whether only the first rank of each group gets the result; the others get an
            empty one.
        device: The device of the result; by default, each tensor stays on its device.

    Raises:
        ValueError: A tensor does not have the shape of the model's shard.
        RuntimeError: Another rank of the group failed, and is named; or ranks have other keys.
    """
    sharded = sharded_parameters(model, prefix)
    return _filled(state_dict, _collect(state_dict, sharded, rank0_only, device))


def relocate_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], prefix: str = '', *, strict: bool = True
) -> dict[str, Any]:
    """Cut full tensors into this rank's shards, without communication.

    ::

        full = torch.load('model.pt', mmap=True)
        model.load_state_dict(ts.relocate_state_dict(model, full))

    One tensor is read after the other. So a mapping that reads a tensor from a file on access
    takes the memory of one full tensor. The tensors may have been collected from a group of any
    size.

    Args:
        model: The model with sharded layers.
        state_dict: Full tensors, as of :func:`collect_state_dict` or of the plain model.
        prefix: The prefix of the model's names in the keys. Other keys are passed on.
        strict: Whether to check that all of the model's keys, and no others with the prefix, are
            included.

    Raises:
        ValueError: Keys are missing, or the model does not have them, or tensors have other shapes
            than the model's; the error names all of them.
    """
    if strict:
        check_names(
            'a checkpoint has the keys of the model',
            'model',
            sorted(prefix + key for key in model.state_dict()),
            sorted(key for key in state_dict if key.startswith(prefix)),
            None,
            '. Pass prefix= if the keys have one, or strict=False to load common keys',
        )
    return _filled(state_dict, _relocate(state_dict, sharded_parameters(model, prefix)))


def collect_optimizer_state_dict(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    *,
    rank0_only: bool = False,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """Gather the shards of an optimizer's state dict, as for the plain model's optimizer.

    A state with the shape of its parameter is a shard if the parameter is. A state without
    dimensions, such as a count of steps, is full. ::

        ts.collect_optimizer_state_dict(optimizer, optimizer.state_dict())

    Args:
        optimizer: The optimizer, with sharded parameters.
        state_dict: Its state dict.
        rank0_only, device: As for :func:`collect_state_dict`.

    Raises:
        ValueError: A sharded parameter has a state of another shape, which cannot be gathered; or
            the optimizer has other parameters.
        RuntimeError: As for :func:`collect_state_dict`.
    """
    with raise_on_all_ranks('collecting the state of an optimizer'):
        entries, sharded = optimizer_entries(optimizer, state_dict)
    return {**state_dict, 'state': nested(_collect(entries, sharded, rank0_only, device))}


def relocate_optimizer_state_dict(
    optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """Cut the states of an optimizer into this rank's shards, without communication.

    ::

        optimizer.load_state_dict(ts.relocate_optimizer_state_dict(optimizer, full))

    Args:
        optimizer: The optimizer, with sharded parameters.
        state_dict: The state dict of :func:`collect_optimizer_state_dict`, or of the plain
            model's optimizer.

    Raises:
        ValueError: The optimizer has other parameters, or states have other shapes than their
            parameters.
    """
    entries, sharded = optimizer_entries(optimizer, state_dict)
    return {**state_dict, 'state': nested(_relocate(entries, sharded))}


# --- collect and relocate
# ---------------------------------------------------------------------------------------

# This does not use the collectives of DTensors. full_tensor() takes the memory of two full tensors
# on each rank, and gloo fails for some types. distribute_tensor() moves the full tensor to the
# devices of the mesh.


@torch.no_grad()
def _collect(
    entries: Entries, sharded: Sharded, rank0_only: bool, device: torch.device | str | None
) -> dict[Any, Any]:
    is_kept = current().tensor_rank == 0 or not rank0_only
    with raise_on_all_ranks('collecting a state dict'):
        values = views(entries, sharded)
        first_names = _first_names({key: values[key] for key in values if key in sharded})
        collected: dict[Any, Any] = {}
        if is_kept:
            for key, value in values.items():
                # A shard gets its place here, so that keys keep their order.
                collected[key] = None if key in sharded else _moved(value, device)
    facts = []
    for key, first in first_names.items():
        facts.append((key, first, values[key].dtype, tuple(values[key].shape)))
    _check_same(facts)

    buffers: dict[torch.device, Tensor] = {}
    full_tensors: dict[Any, Tensor | None] = {}
    for key, first in first_names.items():
        if key == first:
            full_tensors[key] = _full(name_of(key), values[key], is_kept, device, buffers)
        if is_kept:
            collected[key] = full_tensors[first]
    return collected


def _first_names(shards: Mapping[Any, 'DTensor']) -> dict[Any, Any]:
    """Return for each shard the first name of its memory, which tied parameters share."""
    by_place: dict[Any, Any] = {}
    first_names = {}
    for key, shard in shards.items():
        first_names[key] = by_place.setdefault(place(shard.to_local()), key)
    return first_names


def _first_missing(facts: list[Any], expected: list[Any]) -> str:
    """Return the first expected fact that is missing, as text."""
    for fact in expected:
        if fact not in facts:
            return repr(fact)
    return 'nothing of the kind'


def _check_same(facts: list[tuple[Any, ...]]) -> None:
    """Raise on all ranks if the shards of one differ from the first rank's."""
    ranks = dist.get_process_group_ranks(current().tensor_group)
    by_rank = gathered(facts, current().tensor_group)
    first = by_rank[0]
    for rank, other in zip(ranks, by_rank):
        if other != first:
            one = _first_missing(other, first)
            another = _first_missing(first, other)
            raise RuntimeError(
                f'the shards of a state dict are not the same on all ranks of the group {ranks}: '
                f'rank {ranks[0]} has {one}, rank {rank} {another}. Let all ranks of a group call '
                'this for the same model'
            )


def _full(
    name: str,
    view: 'DTensor',
    is_kept: bool,
    device: torch.device | str | None,
    buffers: dict[torch.device, Tensor],
) -> Tensor | None:
    """Return the full tensor of a DTensor, or help others to get it.

    Each rank in turn sends its shard to all others. This works for shards of unequal sizes, and on
    each backend, and takes the memory of one shard. The same memory is reused for all tensors,
    because gloo's threads may hold sent tensors for a while.
    """
    world = current()
    shard = view.to_local()
    dim = view.placements[-1].dim  # type: ignore[attr-defined]
    sizes = lengths(view.size(dim), world.tensor_size)
    shapes = []
    for size in sizes:
        shapes.append([*view.shape[:dim], size, *view.shape[dim + 1 :]])
    full = None
    with raise_on_all_ranks(f'collecting {name}'):
        if is_kept:
            full = torch.empty(view.shape, dtype=shard.dtype, device=device or shard.device)
        buffer = _buffer(prod(shapes[0]), shard, buffers)

    begin = 0
    for rank, shape in enumerate(shapes):
        piece = buffer[: prod(shape)].view(shape)
        if rank == world.tensor_rank:
            piece.copy_(shard)
        # As bytes, because backends do not support all types.
        broadcast(piece.view(-1).view(torch.uint8), world.tensor_group, rank)
        if full is not None:
            full.narrow(dim, begin, sizes[rank]).copy_(piece)
        begin += sizes[rank]
    return full


def _buffer(length: int, shard: Tensor, buffers: dict[torch.device, Tensor]) -> Tensor:
    """Return memory on the device of communication, reused from an earlier tensor if possible."""
    device = shard.device
    if device.type != current().mesh.device_type:
        device = torch.device(current().mesh.device_type)
    size = length * shard.element_size()
    if device not in buffers or buffers[device].numel() < size:
        buffers[device] = torch.empty(size, dtype=torch.uint8, device=device)
    return buffers[device][:size].view(shard.dtype)


@torch.no_grad()
def _relocate(entries: Entries, sharded: Sharded) -> dict[Any, Any]:
    relocated: dict[Any, Any] = {}
    wrong: dict[Any, Any] = {}
    for key in entries:
        value = entries[key]
        if key in sharded:
            dim = storage_dim(sharded[key])
            shape = global_shape(sharded[key])
            if value.shape != shape:
                wrong[key] = value
            elif dim is not None:  # A copy, so that the full tensor can be freed.
                value = value.narrow(dim, *local_range(shape[dim])).clone()
        relocated[key] = value
    check_shapes(wrong, {key: global_shape(sharded[key]) for key in wrong})
    return relocated


def _moved(value: Any, device: torch.device | str | None) -> Any:
    if isinstance(value, Tensor) and device is not None:
        return value.to(device)
    return value


def _filled(state_dict: Mapping[str, Any], entries: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with other entries, and the same attributes, such as versions."""
    if not isinstance(state_dict, dict):
        return entries
    filled = copy.copy(state_dict)
    filled.clear()
    filled.update(entries)
    return filled
