"""Checkpoints: saved on any mesh, loaded on any other one, or in one process.

Each rank writes and reads what it has, under the names of the whole model. What several ranks have
is written by one of them. It is ``torch.distributed.checkpoint`` that does it.
"""
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.optim import Optimizer

from torchgpipe.distributed.folders import Folder, Writer, check_files, make_way, opened, resolved
from torchgpipe.distributed.matching import check_model, check_optimizer
from torchgpipe.distributed.rank import Rank
from torchgpipe.distributed.start import Facts, digest
from torchgpipe.distributed.states import (Index, extra_bytes, extra_entries, extra_forms,
                                           groups_of, index, load_extra, load_optimizer, names_of,
                                           optimizer_entries, optimizer_forms, options_of,
                                           random_entries, restore_random, shapes)
from torchgpipe.shard.checkpoint import as_errors

__all__ = ['Saving', 'load', 'load_checkpoint', 'save', 'save_checkpoint']

#: Objects with states, and plain values, by names.
Extra = Mapping[str, Any] | None

#: The mesh of one process, and its rank.
_ALONE = '1x1x1.0'


class Saving:
    """A checkpoint that is written while training goes on.

    Its thread lets the process end only when all ranks have written it, or one has failed.

    Args:
        write: Writes it, and waits until the other ranks have written theirs.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name='torchgpipe saving')
        self._thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Return whether it is written, or has failed."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> None:
        """Wait until all ranks have written it.

        Raises:
            RuntimeError: It failed, on some rank.
            TimeoutError: It takes longer than so many seconds.
        """
        self._thread.join(timeout)
        if not self.done():
            raise TimeoutError(f'the checkpoint is not written after {timeout} s')
        self._told = True
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Wait, and raise the error that no caller has got yet."""
        if not self._told:
            self.result()


def save(model: nn.Module, rank: Rank, folder: Folder, optimizer: Optimizer | None,
         extra: Extra, wait: bool, patience: Callable[[], float]) -> Saving | None:
    """Save a model on all ranks: see :meth:`DistributedGPipe.save`.

    Args:
        patience: For how many seconds a rank waits for others.
    """
    what, path, numbers = 'saving a checkpoint', resolved(folder), _numbers(rank)
    writer = Writer(path, numbers.index(dist.get_rank()), len(numbers), patience)
    state, own = dict[str, Any](), dict[str, bytes]()

    def read() -> Facts:
        _settle(rank)
        own.update(extra_bytes(extra or {}))
        return Facts(settings=digest(path.name, wait), layers=rank.outline(),
                     numbers=rank.numbers())

    def prepare() -> Facts:
        entries = _contents(model, optimizer, rank.ties.names, _place(rank), [rank.device],
                            extra_entries(everywhere, rank.data.rank))
        state.update(entries if wait else writer.stage(entries))
        if dist.get_rank() == numbers[0]:
            make_way(path)
        return Facts()

    def write() -> Facts:
        writer.write()
        return Facts()

    def end() -> Facts:
        writer.end()
        return Facts()

    said = rank.together(what, read)
    rank.check_outlines(said)
    rank.compare(said)
    everywhere = _everywhere(rank, (rank.data.rank, own))
    rank.together(what, prepare)
    with as_errors(what), _quiet():
        state_dict_saver.save(state, storage_writer=writer, process_group=rank.everyone,
                              no_dist=rank.everyone is None)
    if not wait:
        def finish() -> None:
            writer.write()
            writer.end()

        rank.saving = saving = Saving(finish)
        return saving
    rank.together(what, write)
    rank.together(what, end)
    return None


def load(model: nn.Module, rank: Rank, folder: Folder, optimizer: Optimizer | None,
         extra: Extra) -> dict[str, Any]:
    """Load a model on all ranks: see :meth:`DistributedGPipe.load`."""
    what, numbers = 'loading a checkpoint', _numbers(rank)
    read: list[tuple[Path, Index]] = []
    own: list[Any] = []
    small: dict[str, Any] = {}
    found: dict[str, Any] = {}

    def prepare() -> Facts:
        _settle(rank)
        where, metadata = opened(resolved(folder))
        check_files(where, metadata, numbers.index(dist.get_rank()), len(numbers))
        read.append((where, index(metadata)))
        own.append((shapes(model), _names(model, optimizer, rank.ties.names)))
        return Facts(settings=digest(sorted(metadata.state_dict_metadata)))

    def begin() -> Facts:
        small.update(_read_options(*read[0], model, optimizer, rank.ties.names, extra_forms(
            read[0][1], rank.data.size, rank.data.rank, extra or {})))
        return Facts()

    def finish() -> Facts:
        _read_tensors(*read[0], model, optimizer, rank.ties.names, small, _place(rank),
                      [rank.device])
        found.update(load_extra(small['extra'], extra or {}))
        return Facts(numbers=rank.numbers())

    rank.together(what, prepare)
    everywhere = _everywhere(rank, own[0])
    _check([each for each, _ in everywhere],
           [each for _, each in everywhere if each is not None], read[0][1])
    rank.together(what, begin)
    rank.compare(rank.together(what, finish))
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
        RuntimeError: It cannot be written.
    """
    path = resolved(folder)
    state = _contents(module, optimizer, {}, _ALONE, _devices(module),
                      extra_entries([(0, extra_bytes(extra or {}))], 0))
    make_way(path)
    writer = Writer(path)
    with as_errors('saving a checkpoint'), _quiet():
        state_dict_saver.save(state, storage_writer=writer, no_dist=True)
    writer.write()
    writer.end()


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
        RuntimeError: It cannot be read.
    """
    where, metadata = opened(resolved(folder))
    check_files(where, metadata)
    saved, names = index(metadata), _names(module, optimizer, {})
    _check([shapes(module)], [] if names is None else [names], saved)
    small = _read_options(where, saved, module, optimizer, {},
                          extra_forms(saved, 1, 0, extra or {}))
    _read_tensors(where, saved, module, optimizer, {}, small, _ALONE, _devices(module))
    return load_extra(small['extra'], extra or {})


# --- what is saved
# ---------------------------------------------------------------------------------------


def _contents(model: nn.Module, optimizer: Optimizer | None, ties: Mapping[str, str], place: str,
              devices: Iterable[torch.device], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank saves."""
    return {'model': model.state_dict(),
            'optimizer': {} if optimizer is None else optimizer_entries(
                optimizer, names_of(model, optimizer, ties)),
            'random': random_entries(place, devices), 'extra': extra}


def _read_options(where: Path, saved: Index, model: nn.Module, optimizer: Optimizer | None,
                  ties: Mapping[str, str], extra: dict[str, Any]) -> dict[str, Any]:
    """Return the options of an optimizer and further state, which are read before any tensor.

    Raises:
        ValueError: Parameters of one group had different options.
    """
    options: dict[str, Any] = {}
    if optimizer is not None:
        names = names_of(model, optimizer, ties)
        options = {key: form for key, form in optimizer_forms(optimizer, names, saved).items()
                   if key.startswith('param_groups.')}
    state = {'optimizer': options, 'extra': extra}
    _read(where, state)
    if optimizer is not None:
        groups_of(optimizer, names, options)
    return state


def _read_tensors(where: Path, saved: Index, model: nn.Module, optimizer: Optimizer | None,
                  ties: Mapping[str, str], small: Mapping[str, Any], place: str,
                  devices: Iterable[torch.device]) -> None:
    """Give a model, its optimizer and the generators their values."""
    names = {} if optimizer is None else names_of(model, optimizer, ties)
    states = {} if optimizer is None else {
        key: form for key, form in optimizer_forms(optimizer, names, saved).items()
        if key not in small['optimizer']}
    state = {'model': model.state_dict(), 'optimizer': states,
             'random': {key: torch.empty(each.size, dtype=torch.uint8)
                        for key, each in saved.random.items() if key.startswith(f'{place}.')}}
    _read(where, state)
    model.load_state_dict(state['model'])  # Tensors are there; hooks and extra states are not.
    if optimizer is not None:
        load_optimizer(optimizer, names, {**small['optimizer'], **states})
    restore_random(place, devices, state['random'])


def _read(where: Path, state: dict[str, Any]) -> None:
    """Read entries in place. Each rank reads its own, so that none waits for another."""
    with as_errors('loading a checkpoint'), _quiet():
        state_dict_loader.load(state, storage_reader=FileSystemReader(where), no_dist=True)


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


def _numbers(rank: Rank) -> list[int]:
    """Return the numbers of all ranks."""
    return [dist.get_rank()] if rank.everyone is None else dist.get_process_group_ranks(
        rank.everyone)


def _everywhere(rank: Rank, value: Any) -> list[Any]:
    """Return what each rank has."""
    if rank.everyone is None:
        return [value]
    found: list[Any] = [None] * rank.everyone.size()
    dist.all_gather_object(found, value, rank.everyone)
    return found


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
