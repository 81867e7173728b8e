"""Entries of state dicts and checkpoints: shards as DTensors, and a check of names and shapes.

A parameter has one entry for each of its names. In the state dict of an optimizer it has several,
and the states of its shape are shards if it is one. A checkpoint names them by the parameter::

    optimizer.state.0.weight.exp_avg

They are made here, because PyTorch takes a step with an optimizer that has not taken one yet, and
does not know parameters that ranks share.
"""
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchgpipe.shard.parameter import dtensor, shard_shape
from torchgpipe.shard.tags import storage_dim

__all__ = ['Entries', 'Named', 'Sharded', 'by_names', 'check_names', 'check_shapes', 'is_tensor',
           'local', 'name_of', 'nested', 'optimizer_entries', 'some', 'under', 'views']

#: The values of a state dict by their keys. For an optimizer, keys are pairs: the number of the
#: parameter, and the name of the state.
Entries = Mapping[Any, Any]

#: The parameters of the values that are shards, by their keys.
Sharded = Mapping[Any, Tensor]


def views(entries: Entries, sharded: Sharded) -> dict[Any, Any]:
    """Return entries with shards replaced by DTensors in the same memory."""
    found = {key: entries[key] for key in entries}
    check_shapes({key: value for key, value in found.items() if key in sharded},
                 {key: shard_shape(parameter) for key, parameter in sharded.items()})
    return {key: dtensor(sharded[key], value) if key in sharded else value
            for key, value in found.items()}


def local(entries: Entries) -> dict[Any, Any]:
    """Return entries with DTensors replaced by local tensors."""
    from torch.distributed.tensor import DTensor  # takes long

    return {key: value.to_local() if isinstance(value, DTensor) else value
            for key, value in entries.items()}


def optimizer_entries(optimizer: Optimizer, state_dict: Mapping[str, Any]
                      ) -> tuple[dict[tuple[Any, str], Any], dict[tuple[Any, str], Tensor]]:
    """Return the states of an optimizer, and the parameters of those that are shards."""
    here = [group['params'] for group in optimizer.param_groups]
    there = [group['params'] for group in state_dict['param_groups']]
    if [len(group) for group in here] != [len(group) for group in there]:
        raise ValueError(
            'a state dict belongs to an optimizer with the same groups of parameters: this one '
            f'has {[len(group) for group in here]} parameters in its groups, the state dict '
            f'{[len(group) for group in there]}. Make the optimizer as it was made before')
    parameters = {number: parameter for numbers, group in zip(there, here)
                  for number, parameter in zip(numbers, group)}
    entries = {(number, name): value for number, states in state_dict['state'].items()
               for name, value in states.items()}
    sharded = {key: parameters[key[0]] for key, value in entries.items() if key[0] in parameters
               and storage_dim(parameters[key[0]]) is not None
               and isinstance(value, Tensor) and value.dim()}
    return entries, sharded


def check_names(message: str, of: str, here: Collection[str], saved: Collection[str],
                most: int | None = None, hint: str = '') -> None:
    """Raise if a checkpoint misses names, or has others.

    Args:
        message: The start of the error.
        of: The owner of the names.
        here: The names.
        saved: The names in the checkpoint.
        most: How many names to list, with similar names; by default all, without similar names.
        hint: The end of the error.

    Raises:
        ValueError: The checkpoint misses names, or has others.
    """
    def close(name: str, others: list[str]) -> str:
        found = get_close_matches(name, others[:1000], 1) if most else ()
        return repr(name) + ''.join(f' (like {each!r})' for each in found)

    known, there = {*here}, {*saved}
    missing = [name for name in here if name not in there]
    foreign = [name for name in saved if name not in known]
    found = [f'{verb} {some([close(name, others) for name in names[:most]], len(names))}'
             for verb, names, others in (('it misses', missing, foreign),
                                         (f'the {of} does not have', foreign, missing)) if names]
    if found:
        raise ValueError(f'{message}: {"; ".join(found)}{hint}')


def some(texts: Sequence[str], of: int) -> str:
    """Return a list of texts, with the number of further ones."""
    return ', '.join(texts) + (f' and {of - len(texts)} more' if of > len(texts) else '')


def check_shapes(tensors: Entries, shapes: Mapping[Any, torch.Size]) -> None:
    """Raise an error that names all tensors with other shapes than the given ones."""
    wrong = [f'{name_of(key)} is {tuple(tensor.shape)} and not {tuple(shapes[key])}'
             for key, tensor in tensors.items() if tensor.shape != shapes[key]]
    if wrong:
        raise ValueError(
            'shards have the shapes that they have in the model, and a state of an optimizer that '
            'of its parameter; what is cut into shards is full: ' + '; '.join(wrong)
            + '. Is it of another model, or collected already, or not yet?')


def name_of(key: Any) -> str:
    """Return the name of a tensor of a model, or of a state of an optimizer."""
    return f"'{key[1]}' of parameter {key[0]}" if isinstance(key, tuple) else f"'{key}'"


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
    return {key.removeprefix(prefix): value for key, value in saved.items()
            if key.startswith(prefix)}


def by_names(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return entries by the names of parameters, then by the last part of their keys."""
    return nested({(key.rpartition('.')[0], key.rpartition('.')[2]): value
                   for key, value in saved.items()})


def is_tensor(saved: Any) -> bool:
    """Return whether an entry of a checkpoint is a tensor, by its metadata."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # takes long

    return isinstance(saved, TensorStorageMetadata)


def _form(saved: Any, parameter: Tensor) -> Any:
    """Return a tensor to read a state into; other values are read as they are."""
    if not is_tensor(saved):
        return None
    size, dtype = saved.size, saved.properties.dtype
    if not size:
        return torch.empty((), dtype=dtype)  # The optimizer moves it to the right device.
    if storage_dim(parameter) is not None:
        return dtensor(parameter, torch.empty_like(parameter, dtype=dtype))
    if size == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype)
    return torch.empty(size, dtype=dtype, device=parameter.device)


class Named:
    """An optimizer by the names of its parameters.

    Args:
        optimizer: The optimizer.
        names: The names of a model's parameters, by their ids.

    Raises:
        ValueError: The model does not have the parameters.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self.parameters = [x for group in optimizer.param_groups for x in group['params']]
        foreign = [tuple(x.shape) for x in self.parameters if id(x) not in names]
        if foreign:
            raise ValueError(f'{len(foreign)} parameters of the optimizer are not in the model, '
                             f'with shapes {foreign[:5]}: make it of model.parameters(), and '
                             'another one for parameters of a loss, say, which is saved on its '
                             'own')
        self.names = [names[id(x)] for x in self.parameters]

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of the optimizer, with names for parameters."""
        return [{**group, 'params': [self.names[number] for number in group['params']]}
                for group in self._optimizer.state_dict()['param_groups']]

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the states of each parameter, with DTensors in the memory of shards.

        Raises:
            ValueError: A state does not have the shape of its shard.
        """
        found = nested(views(*optimizer_entries(self._optimizer, self._optimizer.state_dict())))
        return {self.names[number]: states for number, states in found.items()
                if isinstance(number, int)}  # Others are of no parameter.

    def forms(self, saved: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return tensors to read the saved states, or options, into.

        An optimizer has states after its first step only. A step only for that would change the
        count of its steps.
        """
        return {name: {key: _form(value, x) for key, value in saved.get(name, {}).items()}
                for name, x in zip(self.names, self.parameters)}

    def load(self, states: Mapping[str, Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]
             ) -> None:
        """Load states into the optimizer, and options into its groups."""
        own = self._optimizer.state_dict()['param_groups']
        self._optimizer.load_state_dict({
            'state': {number: states[name] if storage_dim(x) is None else local(states[name])
                      for number, (name, x) in enumerate(zip(self.names, self.parameters))
                      if states[name]},
            'param_groups': [{**packed, **group, 'params': packed['params']}
                             for packed, group in zip(own, groups)]})
