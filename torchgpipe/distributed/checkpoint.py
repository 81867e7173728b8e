"""Checkpoints: saved on any mesh, loaded on any other one, or in one process.

Each rank writes and reads what it has, under the names of the whole model. What several ranks have
is written by one of them. It is ``torch.distributed.checkpoint`` that does it.
"""
import threading
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import Optimizer

from torchgpipe.distributed.mesh import AXES, Axis
from torchgpipe.distributed.rank import Rank
from torchgpipe.distributed.start import Facts, digest
from torchgpipe.distributed.states import (Index, check_model, check_optimizer, extra_bytes,
                                           extra_entries, extra_forms, groups_of, index,
                                           load_extra, names_of, optimizer_entries, option_forms,
                                           options_of, random_entries, random_forms,
                                           restore_random, shapes)
from torchgpipe.shard.entries import load_states, state_forms
from torchgpipe.shard.failures import gathered
from torchgpipe.shard.folders import Folder, Writer, as_errors, opened

__all__ = ['Saving', 'load', 'load_checkpoint', 'save', 'save_checkpoint']

#: Objects with states, and plain values, by names.
Extra = Mapping[str, Any] | None


class Saving:
    """A checkpoint that is written while training goes on.

    Its thread lets the process end only when all ranks have written it, or one has failed.

    Args:
        work: Writes it, and waits until the other ranks have written theirs.
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


def save(model: nn.Module, rank: 'Rank | _Alone', folder: Folder, optimizer: Optimizer | None,
         extra: Extra, wait: bool = True, patience: Callable[[], float] = float) -> Saving | None:
    """Save a model on all ranks: see :meth:`DistributedGPipe.save`.

    Args:
        patience: For how many seconds a rank waits for others.
    """
    what, (number, ranks) = 'saving a checkpoint', _place(rank)
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
                       optimizer, names_of(model, optimizer, rank.ties.names)),
                   'random': random_entries(_name(rank), rank.devices),
                   'extra': extra_entries(everywhere, rank.data.rank)}
        state.update(entries if wait else writer.stage(entries))
        if not number:
            writer.make_way()

    said = rank.together(what, read)
    rank.check_outlines(said)
    rank.compare(said)
    everywhere = _everywhere(rank, (rank.data.rank, own))
    rank.together(what, prepare)
    with as_errors(what):
        state_dict_saver.save(state, storage_writer=writer, process_group=rank.everyone,
                              no_dist=rank.everyone is None)
    if not wait:
        rank.saving = saving = Saving(writer.write, writer.end)
        return saving
    rank.together(what, writer.write)
    rank.together(what, writer.end)
    return None


def load(model: nn.Module, rank: 'Rank | _Alone', folder: Folder, optimizer: Optimizer | None,
         extra: Extra) -> dict[str, Any]:
    """Load a model on all ranks: see :meth:`DistributedGPipe.load`.

    Options and further state are read before any tensor.
    """
    what, loading, found = 'loading a checkpoint', list[_Loading](), dict[str, Any]()

    def prepare() -> Facts:
        _settle(rank)
        loading.append(_Loading(model, rank, *opened(folder, *_place(rank)), optimizer))
        return Facts(settings=digest(sorted(loading[0].saved.entries)))

    def finish() -> Facts:
        found.update(loading[0].read_tensors(extra or {}))
        return Facts(numbers=rank.numbers())

    rank.together(what, prepare)
    _check(_everywhere(rank, loading[0].facts()), loading[0].saved)
    rank.together(what, lambda: loading[0].read_options(extra or {}))
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
    save(module, _Alone(module), folder, optimizer, extra)


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
    return load(module, _Alone(module), folder, optimizer, extra)


class _Loading:
    """A checkpoint while it is loaded. Each rank reads its own entries, and waits for no other."""

    def __init__(self, model: nn.Module, rank: 'Rank | _Alone', reader: FileSystemReader,
                 metadata: Metadata, optimizer: Optimizer | None) -> None:
        self._model, self._rank, self._reader, self._optimizer = model, rank, reader, optimizer
        self.saved = index(metadata)
        self._names = [] if optimizer is None else names_of(model, optimizer, rank.ties.names)
        self._groups: list[dict[str, Any]] = []
        self._extra: dict[str, Any] = {}

    def facts(self) -> tuple[Any, list[str], list[str] | None]:
        """Return the shapes of the model, the parameters of the optimizer and its options."""
        return shapes(self._model), self._names, (
            None if self._optimizer is None else options_of(self._optimizer))

    def read_options(self, asked: Mapping[str, Any]) -> None:
        """Read the options of the optimizer, and further state.

        Raises:
            ValueError: Parameters of one group had different options; or a state is not there.
        """
        data, optimizer = self._rank.data, self._optimizer
        self._extra = extra_forms(self.saved, data.size, data.rank, asked)
        options = {} if optimizer is None else option_forms(optimizer, self._names, self.saved)
        self._read({'optimizer': {'param_groups': options}, 'extra': self._extra})
        if optimizer is not None:
            self._groups = groups_of(optimizer, self._names, options)

    def read_tensors(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Give the model, its optimizer, generators and objects their values."""
        states = {} if self._optimizer is None else state_forms(
            self._optimizer, self._names, self.saved.entries)
        state = {'model': self._model.state_dict(), 'optimizer': {'state': states},
                 'random': random_forms(_name(self._rank), self.saved)}
        self._read(state)
        # Tensors are there; hooks and extra states are not.
        self._model.load_state_dict(state['model'])
        if self._optimizer is not None:
            load_states(self._optimizer, self._names, states, self._groups)
        restore_random(_name(self._rank), self._rank.devices, state['random'])
        return load_extra(self._extra, asked)

    def _read(self, state: dict[str, Any]) -> None:
        with as_errors('loading a checkpoint'):
            state_dict_loader.load(state, storage_reader=self._reader, no_dist=True)


def _check(everywhere: Iterable[tuple[Any, list[str], list[str] | None]], saved: Index) -> None:
    """See that a checkpoint is of this model and this optimizer, whose parts ranks have."""
    models, names, options = zip(*everywhere)
    check_model({name: shape for each in models for name, shape in each.items()}, saved.model)
    if any(each is not None for each in options):
        check_optimizer({name for each in names for name in each},
                        {key for each in options for key in each or ()}, saved.groups)


# --- ranks
# -----------------------------------------------------------------------------------------------


class _Alone:
    """A process with the whole model, in place of a rank of a mesh.

    Args:
        module: The model.
    """

    everyone: None = None
    saving: Saving | None = None

    def __init__(self, module: nn.Module) -> None:
        self.devices = {x.device for x in (*module.parameters(), *module.buffers())}
        self.data, self.pipe, self.tensor = (Axis(name, 1, 0, None, None) for name in AXES)
        self.ties = SimpleNamespace(names={})

    def outline(self) -> int:
        """Return that there is no other rank to compare with."""
        return 0

    def numbers(self) -> tuple[int, int, int]:
        """Return the same of tensors."""
        return 0, 0, 0

    def compare(self, said: Mapping[int, Facts]) -> None:
        """Compare nothing."""

    check_outlines = compare

    def together(self, what: str, function: Callable[[], Facts | None]) -> dict[int, Facts]:
        """Call a function."""
        return {0: function() or Facts()}


def _place(rank: 'Rank | _Alone') -> tuple[int, int]:
    """Return the number of a rank, and of all ranks."""
    everyone = rank.everyone
    return (0, 1) if everyone is None else (everyone.rank(), everyone.size())


def _everywhere(rank: 'Rank | _Alone', value: Any) -> list[Any]:
    """Return what each rank has."""
    return [value] if rank.everyone is None else gathered(value, rank.everyone)


def _settle(rank: 'Rank | _Alone') -> None:
    """Wait for what was saved before."""
    if rank.saving is not None:
        rank.saving.settle()
        rank.saving = None


def _name(rank: 'Rank | _Alone') -> str:
    """Return the sizes of a mesh, and the place of a rank in it."""
    data, pipe, tensor = rank.data, rank.pipe, rank.tensor
    number = (data.rank * pipe.size + pipe.rank) * tensor.size + tensor.rank
    return f'{data.size}x{pipe.size}x{tensor.size}.{number}'
