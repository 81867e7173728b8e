"""Checkpoints of ``torch.distributed.checkpoint``: each rank writes and reads its own shards.

The files have the names and shapes of the plain model and of its optimizer. So a group of any size
can read them, or a single process with PyTorch alone::

    model.<name of the parameter>                       optimizer.param_groups
    optimizer.state.<name of the parameter>.<name of the state>
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from torchgpipe.shard.collectives import raise_on_all_ranks
from torchgpipe.shard.entries import (
    NamedOptimizer,
    by_names,
    check_names,
    is_tensor,
    local_entries,
    under,
    views,
)
from torchgpipe.shard.parameter import place, storage_dim

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader


#: Where a checkpoint is.
Path = str | os.PathLike[str]

#: How long a file system may hide the files of one rank from another, in seconds.
_PATIENCE = 60.0

# `torch.distributed.checkpoint` is imported where it is called, because the import takes long.


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: Optimizer | None = None, **options: Any
) -> None:
    """Save a model with sharded layers, and its optimizer, by ``torch.distributed.checkpoint``.

    All ranks call it. Each writes its own shards; shared values are written once. Names are the
    names in the module within a ``DistributedDataParallel`` or a compiled module. ::

        ts.save_checkpoint('checkpoint', model, optimizer)
        ts.load_checkpoint('checkpoint', model, optimizer)  # in groups of another size, too

    Args:
        path: A folder, on a file system that all ranks share. When all have written their shards,
            the checkpoint takes the place of the one that is there.
        model: The model.
        optimizer: Its optimizer. Use :func:`collect_optimizer_state_dict` for a
            ``ZeroRedundancyOptimizer``, whose state is spread over replicas.
        options: Further arguments of ``torch.distributed.checkpoint.save``, such as
            ``storage_writer``. With any, PyTorch writes to the path itself.

    Raises:
        FileExistsError: The folder has other things in it.
        ValueError: A sharded parameter, or a state of the optimizer, does not have the shape of
            this rank's shard; or the optimizer has parameters of another model.
        RuntimeError: A rank cannot write its shard, or failed otherwise; it is named.
    """
    import torch.distributed.checkpoint as dcp

    from torchgpipe.shard.folders import Writer, as_errors

    task = 'saving a checkpoint'
    rank = dist.get_rank()
    writer = None
    if not options and '://' not in str(path):
        writer = Writer(path, rank, dist.get_world_size(), lambda: _PATIENCE)
    with raise_on_all_ranks(task, dist.group.WORLD):
        values, parameters = _model_views(model)
        state: dict[str, Any] = {'model': values}
        if optimizer is not None:
            named = _named(parameters, optimizer)
            state['optimizer'] = {'param_groups': named.groups(), 'state': named.states()}
        if writer is not None and not rank:
            writer.make_way()
    if writer is None:
        with as_errors(task):
            dcp.save(state, checkpoint_id=path, **options)  # type: ignore[attr-defined]
        return
    writer.plan(state, dist.group.WORLD)
    for turn in writer.turns():
        with raise_on_all_ranks(task, dist.group.WORLD):
            turn()


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    storage_reader: 'StorageReader | None' = None,
    **options: Any,
) -> None:
    """Load a checkpoint of :func:`save_checkpoint` into groups of any size. All ranks call it.

    Each rank reads its own shards. The optimizer gets the saved states, whether or not it has
    made a step.

    Args:
        path: The folder; its last complete checkpoint is loaded.
        model: The model.
        optimizer: Its optimizer, with the same groups of parameters.
        storage_reader: A reader of the checkpoint, if it is not a folder.
        options: Further arguments of ``torch.distributed.checkpoint.load``.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: Keys of the model are missing or unknown, or the optimizer has other groups
            of parameters; the error names them. Or a file is damaged.
        RuntimeError: A tensor of the checkpoint has another shape, or a rank failed; the error
            names it.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    from torchgpipe.shard.folders import as_errors, opened

    with raise_on_all_ranks('reading a checkpoint', dist.group.WORLD):
        reader = storage_reader or opened(path, dist.get_rank(), dist.get_world_size())[0]
        saved = reader.read_metadata().state_dict_metadata
        values, parameters = _model_views(model)
        state: dict[str, Any] = {'model': values}
        names = [f'model.{key}' for key, value in values.items() if isinstance(value, Tensor)]
        saved_names = []
        for key, value in under(saved, 'model.').items():
            if is_tensor(value):
                saved_names.append(f'model.{key}')
        check_names(
            'a checkpoint has the keys of the model', 'model', sorted(names), sorted(saved_names)
        )
        if optimizer is not None:
            named = _named(parameters, optimizer)
            _check_options(named.groups(), under(saved, 'optimizer.param_groups.'))
            state['optimizer'] = {
                'param_groups': named.groups(),
                'state': named.empty_states(by_names(under(saved, 'optimizer.state.'))),
            }
    with as_errors('reading a checkpoint'):
        dcp.load(state, storage_reader=reader, **options)  # type: ignore[attr-defined]
    set_model_state_dict(model, local_entries(state['model']))
    if optimizer is not None:
        loaded = state['optimizer']
        groups = [group['params'] for group in named.groups()]
        saved_groups = [group['params'] for group in loaded['param_groups']]
        if groups != saved_groups:
            raise ValueError(
                'a checkpoint is loaded into an optimizer with the same groups of parameters: '
                f'this one has {groups}, the checkpoint {saved_groups}. Make the optimizer as it '
                'was made before'
            )
        named.load(loaded['state'], loaded['param_groups'])


# --- the model
# ------------------------------------------------------------------------------------------

#: Parameters by their names in a checkpoint, which are the names in the plain model.
Parameters = dict[str, nn.Parameter]


def _model_views(model: nn.Module) -> tuple[dict[str, Any], Parameters]:
    """Return the state dict of a model with DTensors for shards, and the parameters in it."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    values = get_model_state_dict(model)
    by_place = {place(parameter): parameter for parameter in model.parameters()}
    parameters = {}
    shards = {}
    for key, value in values.items():
        if isinstance(value, Tensor) and place(value) in by_place:
            parameter = by_place[place(value)]
            parameters[key] = parameter
            if storage_dim(parameter) is not None:
                shards[key] = parameter
    return views(values, shards), parameters


def _named(parameters: Parameters, optimizer: Optimizer) -> NamedOptimizer:
    """Return an optimizer by the first name of each parameter, as PyTorch does."""
    return NamedOptimizer(optimizer, {id(x): key for key, x in reversed(parameters.items())})


def _check_options(groups: list[dict[str, Any]], saved: Mapping[str, Any]) -> None:
    options = set()
    for i, group in enumerate(groups):
        options |= {f'{i}.{option}' for option in group}
    saved_options = {'.'.join(key.split('.')[:2]) for key in saved}
    if options != saved_options:
        raise ValueError(
            'a checkpoint is loaded into an optimizer of the same type with the same groups of '
            f'parameters: only this one has {sorted(options - saved_options)}, only the '
            f'checkpoint {sorted(saved_options - options)} (numbers of groups, and their options)'
        )
