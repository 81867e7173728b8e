"""Processes that have a worker each, and run given calls concurrently.

They wait for calls, so that their work can be measured in turn with others. Each has one thread,
and a rank in :mod:`torch.distributed`::

    here           'step' ──▶ │ … │ ──▶ what each worker's step returns
    rank 0                    │ F F B F B B
    rank 1                    │   F B F B

No process is left if one fails. They end when this process closes its end of their pipes or kills
them. None waits longer for another one than :data:`PATIENCE`.
"""

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import distributed

from torchgpipe.base.devices import is_cpu
from torchgpipe.trainer.launch import available_cores, starting_ranks

#: Seconds.
PATIENCE = 120

#: How processes start: forked from one that has imported this already, as torch takes seconds.
METHOD, IMPORTED = 'forkserver', ['torch.distributed', 'torchgpipe.shard']


class Interval(NamedTuple):
    """When something began and ended, by a clock that all processes share."""

    begin: float
    end: float

    @classmethod
    def of(cls, call: Callable[[], object]) -> 'Interval':
        """Call something, and see how long it takes."""
        begin = time.perf_counter()
        call()
        return cls(begin, time.perf_counter())


def seconds(spans: Iterable[Interval]) -> float:
    """Return how long something took, from the first process that began to the last that ended."""
    begins, ends = zip(*spans)
    length: float = max(ends) - min(begins)
    return length


def is_available() -> bool:
    """Return whether processes and gloo are available."""
    return (
        METHOD in multiprocessing.get_all_start_methods()
        and distributed.is_available()
        and distributed.is_gloo_available()
    )


class Processes:
    """Processes with a worker each, as a context.

    Args:
        n: The number of processes.
        make: Makes a worker in each process, in which ``torch.distributed`` gives the rank. It can
            be pickled, and so can its arguments and the worker's results.
        args: The arguments of ``make``.
        device: The type of the processes' devices. Each process has the accelerator with its
            rank's number, or is on the CPU.
        cores: The number of the only core that each process runs on, by rank. Processes beyond
            the number of cores share them. By default, a process may run on all cores.
        prepare: A function for each rank that its process calls first.

    Raises:
        click.ClickException: Processes or gloo are not available.
    """

    def __init__(
        self,
        n: int,
        make: Callable[..., Any],
        *args: Any,
        device: str = 'cpu',
        cores: Sequence[int] | None = None,
        prepare: Sequence[Callable[[], object]] | None = None,
    ) -> None:
        if not is_available():
            raise click.ClickException(
                f'this takes torch.distributed with gloo, and processes that start by {METHOD!r}'
            )
        self._n = n
        self._settings = []
        for rank in range(n):
            core = None if cores is None else cores[rank]
            function = None if prepare is None else prepare[rank]
            self._settings.append(_ProcessSettings(device, core, function))
        self._work = make, args
        self._pipes: dict[Connection, int] = {}
        self._exit = ExitStack()

    def __enter__(self) -> 'Processes':
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            store = (Path(folder) / 'store').as_uri()
            context: Any = multiprocessing.get_context(METHOD)
            context.set_forkserver_preload(IMPORTED)
            with starting_ranks():
                for rank in range(self._n):
                    parent, child = context.Pipe()
                    process = context.Process(
                        target=_serve,
                        daemon=True,
                        args=(rank, self._n, store, child, self._settings[rank], *self._work),
                    )
                    process.start()
                    stack.callback(_end, process, parent)
                    # Only the process has this end now, so reading here ends with it.
                    child.close()
                    self._pipes[parent] = rank
            self._answers()
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._exit.close()

    def call(self, name: str, *args: Any) -> list[Any]:
        """Let each worker call a method of this name, and return the results.

        Raises:
            click.ClickException: A worker failed, or did not answer in time.
        """
        for pipe in self._pipes:
            # If a process has ended, its last answer tells more.
            with suppress(BrokenPipeError):
                pipe.send((name, args))
        return self._answers()

    def _answers(self) -> list[Any]:
        """Wait for an answer of each process, the first failure first."""
        answers: dict[int, Any] = {}
        while len(answers) < self._n:
            missing = [pipe for pipe, rank in self._pipes.items() if rank not in answers]
            ready = wait(missing, 2 * PATIENCE)
            if not ready:
                raise click.ClickException(f'no process has answered for {2 * PATIENCE} seconds')
            for pipe in ready:
                answers |= self._answer(pipe)
        return [answers[rank] for rank in range(self._n)]

    def _answer(self, pipe: Any) -> dict[int, Any]:
        try:
            answer = pipe.recv()
        except (EOFError, ConnectionError):
            answer = _WorkerError('it ended')
        if isinstance(answer, _WorkerError):
            raise click.ClickException(f'process {self._pipes[pipe]} of {self._n}: {answer.text}')
        return {self._pipes[pipe]: answer}


class _WorkerError(NamedTuple):
    """Why a process does not go on."""

    text: str


def _end(process: Any, pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.join()


class _ProcessSettings(NamedTuple):
    """Where a process runs."""

    #: The type of its device.
    device: str
    #: The number of its core among the cores of the parent process, if it has only one.
    core: int | None
    #: A function that it calls first.
    prepare: Callable[[], object] | None


def _configure(rank: int, settings: _ProcessSettings) -> str:
    """Move to the core and the device of a rank; return the name of the backend."""
    torch.set_num_threads(1)
    if settings.core is not None and hasattr(os, 'sched_setaffinity'):
        cores = available_cores()
        os.sched_setaffinity(0, {cores[settings.core % len(cores)]})
    if settings.prepare is not None:
        settings.prepare()
    if is_cpu(settings.device):
        return 'gloo'
    os.environ['LOCAL_RANK'] = str(rank)
    torch.accelerator.set_device_index(rank)
    return str(distributed.get_default_backend_for_device(settings.device))


def _serve(
    rank: int,
    n: int,
    store: str,
    pipe: Connection,
    settings: _ProcessSettings,
    make: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Do as told, until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this.
    with suppress(EOFError, BrokenPipeError):
        try:
            backend = _configure(rank, settings)
            distributed.init_process_group(
                backend, store, timedelta(seconds=PATIENCE), world_size=n, rank=rank
            )
            worker = make(*args)
            pipe.send(None)  # It is there.
            while True:
                name, arguments = pipe.recv()
                pipe.send(getattr(worker, name)(*arguments))
        except Exception as error:
            if isinstance(error, (EOFError, BrokenPipeError)):
                raise
            pipe.send(_WorkerError(''.join(traceback.format_exception_only(error)).strip()))
