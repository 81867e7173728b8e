"""Entries of state dicts and checkpoints, by the names of parameters.

In the state dict of an optimizer, a parameter has several entries. They are shards if the
parameter is one, and if they have its shape. A checkpoint names them by the parameter::

    optimizer.state.0.weight.exp_avg

This file makes the entries itself, because PyTorch would take a step with an optimizer that has
not taken one yet, and does not know parameters that ranks share.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchgpipe.shard.parameter import dtensor, shard_shape, storage_dim

#: The values of a state dict by their keys. For an optimizer, keys are pairs: the number of the
#: parameter, and the name of the state.
Entries = Mapping[Any, Any]

#: The parameters of the values that are shards, by their keys.
Sharded = Mapping[Any, Tensor]

# Some modules of PyTorch are imported where they are called, because the import takes long.


def views(entries: Entries, sharded: Sharded) -> dict[Any, Any]:
    """Return entries with shards replaced by DTensors in the same memory."""
    values = {key: entries[key] for key in entries}
    shards = {key: value for key, value in values.items() if key in sharded}
    check_shapes(shards, {key: shard_shape(parameter) for key, parameter in sharded.items()})
    for key, shard in shards.items():
        values[key] = dtensor(sharded[key], shard)
    return values


def local_entries(entries: Entries) -> dict[Any, Any]:
    """Return entries with DTensors replaced by local tensors."""
    from torch.distributed.tensor import DTensor

    values = {}
    for key, value in entries.items():
        values[key] = value.to_local() if isinstance(value, DTensor) else value
    return values


def optimizer_entries(
    optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> tuple[dict[tuple[Any, str], Any], dict[tuple[Any, str], Tensor]]:
    """Return the states of an optimizer, and the parameters of those that are shards.

    Raises:
        ValueError: The state dict has other groups of parameters.
    """
    sizes = [len(group['params']) for group in optimizer.param_groups]
    saved_sizes = [len(group['params']) for group in state_dict['param_groups']]
    if sizes != saved_sizes:
        raise ValueError(
            'a state dict belongs to an optimizer with the same groups of parameters: this one '
            f'has {sizes} parameters in its groups, the state dict {saved_sizes}. Make the '
            'optimizer as it was made before'
        )
    parameters: dict[Any, Tensor] = {}
    for saved_group, group in zip(state_dict['param_groups'], optimizer.param_groups):
        parameters.update(zip(saved_group['params'], group['params']))

    entries = {}
    sharded = {}
    for number, states in state_dict['state'].items():
        parameter = parameters.get(number)  # An optimizer may have states of no parameter.
        is_shard = parameter is not None and storage_dim(parameter) is not None
        for name, value in states.items():
            entries[number, name] = value
            if is_shard and isinstance(value, Tensor) and value.dim():
                sharded[number, name] = parameters[number]
    return entries, sharded


def check_names(
    message: str,
    of: str,
    names: Collection[str],
    saved_names: Collection[str],
    most: int | None = None,
    hint: str = '',
) -> None:
    """Raise if a checkpoint misses names, or has others.

    Args:
        most: How many names to list, with similar names; by default all, without similar names.

    Raises:
        ValueError: The checkpoint misses names, or has others.
    """
    missing = _without(names, saved_names)
    foreign = _without(saved_names, names)
    reasons = []
    if missing:
        reasons.append(f'it misses {_with_similar(missing, foreign, most)}')
    if foreign:
        reasons.append(f'the {of} does not have {_with_similar(foreign, missing, most)}')
    if reasons:
        raise ValueError(f'{message}: {"; ".join(reasons)}{hint}')


def _without(names: Iterable[str], excluded: Iterable[str]) -> list[str]:
    excluded = {*excluded}
    return [name for name in names if name not in excluded]


def _with_similar(names: list[str], candidates: list[str], most: int | None) -> str:
    """Return a list of names as text, each with a similar name if the list has a limit."""
    texts = []
    for name in names[:most]:
        text = repr(name)
        if most:
            for similar in get_close_matches(name, candidates[:1000], 1):
                text += f' (like {similar!r})'
        texts.append(text)
    return some(texts, len(names))


def some(texts: Sequence[str], total: int) -> str:
    """Return a list of texts, with the number of further ones."""
    listed = ', '.join(texts)
    if total > len(texts):
        listed += f' and {total - len(texts)} more'
    return listed


def check_shapes(tensors: Entries, shapes: Mapping[Any, torch.Size]) -> None:
    """Raise an error that names all tensors with other shapes than the given ones."""
    differences = []
    for key, tensor in tensors.items():
        shape = shapes[key]
        if tensor.shape != shape:
            differences.append(f'{name_of(key)} is {tuple(tensor.shape)} and not {tuple(shape)}')
    if differences:
        raise ValueError(
            'a shard has the shape that it has in the model, and a state of an optimizer the '
            'shape of its parameter; a tensor to cut into shards is full: '
            + '; '.join(differences)
            + '. Is it of another model, or collected already, or not yet?'
        )


def name_of(key: Any) -> str:
    """Return the name of a tensor of a model, or of a state of an optimizer."""
    if isinstance(key, tuple):
        return f"'{key[1]}' of parameter {key[0]}"
    return f"'{key}'"


def nested(entries: Mapping[tuple[Any, str], Any]) -> dict[Any, dict[str, Any]]:
    """Return entries by the first part of their keys, then by the second."""
    by_first: dict[Any, dict[str, Any]] = {}
    for (first, second), value in entries.items():
        by_first.setdefault(first, {})[second] = value
    return by_first


# --- entries of a checkpoint
# ---------------------------------------------------------------------------------------


def under(saved: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries of a checkpoint that have a prefix, without it."""
    entries = {}
    for key, value in saved.items():
        if key.startswith(prefix):
            entries[key.removeprefix(prefix)] = value
    return entries


def by_names(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return entries by the names of parameters, then by the last part of their keys."""
    entries = {}
    for key, value in saved.items():
        name, _, last = key.rpartition('.')
        entries[name, last] = value
    return nested(entries)


def is_tensor(saved: Any) -> bool:
    """Return whether an entry of a checkpoint is a tensor, by its metadata."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return isinstance(saved, TensorStorageMetadata)


def _empty_state(saved: Any, parameter: Tensor) -> Any:
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


class NamedOptimizer:
    """An optimizer by the names of its parameters.

    Args:
        names: The names of parameters by their ``id``.

    Raises:
        ValueError: The model does not have the parameters.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self.parameters: list[Tensor] = []
        for group in optimizer.param_groups:
            self.parameters += group['params']
        foreign = [tuple(x.shape) for x in self.parameters if id(x) not in names]
        if foreign:
            raise ValueError(
                f'{len(foreign)} parameters of the optimizer are not in the model, with shapes '
                f'{foreign[:5]}: make it of model.parameters(), and another one for parameters of '
                'a loss, say, which is saved separately'
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
        entries, sharded = optimizer_entries(self._optimizer, self._optimizer.state_dict())
        by_name = {}
        for number, states in nested(views(entries, sharded)).items():
            if isinstance(number, int):  # Others are of no parameter.
                by_name[self.names[number]] = states
        return by_name

    def empty_states(self, saved: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return tensors to read the saved states, or options, into.

        An optimizer has states after its first step only. A step only for that would change the
        count of its steps.
        """
        by_name = {}
        for name, parameter in zip(self.names, self.parameters):
            states = {}
            for key, value in saved.get(name, {}).items():
                states[key] = _empty_state(value, parameter)
            by_name[name] = states
        return by_name

    def load(
        self, states: Mapping[str, Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]
    ) -> None:
        """Load states into the optimizer, and options into its groups."""
        state = {}
        for number, (name, parameter) in enumerate(zip(self.names, self.parameters)):
            if states[name]:
                is_shard = storage_dim(parameter) is not None
                state[number] = local_entries(states[name]) if is_shard else states[name]
        loaded_groups = []
        for packed, group in zip(self._optimizer.state_dict()['param_groups'], groups):
            loaded_groups.append({**packed, **group, 'params': packed['params']})
        self._optimizer.load_state_dict({'state': state, 'param_groups': loaded_groups})
