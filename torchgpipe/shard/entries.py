"""Entries of state dicts: shards as DTensors, and a check of names and shapes.

A parameter has one entry for each of its names. In the state dict of an optimizer it has several,
and those of its shape are shards if it is one.
"""
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchgpipe.shard.parameter import dtensor, shard_shape
from torchgpipe.shard.tags import storage_dim

__all__ = ['Entries', 'Sharded', 'check_keys', 'check_shapes', 'name_of', 'nested',
           'optimizer_entries', 'views']

#: The values of a state dict by their keys. Those of an optimizer have pairs for keys: the number
#: of the parameter, and the name of the state.
Entries = Mapping[Any, Any]

#: The parameters of those values that are shards.
Sharded = Mapping[Any, Tensor]


def views(entries: Entries, sharded: Sharded) -> dict[Any, Any]:
    """Return entries with DTensors, in the memory of the shards, in the place of these."""
    found = {key: entries[key] for key in entries}
    check_shapes({key: value for key, value in found.items() if key in sharded},
                 {key: shard_shape(parameter) for key, parameter in sharded.items()})
    return {key: dtensor(sharded[key], value) if key in sharded else value
            for key, value in found.items()}


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
    sharded = {key: parameters[key[0]] for key, value in entries.items()
               if storage_dim(parameters[key[0]]) is not None
               and isinstance(value, Tensor) and value.dim()}
    return entries, sharded


def check_keys(expected: Iterable[str], found: Iterable[str]) -> None:
    """Raise, and name them, if keys of the model are missing, or others are found."""
    expected, found = list(expected), list(found)
    missing, foreign = sorted({*expected} - {*found}), sorted({*found} - {*expected})
    if missing or foreign:
        raise ValueError(
            'a checkpoint has the keys of the model: '
            + '; '.join(f'{what} {", ".join(map(repr, keys))}' for what, keys in (
                ('it misses', missing), ('the model does not have', foreign)) if keys)
            + '. Pass prefix= if the keys have one, or strict=False to take what there is')


def check_shapes(tensors: Entries, shapes: Mapping[Any, torch.Size]) -> None:
    """Raise, and name them, if tensors have other shapes than these."""
    wrong = [f'{name_of(key)} is {tuple(tensor.shape)} and not {tuple(shapes[key])}'
             for key, tensor in tensors.items() if tensor.shape != shapes[key]]
    if wrong:
        raise ValueError(
            'shards have the shapes that they have in the model, and a state of an optimizer that '
            'of its parameter; what is cut into shards is full: ' + '; '.join(wrong)
            + '. Is it of another model, or collected already, or not yet?')


def name_of(key: Any) -> str:
    """Name a tensor of a model, or a state of an optimizer."""
    return f"'{key[1]}' of parameter {key[0]}" if isinstance(key, tuple) else f"'{key}'"


def nested(state_dict: Mapping[str, Any], entries: dict[tuple[Any, str], Any]) -> dict[str, Any]:
    """Return the state dict of an optimizer with other states."""
    states: dict[Any, dict[str, Any]] = {}
    for (number, name), value in entries.items():
        states.setdefault(number, {})[name] = value
    return {**state_dict, 'state': states}
