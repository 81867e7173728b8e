"""Checkpoints of ``torch.distributed.checkpoint``: each rank writes and reads its own shards.

The files have the names and shapes of the plain model and of its optimizer, so that a group of any
size can read them, and so can a single process with PyTorch alone::

    model.<name of the parameter>                       optimizer.param_groups
    optimizer.state.<name of the parameter>.<name of the state>
"""
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchgpipe.shard.entries import check_keys, nested, optimizer_entries, views
from torchgpipe.shard.failures import raise_on_all_ranks
from torchgpipe.shard.parameter import dtensor, place
from torchgpipe.shard.tags import storage_dim

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

__all__ = ['load_checkpoint', 'save_checkpoint']

#: Where a checkpoint is.
Path = str | os.PathLike[str]

# `torch.distributed.checkpoint` is imported where it is called, as that takes long.


def save_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer | None = None,
                    **options: Any) -> None:
    """Save a model with sharded layers, and its optimizer, by ``torch.distributed.checkpoint``.

    All ranks call it. Each writes its own shards; what several ranks have is written once. Names
    are those of the module within a ``DistributedDataParallel`` or a compiled one. ::

        ts.save_checkpoint('checkpoint', model, optimizer)
        ts.load_checkpoint('checkpoint', model, optimizer)  # in groups of another size, too

    Args:
        path: A folder.
        model: The model.
        optimizer: Its optimizer. That of a ``ZeroRedundancyOptimizer`` is spread over replicas:
            :func:`collect_optimizer_state_dict` is for it.
        options: What else ``torch.distributed.checkpoint.save`` takes, as ``storage_writer``.

    Raises:
        ValueError: A sharded parameter, or a state of the optimizer, has not the shape of this
            rank's shard.
        RuntimeError: A rank cannot write its shard, or failed otherwise; it is named.
    """
    import torch.distributed.checkpoint as dcp

    with raise_on_all_ranks('saving a checkpoint', dist.group.WORLD):
        values, parameters = _model_views(model)
        state: dict[str, Any] = {'model': values}
        if optimizer is not None:
            state['optimizer'] = _optimizer_views(parameters, optimizer)
    with as_errors('saving a checkpoint'):
        dcp.save(state, checkpoint_id=path, **options)  # type: ignore[attr-defined]


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer | None = None, *,
                    storage_reader: 'StorageReader | None' = None, **options: Any) -> None:
    """Load what :func:`save_checkpoint` saved, into groups of any size. All ranks call it.

    Each rank reads its own shards. The optimizer gets the states that were saved, whether or not
    it has made a step.

    Args:
        path: The folder.
        model: The model.
        optimizer: Its optimizer, with the same groups of parameters.
        storage_reader: What reads the checkpoint, if it is not a folder.
        options: What else ``torch.distributed.checkpoint.load`` takes.

    Raises:
        ValueError: Keys of the model are missing, or foreign, or the optimizer has other groups
            of parameters; they are named.
        RuntimeError: A tensor of the checkpoint has another shape, or a rank failed, which is
            named.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    with raise_on_all_ranks('reading a checkpoint', dist.group.WORLD):
        reader = storage_reader or dcp.FileSystemReader(path)  # type: ignore[attr-defined]
        saved = reader.read_metadata().state_dict_metadata
        values, parameters = _model_views(model)
        state: dict[str, Any] = {'model': values}
        check_keys([f'model.{key}' for key, value in values.items() if isinstance(value, Tensor)],
                   [key for key, value in saved.items()
                    if key.startswith('model.') and _is_tensor(value)])
        if optimizer is not None:
            state['optimizer'] = _optimizer_form(parameters, optimizer, saved)
    with as_errors('reading a checkpoint'):
        dcp.load(state, storage_reader=reader, **options)  # type: ignore[attr-defined]
    set_model_state_dict(model, _local(state['model']))
    if optimizer is not None:
        _load_optimizer(parameters, optimizer, state['optimizer'])


@contextmanager
def as_errors(what: str) -> Iterator[None]:
    """Raise a RuntimeError for what PyTorch raises on all ranks, which is no exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        raised, _ = next(iter(error.failures.values()))
        raise RuntimeError(f'{what} failed on ranks {[*error.failures]}: {type(raised).__name__}: '
                           f'{raised}') from error


# --- the model
# ------------------------------------------------------------------------------------------

#: Parameters by the names that they have in a checkpoint: those of the plain model.
Parameters = dict[str, nn.Parameter]


def _model_views(model: nn.Module) -> tuple[dict[str, Any], Parameters]:
    """Return the state dict of a model with DTensors for shards, and the parameters in it."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    values = get_model_state_dict(model)
    places = {place(parameter): parameter for parameter in model.parameters()}
    parameters = {key: places[place(value)] for key, value in values.items()
                  if isinstance(value, Tensor) and place(value) in places}
    return views(values, {key: parameter for key, parameter in parameters.items()
                          if storage_dim(parameter) is not None}), parameters


def _is_tensor(saved: Any) -> bool:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return isinstance(saved, TensorStorageMetadata)


def _local(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors for DTensors."""
    from torch.distributed.tensor import DTensor

    return {key: value.to_local() if isinstance(value, DTensor) else value
            for key, value in values.items()}


# --- the optimizer
# --------------------------------------------------------------------------------------


def _optimizer_views(parameters: Parameters, optimizer: Optimizer) -> dict[str, Any]:
    """Return the state dict of an optimizer by names, with DTensors in the memory of shards."""
    groups, names = _named_groups(parameters, optimizer)
    return nested({'param_groups': groups}, {
        (names[number], entry): value for (number, entry), value in
        views(*optimizer_entries(optimizer, optimizer.state_dict())).items()})


def _named_groups(parameters: Parameters, optimizer: Optimizer
                  ) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the groups of an optimizer with names for numbers, and the names of the numbers."""
    of_parameters: dict[int, str] = {}
    for key, parameter in parameters.items():
        of_parameters.setdefault(id(parameter), key)  # The first name, as PyTorch takes it.
    names = [of_parameters[id(parameter)] for group in optimizer.param_groups
             for parameter in group['params']]
    return [{**group, 'params': [names[number] for number in group['params']]}
            for group in optimizer.state_dict()['param_groups']], names


def _optimizer_form(parameters: Parameters, optimizer: Optimizer, saved: Mapping[str, Any]
                    ) -> dict[str, Any]:
    """Return what the states of a checkpoint are read into.

    These states are the ones that were saved: those of an optimizer come with its first step only,
    and to take one for that would change the count of its steps.
    """
    groups, names = _named_groups(parameters, optimizer)
    _check_options(groups, saved)
    prefixes = {name: f'optimizer.state.{name}.' for name in names}
    return {'param_groups': groups, 'state': {
        name: {key.removeprefix(prefix): _form(value, parameters[name])
               for key, value in saved.items() if key.startswith(prefix)}
        for name, prefix in prefixes.items()}}


def _check_options(groups: list[dict[str, Any]], saved: Mapping[str, Any]) -> None:
    prefix = 'optimizer.param_groups.'
    here = {f'{i}.{option}' for i, group in enumerate(groups) for option in group}
    there = {'.'.join(key.removeprefix(prefix).split('.')[:2])
             for key in saved if key.startswith(prefix)}
    if here != there:
        raise ValueError(
            'a checkpoint is loaded into an optimizer of the same type with the same groups of '
            f'parameters: only this one has {sorted(here - there)}, only the checkpoint '
            f'{sorted(there - here)} (numbers of groups, and their options)')


def _form(saved: Any, parameter: Tensor) -> Any:
    """Return a tensor to read a state into; what is none is read as it is."""
    if not _is_tensor(saved):
        return None
    dtype = saved.properties.dtype
    if not saved.size:
        return torch.empty((), dtype=dtype)  # The optimizer knows where it has to be.
    if storage_dim(parameter) is None:
        return torch.empty(saved.size, dtype=dtype, device=parameter.device)
    return dtensor(parameter, torch.empty_like(parameter, dtype=dtype))


def _load_optimizer(parameters: Parameters, optimizer: Optimizer, loaded: dict[str, Any]) -> None:
    groups, names = _named_groups(parameters, optimizer)
    here, there = ([group['params'] for group in each]
                   for each in (groups, loaded['param_groups']))
    if here != there:
        raise ValueError(
            'a checkpoint is loaded into an optimizer with the same groups of parameters: this '
            f'one has {here}, the checkpoint {there}. Make the optimizer as it was made before')
    optimizer.load_state_dict({
        'state': {number: _local(loaded['state'][name]) for number, name in enumerate(names)
                  if loaded['state'][name]},
        'param_groups': [
            {**new, 'params': old['params']} for new, old in zip(
                loaded['param_groups'], optimizer.state_dict()['param_groups'])]})
