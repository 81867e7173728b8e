"""Checkpoints: saved on any mesh, loaded on any other one, or in one process.

Each rank writes and reads what it has, under the names of the whole model. What several ranks have
is written by one of them. It is ``torch.distributed.checkpoint`` that does it.
"""
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.optim import Optimizer

from torchgpipe.distributed.folders import Folder, Writer, make_way, opened, resolved
from torchgpipe.distributed.matching import check_model, check_optimizer
from torchgpipe.distributed.rank import Rank
from torchgpipe.distributed.start import Facts, digest
from torchgpipe.distributed.states import (Index, extra_bytes, extra_entries, extra_forms, index,
                                           load_extra, load_optimizer, names_of, optimizer_entries,
                                           optimizer_forms, options_of, random_entries,
                                           restore_random, shapes)
from torchgpipe.shard.checkpoint import as_errors

__all__ = ['Saving', 'load', 'load_checkpoint', 'save', 'save_checkpoint']

#: Objects with states, and plain values, by names.
Extra = Mapping[str, Any] | None

#: The mesh of one process, and its rank.
_ALONE = '1x1x1.0'


class Saving:
    """A checkpoint that is written while training goes on.

    Args:
        future: Ends when all ranks have written it.
    """

    def __init__(self, future: 'Future[Any]') -> None:
        self._future = future
        self._told = False

    def done(self) -> bool:
        """Return whether it is written, or has failed."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> None:
        """Wait until all ranks have written it.

        Raises:
            RuntimeError: It failed, on some rank.
            TimeoutError: It takes longer than so many seconds.
        """
        with as_errors('saving a checkpoint'):
            error = self._future.exception(timeout)
            self._told = True
            if error is not None:
                raise error

    def settle(self) -> None:
        """Wait, and raise what nobody has been told of."""
        if not self._told:
            self.result()


def save(model: nn.Module, rank: Rank, folder: Folder, optimizer: Optimizer | None,
         extra: Extra, wait: bool) -> Saving | None:
    """Save a model on all ranks: see :meth:`DistributedGPipe.save`."""
    group = _group(rank)
    path = resolved(folder)
    writer, state, own = Writer(path), dict[str, Any](), dict[str, bytes]()
    everywhere: list[Any] = [None] * group.size()

    def read() -> Facts:
        _settle(rank)
        own.update(extra_bytes(extra or {}))
        return Facts(settings=digest(path.name, wait), replaced=rank.digest_of_replaced)

    def prepare() -> Facts:
        entries = _contents(model, optimizer, rank.ties.names, _place(rank), [rank.device],
                            extra_entries(everywhere, rank.data.rank))
        state.update(entries if wait else writer.stage(entries))
        if dist.get_rank(group) == 0:
            make_way(path)
        return Facts()

    rank.spread_replaced(rank.together('saving a checkpoint', read))
    dist.all_gather_object(everywhere, (rank.data.rank, own), group)
    rank.together('saving a checkpoint', prepare)
    if not wait:
        saving = Saving(state_dict_saver.async_save(  # type: ignore[arg-type]
            state, storage_writer=writer, process_group=group))
        rank.saving = saving
        return saving
    with as_errors('saving a checkpoint'):
        state_dict_saver.save(state, storage_writer=writer, process_group=group)
    return None


def load(model: nn.Module, rank: Rank, folder: Folder, optimizer: Optimizer | None,
         extra: Extra) -> dict[str, Any]:
    """Load a model on all ranks: see :meth:`DistributedGPipe.load`."""
    group = _group(rank)
    read: list[tuple[Path, Index]] = []
    own: list[Any] = []

    def prepare() -> Facts:
        _settle(rank)
        where, metadata = opened(resolved(folder))
        read.append((where, index(metadata)))
        own.append((shapes(model), _names(model, optimizer, rank.ties.names)))
        return Facts(settings=digest(sorted(metadata.state_dict_metadata)))

    rank.together('loading a checkpoint', prepare)
    everywhere: list[Any] = [None] * group.size()
    dist.all_gather_object(everywhere, own[0], group)
    where, saved = read[0]
    _check([each for each, _ in everywhere],
           [each for _, each in everywhere if each is not None], saved)
    names = rank.ties.names
    found: dict[str, Any] = {}

    def forms() -> Facts:
        state.update(_forms(model, optimizer, names, saved, _place(rank)),
                     extra=extra_forms(saved, rank.data.size, rank.data.rank, extra or {}))
        return Facts()

    def finish() -> Facts:
        _put(model, optimizer, names, state, _place(rank), [rank.device])
        found.update(load_extra(state['extra'], extra or {}))
        return Facts()

    state: dict[str, Any] = {}
    rank.together('loading a checkpoint', forms)
    with as_errors('loading a checkpoint'):
        state_dict_loader.load(state, storage_reader=FileSystemReader(where), process_group=group)
    rank.together('loading a checkpoint', finish)
    return found


def save_checkpoint(folder: Folder, module: nn.Module, optimizer: Optimizer | None = None,
                    extra: Extra = None) -> None:
    """Save a model of one process: a ``GPipe``, or the module that it wraps.

    >>> save_checkpoint('checkpoint', gpipe, optimizer)  # doctest: +SKIP

    Args:
        folder: As of :meth:`DistributedGPipe.save`.
        module: The model.
        optimizer: Its optimizer.
        extra: As of :meth:`DistributedGPipe.save`.

    Raises:
        FileExistsError: The folder has other things in it.
        ValueError: The optimizer has other parameters.
        RuntimeError: It can not be written.
    """
    path = resolved(folder)
    state = _contents(module, optimizer, {}, _ALONE, _devices(module),
                      extra_entries([(0, extra_bytes(extra or {}))], 0))
    make_way(path)
    with as_errors('saving a checkpoint'), _quiet():
        state_dict_saver.save(state, storage_writer=Writer(path), no_dist=True)


def load_checkpoint(folder: Folder, module: nn.Module, optimizer: Optimizer | None = None,
                    extra: Extra = None) -> dict[str, Any]:
    """Load a model into one process, from whatever mesh it was saved on.

    >>> load_checkpoint('checkpoint', gpipe, optimizer)  # doctest: +SKIP

    Args:
        folder: As of :meth:`DistributedGPipe.load`.
        module: A ``GPipe``, or the module that it wraps.
        optimizer: Its optimizer.
        extra: As of :meth:`DistributedGPipe.load`.

    Returns:
        As :meth:`DistributedGPipe.load`.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: It is of another model, or of another optimizer.
        RuntimeError: It can not be read.
    """
    where, metadata = opened(resolved(folder))
    saved, names = index(metadata), _names(module, optimizer, {})
    _check([shapes(module)], [] if names is None else [names], saved)
    state = {**_forms(module, optimizer, {}, saved, _ALONE),
             'extra': extra_forms(saved, 1, 0, extra or {})}
    with as_errors('loading a checkpoint'), _quiet():
        state_dict_loader.load(state, storage_reader=FileSystemReader(where), no_dist=True)
    _put(module, optimizer, {}, state, _ALONE, _devices(module))
    return load_extra(state['extra'], extra or {})


# --- what is saved
# ---------------------------------------------------------------------------------------


def _contents(model: nn.Module, optimizer: Optimizer | None, ties: Mapping[str, str], place: str,
              devices: Iterable[torch.device], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank saves."""
    return {'model': model.state_dict(),
            'optimizer': {} if optimizer is None else optimizer_entries(
                optimizer, names_of(model, optimizer, ties)),
            'random': random_entries(place, devices), 'extra': extra}


def _forms(model: nn.Module, optimizer: Optimizer | None, ties: Mapping[str, str], saved: Index,
           place: str) -> dict[str, Any]:
    """Return what a rank reads into."""
    return {'model': model.state_dict(),
            'optimizer': {} if optimizer is None else optimizer_forms(
                optimizer, names_of(model, optimizer, ties), saved),
            'random': {key: torch.empty(each.size, dtype=torch.uint8)
                       for key, each in saved.random.items() if key.startswith(f'{place}.')}}


def _put(model: nn.Module, optimizer: Optimizer | None, ties: Mapping[str, str],
         state: Mapping[str, Any], place: str, devices: Iterable[torch.device]) -> None:
    """Give a rank what it has read."""
    model.load_state_dict(state['model'])  # Tensors are there; hooks and extra states are not.
    if optimizer is not None:
        load_optimizer(optimizer, names_of(model, optimizer, ties), state['optimizer'])
    restore_random(place, devices, state['random'])


def _names(model: nn.Module, optimizer: Optimizer | None, ties: Mapping[str, str]
           ) -> tuple[list[str], list[str]] | None:
    """Return the parameters of an optimizer, and its options."""
    if optimizer is None:
        return None
    names = names_of(model, optimizer, ties)
    return ([names[id(x)] for group in optimizer.param_groups for x in group['params']],
            options_of(optimizer))


def _check(models: Iterable[Any], optimizers: list[Any], saved: Index) -> None:
    """See that a checkpoint is of this model and this optimizer, whose parts ranks have."""
    check_model({name: shape for each in models for name, shape in each.items()}, saved.model)
    if optimizers:
        check_optimizer({name for names, _ in optimizers for name in names},
                        {key for _, options in optimizers for key in options}, saved.groups)


# --- ranks
# -----------------------------------------------------------------------------------------------


def _group(rank: Rank) -> dist.ProcessGroup:
    """Return a group for files alone, as these may be written while messages are under way."""
    if rank.files is None:
        ranks = [dist.get_rank()] if rank.everyone is None else dist.get_process_group_ranks(
            rank.everyone)
        rank.files = dist.new_group(ranks, backend='gloo', use_local_synchronization=True)
    return rank.files


def _settle(rank: Rank) -> None:
    """Wait for what was saved before."""
    if rank.saving is not None:
        rank.saving.settle()
        rank.saving = None


def _place(rank: Rank) -> str:
    """Return the sizes of a mesh, and the place of a rank in it."""
    data, pipe, tensor = rank.data, rank.pipe, rank.tensor
    number = (data.rank * pipe.size + pipe.rank) * tensor.size + tensor.rank
    return f'{data.size}x{pipe.size}x{tensor.size}.{number}'


def _devices(module: nn.Module) -> set[torch.device]:
    return {x.device for x in (*module.parameters(), *module.buffers())}


@contextmanager
def _quiet() -> Iterator[None]:
    """Let PyTorch not say that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'torch.distributed is disabled')
        yield
