"""The layers of one rank: created on this rank only, with values independent of the mesh.

::

    stages       0         1         2         3          on ranks 0, 1, 0, 1 of the pipeline
    layers       0 1       2 3       4         5
    rank 0       0 1                 4                    one by one: layer i from (seed, i),
    rank 1                 2 3                 5          then cut into shards, then the next one
"""
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchgpipe.engine.partition import named_slots
from torchgpipe.model.materialize import materialize, seeded
from torchgpipe.model.weights import Weights, open_weights
from torchgpipe.sequential.parts import to_own_names

__all__ = ['Tie', 'fill', 'shared_in', 'skeleton_of', 'ties_of']

#: A tensor in several places: the stage of each, and its name there; in the order of stages.
Tie = tuple[tuple[int, str], ...]


def skeleton_of(model: Any) -> nn.Sequential:
    """Return a model as a module; layers made by functions are on the meta device.

    Raises:
        TypeError: It is neither a module nor a list of functions.
    """
    if isinstance(model, nn.Module):
        return model  # type: ignore[return-value]
    functions = list(model) if isinstance(model, (list, tuple)) else []
    wrong = [each for each in functions if isinstance(each, nn.Module) or not callable(each)]
    if not functions or wrong:
        raise TypeError('a model is an nn.Sequential, best on the meta device, or a list of '
                        'functions of which each makes a layer, but this is a '
                        f'{type(model).__name__}'
                        + (f' with a {type(wrong[0]).__name__} in it' if wrong else ''))
    with torch.device('meta'):
        layers = [function() for function in functions]
    for k, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(f'function {k} of the model gave a {type(layer).__name__}, but each '
                            'has to make a layer, an nn.Module')
    return nn.Sequential(*layers)


def fill(model: Any, skeleton: nn.Sequential, own: Sequence[str], device: torch.device, seed: int,
         weights: Weights | None, init: Callable[[nn.Module], Any] | None,
         finish: Callable[[str, nn.Module], None]) -> 'OrderedDict[str, nn.Module]':
    """Return some layers of a model with their values.

    Args:
        model: The model, or functions that make its layers.
        skeleton: Its layers.
        own: The names of this rank's layers.
        device: The device of the layers.
        seed: The seed of initial values.
        weights: The values of all layers, if there are some.
        init: Called with each module, after it has its first values.
        finish: Called with each layer and its name, before the next layer gets values.
    """
    numbers = {name: i for i, name in enumerate(skeleton._modules)}

    @contextmanager
    def around(name: str, layer: nn.Module) -> Iterator[None]:
        with seeded(seed, numbers[name]):
            yield
        layer.to(device)
        finish(name, layer)

    if isinstance(model, nn.Module):
        # A tensor that an earlier layer shares gets its values there, so that layer is also made.
        needed = [*dict.fromkeys([*_sources(skeleton, own), *own])]
        needed.sort(key=numbers.__getitem__)
        layers = OrderedDict((name, skeleton.get_submodule(name)) for name in needed)
        materialize(nn.Sequential(layers), [device] * len(needed),
                    _part(weights, skeleton, needed), around, init)
        return OrderedDict((name, layers[name]) for name in own)
    made: OrderedDict[str, nn.Module] = OrderedDict()
    for name in own:
        with seeded(seed, numbers[name]):
            made[name] = model[numbers[name]]()
        materialize(nn.Sequential(OrderedDict([(name, made[name])])), [device],
                    _part(weights, skeleton, [name]), around, init)
    return made


class _Some(Mapping[str, Any]):
    """Some tensors of weights under other names, read on access."""

    def __init__(self, source: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self._source = source
        self._names = names

    def __getitem__(self, key: str) -> Any:
        return self._source[self._names[key]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _part(weights: Weights | None, skeleton: nn.Sequential, own: Iterable[str]
          ) -> Mapping[str, Any] | None:
    """Return the weights of some layers, with the weights that belong to no layer at all."""
    if weights is None:
        return None
    source, others = open_weights(weights), {*skeleton._modules} - {*own}
    names = {key: key for key in source}
    to_own_names(names, '', skeleton._modules)
    # A tensor with several names needs only one of them, which may be on another rank.
    shared: dict[int, list[str]] = {}
    for full, _, x in named_slots(skeleton):
        shared.setdefault(id(x), []).append(full)
    for each in shared.values():
        found = next((names[full] for full in each if full in names), None)
        if found is not None and len(each) > 1:
            names.update({full: names.get(full, found) for full in each})
    return _Some(source, {name: key for name, key in names.items()
                          if name.partition('.')[0] not in others})


def _sources(skeleton: nn.Sequential, own: Iterable[str]) -> list[str]:
    """Return the first layer with each meta tensor of some layers."""
    first: dict[int, str] = {}
    for name, layer in skeleton.named_children():
        for _, _, tensor in named_slots(layer):
            first.setdefault(id(tensor), name)
    return [first[id(tensor)] for name in own
            for _, _, tensor in named_slots(skeleton.get_submodule(name)) if tensor.is_meta]


def shared_in(layers: Mapping[str, nn.Module]) -> list[list[tuple[str, nn.Module, str]]]:
    """Return the places of each tensor in several places, as (full name, module, name)."""
    found: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for prefix, layer in layers.items():
        for full, (module, name), x in named_slots(layer, prefix):
            found.setdefault(id(x), []).append((full, module, name))
    return [places for places in found.values() if len(places) > 1]


def ties_of(model: nn.Sequential, stages: Sequence[Iterable[str]]) -> list[Tie]:
    """Return the parameters and buffers that stand in several places of a model.

    Args:
        model: Its layers.
        stages: The names of the layers of each stage.
    """
    owners = {name: j for j, names in enumerate(stages) for name in names}
    return [tuple((owners[full.partition('.')[0]], full) for full, _, _ in places)
            for places in shared_in({name: model.get_submodule(name) for name in owners})]
