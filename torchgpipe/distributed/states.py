"""What a checkpoint has of a model and its optimizer: entries by the names of the whole model.

::

    model.0.weight                                parameters and buffers
    optimizer.state.0.weight.exp_avg              what the optimizer keeps of one
    optimizer.param_groups.0.weight.lr            and the options that it has for it
    random.1x2x1.0.cpu                            generators, by mesh and rank

Those of the optimizer are what ``StateDictOptions(flatten_optimizer_state_dict=True)`` makes of
one. They are made here, since PyTorch takes a step with an optimizer that has not taken one yet,
and knows nothing of parameters that ranks share.
"""
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from torchgpipe.devices import rng_states, set_rng_states

__all__ = ['Index', 'index', 'load_optimizer', 'names_of', 'optimizer_entries', 'optimizer_forms',
           'random_entries', 'restore_random', 'shapes']

#: Shapes by name; of what is no tensor, ``None``.
Shapes = dict[str, tuple[int, ...] | None]

#: Where modules have an extra state: of any kind, so that it has any number of entries.
_EXTRA = '_extra_state'


class Index(NamedTuple):
    """What a checkpoint has.

    Args:
        model: The shapes of parameters and buffers.
        states: For each parameter, what the optimizer keeps of it.
        groups: For each parameter, the options that the optimizer has for it.
        random: The generators.
    """

    model: Shapes
    states: dict[str, dict[str, Any]]
    groups: dict[str, dict[str, Any]]
    random: dict[str, Any]


def index(metadata: Metadata) -> Index:
    """Return what a checkpoint has."""
    found = Index({}, {}, {}, {})
    for key, value in metadata.state_dict_metadata.items():
        kind, _, path = key.partition('.')
        section, _, rest = path.partition('.')
        name, _, last = rest.rpartition('.')
        if kind == 'model' and _EXTRA not in path:
            found.model[path] = (
                tuple(value.size) if isinstance(value, TensorStorageMetadata) else None)
        elif kind == 'optimizer' and section == 'state':
            found.states.setdefault(name, {})[last] = value
        elif kind == 'optimizer':
            found.groups.setdefault(name, {})[last] = value
        elif kind == 'random':
            found.random[path] = value
    return found


def shapes(model: nn.Module) -> Shapes:
    """Return the shapes of what a model, or a rank's part of it, has."""
    return {name: tuple(value.shape) if isinstance(value, Tensor) else None
            for name, value in model.state_dict().items() if not name.endswith(_EXTRA)}


# --- the optimizer
# ---------------------------------------------------------------------------------------


def names_of(model: nn.Module, optimizer: Optimizer, ties: Mapping[str, str]) -> dict[int, str]:
    """Return the names of an optimizer's parameters, by number.

    Args:
        model: What has them.
        optimizer: The optimizer.
        ties: Of names that are those of an earlier stage's parameters, the first ones.

    Raises:
        ValueError: The model does not have them.
    """
    names = {id(x): ties.get(name, name) for name, x in model.named_parameters()}
    foreign = [tuple(x.shape) for group in optimizer.param_groups for x in group['params']
               if id(x) not in names]
    if foreign:
        raise ValueError(f'{len(foreign)} parameters of the optimizer are not in the model, with '
                         f'shapes {foreign[:5]}: make it of model.parameters(), and another one '
                         'for parameters of a loss, say, which is saved on its own')
    return names


def optimizer_entries(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return what an optimizer has, by names.

    Raises:
        ValueError: Its state has tensors within something else.
    """
    entries: dict[str, Any] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != 'params'}
        for x in group['params']:
            name = names[id(x)]
            for key, value in optimizer.state.get(x, {}).items():
                if isinstance(value, (dict, list)):
                    raise ValueError(f'the optimizer keeps a {type(value).__name__} as {key!r} of '
                                     f'{name!r}, but a checkpoint takes tensors and numbers: save '
                                     'optimizer.state_dict() of each rank on its own')
                entries[f'state.{name}.{key}'] = value
            entries.update({f'param_groups.{name}.{key}': value for key, value in options.items()})
    return entries


def optimizer_forms(optimizer: Optimizer, names: Mapping[int, str], saved: Index
                    ) -> dict[str, Any]:
    """Return what the entries of a checkpoint are read into: whatever was saved, and no more."""
    forms: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for x in group['params']:
            name = names[id(x)]
            for section, entries in (('state', saved.states.get(name, {})),
                                     ('param_groups', saved.groups[name])):
                for key, value in entries.items():
                    forms[f'{section}.{name}.{key}'] = _form(value, x)
    return forms


def _form(saved: Any, x: Tensor) -> Any:
    if not isinstance(saved, TensorStorageMetadata):
        return None
    size, dtype = saved.size, saved.properties.dtype
    if not size:
        return torch.empty((), dtype=dtype)  # The optimizer knows where it has to be.
    if size == x.shape:
        return torch.empty_like(x, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype, device=x.device)


def load_optimizer(optimizer: Optimizer, names: Mapping[int, str], entries: Mapping[str, Any]
                   ) -> None:
    """Give an optimizer what was read.

    Raises:
        ValueError: Parameters of one group had different options.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path, value in entries.items():
        section, _, rest = path.partition('.')
        name, _, key = rest.rpartition('.')
        found.setdefault((section, name), {})[key] = value
    states, groups = {}, []
    for group, packed in zip(optimizer.param_groups, optimizer.state_dict()['param_groups']):
        own = [names[id(x)] for x in group['params']]
        for number, name in zip(packed['params'], own):
            if ('state', name) in found:
                states[number] = found['state', name]
        options = [found['param_groups', name] for name in own]
        for name, each in zip(own, options):
            _check_same((own[0], name), (options[0], each))
        groups.append({**packed, **(options[0] if options else {})})
    optimizer.load_state_dict({'state': states, 'param_groups': groups})


def _check_same(names: tuple[str, str], options: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """See that two parameters of one group have the same options."""
    for key in options[1]:
        one, another = (repr(each.get(key)) for each in options)
        if one != another:
            raise ValueError(
                f'the optimizer has {names[0]!r} and {names[1]!r} in one group, but in the '
                f'checkpoint the {key} of the first is {one}, and that of the second {another}; '
                'make the optimizer with the same groups of parameters')


# --- generators
# ------------------------------------------------------------------------------------------


def random_entries(place: str, devices: Iterable[torch.device]) -> dict[str, Tensor]:
    """Return the states of the generators of the host and of some devices.

    Args:
        place: The mesh and the rank.
        devices: The devices of the rank.
    """
    return {f'{place}.{name}': state for name, state in rng_states(devices).items()}


def restore_random(place: str, devices: Iterable[torch.device], entries: Mapping[str, Tensor]
                   ) -> None:
    """Give generators their states, as far as there are some."""
    set_rng_states(devices, {key[len(place) + 1:]: state for key, state in entries.items()})
