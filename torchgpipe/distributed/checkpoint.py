"""Checkpoints: saved on any mesh, loaded on any other one, or in one process.

Each rank writes and reads its own entries, under the names of the whole model. One rank writes the
entries that several ranks have. ``torch.distributed.checkpoint`` writes and reads the files.
"""
import threading
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from torchgpipe.distributed.mesh import AXES, Axis
from torchgpipe.distributed.rank import Rank
from torchgpipe.distributed.start import Facts, digest
from torchgpipe.distributed.states import (check_model, check_optimizer, extra_bytes,
                                           extra_entries, extra_forms, groups_of, load_extra,
                                           named, optimizer_entries, options_of, random_entries,
                                           restore_random, saved_options, saved_shapes, shapes)
from torchgpipe.shard.entries import by_names, under
from torchgpipe.shard.failures import gathered
from torchgpipe.shard.folders import Folder, Writer, as_errors, opened

__all__ = ['Saving', 'load', 'load_checkpoint', 'save', 'save_checkpoint']

#: Objects with states, and plain values, by names.
Extra = Mapping[str, Any] | None


class Saving:
    """A checkpoint that is written while training continues.

    Its thread keeps the process alive until all ranks have written it, or one has failed.

    Args:
        work: Functions that write it, and wait until the other ranks have written their parts.
    """

    def __init__(self, *work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._told = False
        self._thread = threading.Thread(target=self._run, name='torchgpipe saving')
        self._thread.start()

    def _run(self) -> None:
        try:
            for each in self._work:
                each()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """Return whether the checkpoint is written, or has failed."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> None:
        """Wait until all ranks have written the checkpoint.

        Args:
            timeout: The longest wait, in seconds; by default there is no limit.

        Raises:
            RuntimeError: A rank failed.
            TimeoutError: The checkpoint is not written within ``timeout``.
        """
        self._thread.join(timeout)
        if not self.done():
            raise TimeoutError(f'the checkpoint is not written after {timeout} s')
        self._told = True
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Wait, and raise the error if no call of ``result`` has raised it yet."""
        if not self._told:
            self.result()


def save(model: nn.Module, rank: Rank, folder: Folder, optimizer: Optimizer | None,
         extra: Extra, wait: bool = True, patience: Callable[[], float] = float) -> Saving | None:
    """Save a model on all ranks: see :meth:`DistributedGPipe.save`.

    Args:
        patience: Returns how long a rank waits for others, in seconds.
    """
    task, (number, ranks) = 'saving a checkpoint', _place(rank)
    writer = Writer(folder, number, ranks, patience)
    state, own = dict[str, Any](), dict[str, bytes]()

    def read() -> Facts:
        _settle(rank)
        own.update(extra_bytes(extra or {}))
        return Facts(settings=digest(writer.folder.name, wait), layers=rank.outline(),
                     numbers=rank.numbers())

    def prepare() -> None:
        entries = {'model': model.state_dict(),
                   'optimizer': {} if optimizer is None else optimizer_entries(
                       named(model, optimizer, rank.ties.names)),
                   'random': random_entries(_name(rank), rank.devices),
                   'extra': extra_entries(everywhere, rank.data.rank)}
        state.update(entries if wait else writer.stage(entries))
        if not number:
            writer.make_way()

    said = rank.together(task, read)
    rank.check_outlines(said)
    rank.compare(said)
    everywhere = _everywhere(rank, (rank.data.rank, own))
    rank.together(task, prepare)
    with as_errors(task):
        state_dict_saver.save(state, storage_writer=writer, process_group=rank.everyone,
                              no_dist=rank.everyone is None)
    if not wait:
        rank.saving = saving = Saving(writer.write, writer.end)
        return saving
    rank.together(task, writer.write)
    rank.together(task, writer.end)
    return None


def load(model: nn.Module, rank: Rank, folder: Folder, optimizer: Optimizer | None,
         extra: Extra) -> dict[str, Any]:
    """Load a model on all ranks: see :meth:`DistributedGPipe.load`.

    Options and further state are read before any tensor.
    """
    task, loading, found = 'loading a checkpoint', list[_Loading](), dict[str, Any]()

    def prepare() -> Facts:
        _settle(rank)
        loading.append(_Loading(model, rank, *opened(folder, *_place(rank)), optimizer))
        return Facts(settings=digest(sorted(loading[0].saved)))

    def finish() -> Facts:
        found.update(loading[0].read_tensors(extra or {}))
        return Facts(numbers=rank.numbers())

    rank.together(task, prepare)
    _check(_everywhere(rank, loading[0].facts), loading[0].saved)
    rank.together(task, lambda: loading[0].read_options(extra or {}))
    rank.compare(rank.together(task, finish))
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
    save(module, _alone(module), folder, optimizer, extra)


def load_checkpoint(folder: Folder, module: nn.Module, optimizer: Optimizer | None = None,
                    extra: Extra = None) -> dict[str, Any]:
    """Load a model into one process; it may have been saved on any mesh.

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
    return load(module, _alone(module), folder, optimizer, extra)


class _Loading:
    """A checkpoint while it is loaded. Each rank reads its own entries without waiting."""

    def __init__(self, model: nn.Module, rank: Rank, reader: FileSystemReader, metadata: Metadata,
                 optimizer: Optimizer | None) -> None:
        self._model, self._rank, self._reader = model, rank, reader
        self.saved = metadata.state_dict_metadata
        self._optimizer = None if optimizer is None else named(model, optimizer, rank.ties.names)
        own = self._optimizer
        #: The shapes of the model, the parameters of the optimizer and its options.
        self.facts = (shapes(model), own.names if own else [], options_of(own) if own else None)
        self._groups: list[dict[str, Any]] = []
        self._extra: dict[str, Any] = {}

    def read_options(self, asked: Mapping[str, Any]) -> None:
        """Read the options of the optimizer, and further state.

        Raises:
            ValueError: Parameters of one group had different options, or a state is missing.
        """
        data, own = self._rank.data, self._optimizer
        self._extra = extra_forms(self.saved, data.size, data.rank, asked)
        options = own.forms(saved_options(self.saved)) if own else {}
        self._read({'optimizer': {'param_groups': options}, 'extra': self._extra})
        self._groups = groups_of(own, options) if own else []

    def read_tensors(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Load the values of the model, its optimizer, generators and objects."""
        own, place = self._optimizer, _name(self._rank)
        states = own.forms(by_names(under(self.saved, 'optimizer.state.'))) if own else {}
        state = {'model': self._model.state_dict(), 'optimizer': {'state': states}, 'random': {
            f'{place}.{key}': torch.empty(value.size, dtype=torch.uint8)
            for key, value in under(self.saved, f'random.{place}.').items()}}
        self._read(state)
        # Tensors were read in place. Hooks and extra states still have to be loaded.
        self._model.load_state_dict(state['model'])
        if own:
            own.load(states, self._groups)
        restore_random(place, self._rank.devices, state['random'])
        return load_extra(self._extra, asked)

    def _read(self, state: dict[str, Any]) -> None:
        with as_errors('loading a checkpoint'):
            state_dict_loader.load(state, storage_reader=self._reader, no_dist=True)


def _check(everywhere: Iterable[tuple[Any, list[str], list[str] | None]],
           saved: Mapping[str, Any]) -> None:
    """Check that a checkpoint is of this model and optimizer, which are split over ranks."""
    models, names, options = zip(*everywhere)
    check_model({name: shape for each in models for name, shape in each.items()},
                saved_shapes(saved))
    if any(each is not None for each in options):
        check_optimizer({name for each in names for name in each},
                        {key for each in options for key in each or ()}, saved_options(saved))


# --- ranks
# -----------------------------------------------------------------------------------------------


def _alone(module: nn.Module) -> Any:
    """Return, in place of a rank of a mesh, a process with the whole model."""
    data, pipe, tensor = (Axis(name, 1, 0, None, None) for name in AXES)
    return SimpleNamespace(
        everyone=None, saving=None, data=data, pipe=pipe, tensor=tensor,
        devices={x.device for x in (*module.parameters(), *module.buffers())},
        ties=SimpleNamespace(names={}), outline=int, numbers=lambda: (0, 0, 0),
        # There is no other rank to compare with.
        check_outlines=bool, compare=bool, together=lambda task, function: {0: function()})


def _place(rank: Rank) -> tuple[int, int]:
    """Return the number of a rank, and the number of ranks."""
    everyone = rank.everyone
    return (0, 1) if everyone is None else (everyone.rank(), everyone.size())


def _everywhere(rank: Rank, value: Any) -> list[Any]:
    """Return the values of all ranks."""
    return [value] if rank.everyone is None else gathered(value, rank.everyone)


def _settle(rank: Rank) -> None:
    """Wait for the previous save."""
    if rank.saving is not None:
        rank.saving.settle()
        rank.saving = None


def _name(rank: Rank) -> str:
    """Return the sizes of a mesh, and the place of a rank in it."""
    data, pipe, tensor = rank.data, rank.pipe, rank.tensor
    number = (data.rank * pipe.size + pipe.rank) * tensor.size + tensor.rank
    return f'{data.size}x{pipe.size}x{tensor.size}.{number}'
