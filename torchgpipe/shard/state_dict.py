"""State dicts: shards gathered into full tensors, and full tensors split into shards.

A parameter has one entry for each of its names. In the state dict of an optimizer it has several,
and the states of its shape are shards if it is one. A checkpoint names them by the parameter::

    optimizer.state.0.weight.exp_avg

This file makes the entries itself, because PyTorch would take a step with an optimizer that has
not taken one yet, and does not know parameters that ranks share.

::

    rank 0   shard 0 ─┐ collect                      relocate  ┌─▶ shard 0   rank 0
    rank 1   shard 1 ─┴─────────▶ full tensors ────────────────┴─▶ shard 1   rank 1
                                  (of any number of ranks)

Both process a state dict one tensor at a time. A state of an optimizer is split like its
parameter, if it has the parameter's shape.
"""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchgpipe.shard.collectives import broadcast, gathered, raise_on_all_ranks
from torchgpipe.shard.parameter import (
    dtensor,
    global_shape,
    lengths,
    own,
    place,
    shard_shape,
    sharded_parameters,
    storage_dim,
)
from torchgpipe.shard.world import current

#: The values of a state dict by their keys. For an optimizer, keys are pairs: the number of the
#: parameter, and the name of the state.
Entries = Mapping[Any, Any]

#: The parameters of the values that are shards, by their keys.
Sharded = Mapping[Any, Tensor]


def views(entries: Entries, sharded: Sharded) -> dict[Any, Any]:
    """Return entries with shards replaced by DTensors in the same memory."""
    found = {key: entries[key] for key in entries}
    check_shapes(
        {key: value for key, value in found.items() if key in sharded},
        {key: shard_shape(parameter) for key, parameter in sharded.items()},
    )
    return {
        key: dtensor(sharded[key], value) if key in sharded else value
        for key, value in found.items()
    }


def local(entries: Entries) -> dict[Any, Any]:
    """Return entries with DTensors replaced by local tensors."""
    from torch.distributed.tensor import DTensor  # takes long

    return {
        key: value.to_local() if isinstance(value, DTensor) else value
        for key, value in entries.items()
    }


def optimizer_entries(
    optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> tuple[dict[tuple[Any, str], Any], dict[tuple[Any, str], Tensor]]:
    """Return the states of an optimizer, and the parameters of those that are shards."""
    here = [group['params'] for group in optimizer.param_groups]
    there = [group['params'] for group in state_dict['param_groups']]
    if [len(group) for group in here] != [len(group) for group in there]:
        raise ValueError(
            'a state dict belongs to an optimizer with the same groups of parameters: this one '
            f'has {[len(group) for group in here]} parameters in its groups, the state dict '
            f'{[len(group) for group in there]}. Make the optimizer as it was made before'
        )
    parameters = {
        number: parameter
        for numbers, group in zip(there, here)
        for number, parameter in zip(numbers, group)
    }
    entries = {
        (number, name): value
        for number, states in state_dict['state'].items()
        for name, value in states.items()
    }
    sharded = {
        key: parameters[key[0]]
        for key, value in entries.items()
        if key[0] in parameters
        and storage_dim(parameters[key[0]]) is not None
        and isinstance(value, Tensor)
        and value.dim()
    }
    return entries, sharded


def check_names(
    message: str,
    of: str,
    here: Collection[str],
    saved: Collection[str],
    most: int | None = None,
    hint: str = '',
) -> None:
    """Raise if a checkpoint misses names, or has others.

    Args:
        most: How many names to list, with similar names; by default all, without similar names.

    Raises:
        ValueError: The checkpoint misses names, or has others.
    """

    def close(name: str, others: list[str]) -> str:
        found = get_close_matches(name, others[:1000], 1) if most else ()
        return repr(name) + ''.join(f' (like {each!r})' for each in found)

    known = {*here}
    there = {*saved}
    missing = [name for name in here if name not in there]
    foreign = [name for name in saved if name not in known]
    reasons = []
    if missing:
        names = [close(name, foreign) for name in missing[:most]]
        reasons.append(f'it misses {some(names, len(missing))}')
    if foreign:
        names = [close(name, missing) for name in foreign[:most]]
        reasons.append(f'the {of} does not have {some(names, len(foreign))}')
    if reasons:
        raise ValueError(f'{message}: {"; ".join(reasons)}{hint}')


def some(texts: Sequence[str], of: int) -> str:
    """Return a list of texts, with the number of further ones."""
    return ', '.join(texts) + (f' and {of - len(texts)} more' if of > len(texts) else '')


def check_shapes(tensors: Entries, shapes: Mapping[Any, torch.Size]) -> None:
    """Raise an error that names all tensors with other shapes than the given ones."""
    wrong = [
        f'{name_of(key)} is {tuple(tensor.shape)} and not {tuple(shapes[key])}'
        for key, tensor in tensors.items()
        if tensor.shape != shapes[key]
    ]
    if wrong:
        raise ValueError(
            'shards have the shapes that they have in the model, and a state of an optimizer that '
            'of its parameter; what is cut into shards is full: '
            + '; '.join(wrong)
            + '. Is it of another model, or collected already, or not yet?'
        )


def name_of(key: Any) -> str:
    """Return the name of a tensor of a model, or of a state of an optimizer."""
    if isinstance(key, tuple):
        return f"'{key[1]}' of parameter {key[0]}"
    return f"'{key}'"


def nested(entries: Mapping[tuple[Any, str], Any]) -> dict[Any, dict[str, Any]]:
    """Return entries by the first part of their keys, then by the second."""
    found: dict[Any, dict[str, Any]] = {}
    for (first, second), value in entries.items():
        found.setdefault(first, {})[second] = value
    return found


# --- entries of a checkpoint
# ---------------------------------------------------------------------------------------


def under(saved: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries of a checkpoint that have a prefix, without it."""
    return {
        key.removeprefix(prefix): value for key, value in saved.items() if key.startswith(prefix)
    }


def by_names(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return entries by the names of parameters, then by the last part of their keys."""
    return nested(
        {(key.rpartition('.')[0], key.rpartition('.')[2]): value for key, value in saved.items()}
    )


def is_tensor(saved: Any) -> bool:
    """Return whether an entry of a checkpoint is a tensor, by its metadata."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # takes long

    return isinstance(saved, TensorStorageMetadata)


def _form(saved: Any, parameter: Tensor) -> Any:
    """Return a tensor to read a state into; other values are read as they are."""
    if not is_tensor(saved):
        return None
    size = saved.size
    dtype = saved.properties.dtype
    if not size:
        return torch.empty((), dtype=dtype)  # The optimizer moves it to the right device.
    if storage_dim(parameter) is not None:
        return dtensor(parameter, torch.empty_like(parameter, dtype=dtype))
    if size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype)
    return torch.empty(size, dtype=dtype, device=parameter.device)


class Named:
    """An optimizer by the names of its parameters.

    Raises:
        ValueError: The model does not have the parameters.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self.parameters = [x for group in optimizer.param_groups for x in group['params']]
        foreign = [tuple(x.shape) for x in self.parameters if id(x) not in names]
        if foreign:
            raise ValueError(
                f'{len(foreign)} parameters of the optimizer are not in the model, '
                f'with shapes {foreign[:5]}: make it of model.parameters(), and '
                'another one for parameters of a loss, say, which is saved on its '
                'own'
            )
        self.names = [names[id(x)] for x in self.parameters]

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of the optimizer, with names for parameters."""
        groups = []
        for group in self._optimizer.state_dict()['param_groups']:
            names = [self.names[number] for number in group['params']]
            groups.append({**group, 'params': names})
        return groups

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the states of each parameter, with DTensors in the memory of shards.

        Raises:
            ValueError: A state does not have the shape of its shard.
        """
        found = nested(views(*optimizer_entries(self._optimizer, self._optimizer.state_dict())))
        return {
            self.names[number]: states
            for number, states in found.items()
            if isinstance(number, int)
        }  # Others are of no parameter.

    def forms(self, saved: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return tensors to read the saved states, or options, into.

        An optimizer has states after its first step only. A step only for that would change the
        count of its steps.
        """
        forms = {}
        for name, x in zip(self.names, self.parameters):
            state = saved.get(name, {})
            forms[name] = {key: _form(value, x) for key, value in state.items()}
        return forms

    def load(
        self, states: Mapping[str, Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]
    ) -> None:
        """Load states into the optimizer, and options into its groups."""
        own = self._optimizer.state_dict()['param_groups']
        self._optimizer.load_state_dict(
            {
                'state': {
                    number: states[name] if storage_dim(x) is None else local(states[name])
                    for number, (name, x) in enumerate(zip(self.names, self.parameters))
                    if states[name]
                },
                'param_groups': [
                    {**packed, **group, 'params': packed['params']}
                    for packed, group in zip(own, groups)
                ],
            }
        )


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
    return _filled(
        state_dict, _collect(state_dict, sharded_parameters(model, prefix), rank0_only, device)
    )


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

# This does not use DTensors. full_tensor() takes the memory of two full tensors on each rank, and
# gloo fails for some types. distribute_tensor() moves the full tensor to the devices of the mesh.


@torch.no_grad()
def _collect(
    entries: Entries, sharded: Sharded, rank0_only: bool, device: torch.device | str | None
) -> dict[Any, Any]:
    keeps = current().tensor_rank == 0 or not rank0_only
    firsts: dict[Any, Any] = {}
    with raise_on_all_ranks('collecting a state dict'):
        found = views(entries, sharded)
        ties = {
            key: firsts.setdefault(place(value.to_local()), key)
            for key, value in found.items()
            if key in sharded
        }
        collected = {
            key: None if key in ties else _moved(value, device)
            for key, value in found.items()
            if keeps
        }
    _check_same([(key, ties[key], found[key].dtype, tuple(found[key].shape)) for key in ties])
    buffers: dict[torch.device, Tensor] = {}
    for key, first in ties.items():
        if key == first:
            full = _full(name_of(key), found[key], keeps, device, buffers)
        if keeps:
            collected[key] = full if key == first else collected[first]
    return collected


def _first_missing(facts: list[Any], expected: list[Any]) -> str:
    """Return the first expected fact that is missing, as text."""
    return next((repr(fact) for fact in expected if fact not in facts), 'nothing of the kind')


def _check_same(facts: list[tuple[Any, ...]]) -> None:
    """Raise on all ranks if the shards of one differ from the first rank's."""
    ranks = dist.get_process_group_ranks(current().tensor_group)
    first, *others = gathered(facts, current().tensor_group)
    for rank, other in zip(ranks[1:], others):
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
    view: Any,
    keeps: bool,
    device: torch.device | str | None,
    buffers: dict[torch.device, Tensor],
) -> Tensor | None:
    """Return the full tensor of a DTensor, or help others to get it.

    Each rank in turn sends its shard to all others. This works for shards of unequal sizes, and on
    each backend, and takes the memory of one shard. The same memory is reused for all tensors,
    because gloo's threads may hold sent tensors for a while.
    """
    here = current()
    shard = view.to_local()
    dim = view.placements[-1].dim
    numbers = lengths(view.size(dim), here.tensor_size)
    shapes = [[*view.shape[:dim], length, *view.shape[dim + 1 :]] for length in numbers]
    with raise_on_all_ranks(f'collecting {name}'):
        full = (
            torch.empty(view.shape, dtype=shard.dtype, device=device or shard.device)
            if keeps
            else None
        )
        buffer = _buffer(prod(shapes[0]), shard, buffers)
    for rank, shape in enumerate(shapes):
        piece = buffer[: prod(shape)].view(shape)
        if rank == here.tensor_rank:
            piece.copy_(shard)
        # As bytes, because backends do not support all types.
        broadcast(piece.view(-1).view(torch.uint8), here.tensor_group, rank)
        if full is not None:
            full.narrow(dim, sum(numbers[:rank]), numbers[rank]).copy_(piece)
    return full


def _buffer(length: int, shard: Tensor, buffers: dict[torch.device, Tensor]) -> Tensor:
    """Return memory on the device of communication, reused from an earlier tensor if possible."""
    kind = current().mesh.device_type
    size = length * shard.element_size()
    where = shard.device if shard.device.type == kind else torch.device(kind)
    if where not in buffers or buffers[where].numel() < size:
        buffers[where] = torch.empty(size, dtype=torch.uint8, device=where)
    return buffers[where][:size].view(shard.dtype)


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
                value = value.narrow(dim, *own(shape[dim])).clone()
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
