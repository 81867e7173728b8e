"""Entries of a checkpoint: model and optimizer state by the names of the whole model.

::

    model.0.weight                                parameters and buffers
    optimizer.state.0.weight.exp_avg              the optimizer's state of a parameter
    optimizer.param_groups.0.weight.lr            and its options for the parameter
    random.1x2x1.0.cpu                            generators, by mesh and rank
    extra.all.step                                further state of a training: of all ranks,
    extra.2.1.loader                              or of the second one of two replicas
"""
import pickle
from collections.abc import Collection, Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchgpipe.base.devices import rng_states, set_rng_states
from torchgpipe.shard.entries import Named, by_names, check_names, is_tensor, some, under

__all__ = ['check_model', 'check_optimizer', 'extra_bytes', 'extra_entries', 'extra_forms',
           'groups_of', 'load_extra', 'named', 'optimizer_entries', 'options_of', 'random_entries',
           'restore_random', 'saved_options', 'saved_shapes', 'shapes']

#: Shapes by name; ``None`` for values that are not tensors.
Shapes = dict[str, tuple[int, ...] | None]

#: Options of a group as a whole: each rank has other parameters in it.
_OF_GROUPS = ('params', 'param_names')

#: Options that schedulers of learning rates add to an optimizer.
_SCHEDULERS = {'initial_lr', 'max_lr', 'min_lr', 'base_momentum', 'max_momentum', 'swa_lr'}

#: How many differences are named at most.
_MOST = 5

#: The key of a module's extra state, which may be of any kind and have any number of entries.
_EXTRA = '_extra_state'


def shapes(model: nn.Module) -> Shapes:
    """Return the shapes in the state dict of a model, or of a rank's part of it."""
    return {name: tuple(value.shape) if isinstance(value, Tensor) else None
            for name, value in model.state_dict().items() if not name.endswith(_EXTRA)}


def saved_shapes(saved: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a model's tensors in a checkpoint."""
    return {name: tuple(value.size) if is_tensor(value) else None
            for name, value in under(saved, 'model.').items() if _EXTRA not in name}


# --- a checkpoint is of this model and optimizer
# --------------------------------------------------------------------------


def check_model(here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Check that a checkpoint has the parameters and buffers of a model, in these shapes.

    Args:
        here: The shapes of the model.
        saved: The shapes in the checkpoint.

    Raises:
        ValueError: It does not. All ranks raise this error.
    """
    check_names('the checkpoint is of another model', 'model', here, saved, _MOST)
    others = [f'{name!r} is {saved[name]}, and not {shape}' for name, shape in here.items()
              if saved[name] != shape]
    if others:
        raise ValueError('the checkpoint is of a model of other sizes: in it '
                         f'{some(others[:_MOST], len(others))}; make the model as it was made '
                         'before')


def check_optimizer(here: Collection[str], options: set[str], saved: Mapping[str, Collection[str]]
                    ) -> None:
    """Check that a checkpoint is of an optimizer of these parameters.

    Args:
        here: The names of the parameters on all ranks.
        options: The options of the optimizer's groups.
        saved: The options in the checkpoint, for each parameter.

    Raises:
        ValueError: It is not. All ranks raise this error.
    """
    if not saved:
        raise ValueError('the checkpoint was saved without an optimizer: load it without one, or '
                         'save it with one')
    check_names('the checkpoint is of an optimizer of other parameters', 'optimizer', here, saved,
                _MOST)
    there = {key for each in saved.values() for key in each}
    missing, others = options - there - _SCHEDULERS, there - options - _SCHEDULERS
    # Releases of PyTorch differ in one of them only.
    if missing and others:
        raise ValueError('the checkpoint is of an optimizer of another type: it has '
                         f'{sorted(others)}, but this one {sorted(missing)}')


# --- the optimizer
# ---------------------------------------------------------------------------------------


def named(model: nn.Module, optimizer: Optimizer, ties: Mapping[str, str]) -> Named:
    """Return an optimizer by names; a tied parameter has the name in the first stage."""
    return Named(optimizer, {id(x): ties.get(name, name) for name, x in model.named_parameters()})


def optimizer_entries(optimizer: Named) -> dict[str, Any]:
    """Return the states and options of an optimizer, by names.

    Raises:
        ValueError: Its state has tensors in a nested container.
    """
    entries: dict[str, Any] = {}
    for name, states in optimizer.states().items():
        for key, value in states.items():
            if isinstance(value, (dict, list)):
                raise ValueError(f'the optimizer keeps a {type(value).__name__} as {key!r} of '
                                 f'{name!r}, but a checkpoint takes tensors and numbers: save '
                                 'optimizer.state_dict() of each rank on its own')
            entries[f'state.{name}.{key}'] = value
    entries.update((f'param_groups.{name}.{key}', value) for group in optimizer.groups()
                   for name in group['params'] for key, value in _options(group).items())
    return entries


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _OF_GROUPS}


def options_of(optimizer: Named) -> list[str]:
    """Return the names of the options that an optimizer has for each parameter."""
    return sorted({key for group in optimizer.groups() for key in _options(group)})


def saved_options(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options of an optimizer in a checkpoint, for each parameter."""
    return {name: _options(each)
            for name, each in by_names(under(saved, 'optimizer.param_groups.')).items()}


def groups_of(optimizer: Named, options: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of each group of an optimizer, from the options of its parameters.

    Raises:
        ValueError: Parameters of one group had different options.
    """
    groups = []
    for own in [group['params'] for group in optimizer.groups()]:
        for name in own:
            _check_same((own[0], name), (options[own[0]], options[name]))
        groups.append(options[own[0]] if own else {})
    return groups


def _check_same(names: tuple[str, str], options: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Check that two parameters of one group have the same options."""
    for key in options[1]:
        one, another = (repr(each.get(key)) for each in options)
        if one != another:
            raise ValueError(
                f'the optimizer has {names[0]!r} and {names[1]!r} in one group, but in the '
                f'checkpoint the {key} of the first is {one}, and that of the second {another}; '
                'make the optimizer with the same groups of parameters')


# --- further state of a training
# --------------------------------------------------------------------------


def extra_bytes(extra: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the states of some objects, or plain values, each as the bytes of a file.

    Raises:
        ValueError: A name has a dot, or is not a string.
    """
    found = {}
    for key, value in extra.items():
        if not isinstance(key, str) or not key or '.' in key:
            raise ValueError(f'extra has {key!r}, but names in it are strings without a dot')
        buffer = BytesIO()
        torch.save(value.state_dict() if hasattr(value, 'state_dict') else value, buffer)
        found[key] = buffer.getvalue()
    return found


def extra_entries(everywhere: Sequence[tuple[int, Mapping[str, bytes]]], replica: int
                  ) -> dict[str, Tensor]:
    """Return the entries of the further state of a training.

    Args:
        everywhere: For each rank, the number of its replica and its bytes.
        replica: The number of this replica.

    Raises:
        ValueError: Ranks have different names, or ranks of one replica have different values.
    """
    if len({tuple(sorted(each)) for _, each in everywhere}) > 1:
        raise ValueError('all ranks save extra with the same names in it, but they have '
                         f'{[sorted(each) for _, each in everywhere]}')
    found = {}
    first = {number: each for number, each in reversed(everywhere)}
    for key in first[replica]:
        values = {number: _read(each[key]) for number, each in first.items()}
        for number, each in everywhere:
            if each[key] != first[number][key] and not _is_equal(
                    _read(each[key]), values[number]):
                raise ValueError(f'ranks of replica {number} have other values of extra {key!r}, '
                                 'but one of them is saved: give all the same')
        same = all(each[key] == first[0][key] or _is_equal(values[number], values[0])
                   for number, each in first.items())
        found['all' if same else f'{len(first)}.{replica}', key] = first[0 if same else replica]
    return {f'{place}.{key}': torch.frombuffer(bytearray(each[key]), dtype=torch.uint8)
            for (place, key), each in found.items()}


def _read(value: bytes) -> Any:
    return torch.load(BytesIO(value), weights_only=False)


def _is_equal(a: Any, b: Any) -> bool:
    """Return whether two values are equal; values without a comparison are not."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.layout is b.layout is torch.strided and torch.equal(a, b)
    if isinstance(a, (set, frozenset)):  # Each process has its own order.
        return bool(a == b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_is_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    return pickle.dumps(a) == pickle.dumps(b)


def extra_forms(saved: Mapping[str, Any], data: int, replica: int, asked: Mapping[str, Any]
                ) -> dict[str, Tensor]:
    """Return the tensors to read the extra entries of a checkpoint into.

    Args:
        saved: The checkpoint.
        data: The number of replicas.
        replica: The number of this one.
        asked: The objects to load.

    Raises:
        ValueError: The checkpoint does not have one of them, or has it for another number of
            replicas.
    """
    there = under(saved, 'extra.')
    places = {path.rpartition('.')[2]: path.rpartition('.')[0] for path in there}
    for key in asked:
        if key not in places:
            raise ValueError(f'the checkpoint has no extra {key!r}; it has {sorted(places)}')
        if places[key] != 'all' and not places[key].startswith(f'{data}.'):
            raise ValueError(
                f'extra {key!r} is another one for each of {places[key].partition(".")[0]} '
                f'replicas in the checkpoint, and now there are {data}: leave it out, and make '
                'that object for the new number of replicas')
    return {path: torch.empty(value.size, dtype=torch.uint8)
            for path, value in there.items()
            if path.rpartition('.')[0] in ('all', f'{data}.{replica}')}


def load_extra(entries: Mapping[str, Tensor], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Load the states of objects; return all states and values by their names."""
    found = {path.rpartition('.')[2]: _read(x.numpy().tobytes()) for path, x in entries.items()}
    for key, value in asked.items():
        if hasattr(value, 'load_state_dict'):
            value.load_state_dict(found[key])
    return found


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
    """Restore the states of generators, if there are any."""
    set_rng_states(devices, {key[len(place) + 1:]: state for key, state in entries.items()})
