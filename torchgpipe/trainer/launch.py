"""Start a process for each rank, as torchrun does on one host; and all again when one fails.

::

    this process    store ◀──────────── ranks meet        a new store for each attempt
    rank 0          run ────────────▶ exit 0
    rank 1          run ──▶ killed    all others are killed, and all start again
    all ranks       end with this process
"""

import io
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import click
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]


def launch(
    run: Callable[..., object],
    *args: Any,
    world: int,
    restarts: int = 0,
    final: Collection[int] = (),
) -> None:
    """Run a function in a process for each rank.

    Args:
        run: The function, of a module. It gets the number of the attempt, from 0 on, and then the
            other arguments.
        args: Its further arguments, which can be pickled.
        world: The number of ranks.
        restarts: How often to start all ranks again when one fails.
        final: Exit codes after which another attempt would end the same way.

    Raises:
        SystemExit: A rank failed in the last attempt; with its exit code, or 1 after a signal.
    """
    click.echo(f'starting {world} processes', err=True)
    for attempt in range(restarts + 1):
        code = _attempt(run, attempt, args, world)
        if not code:
            return
        if code in final or attempt == restarts:
            raise SystemExit(max(code, 1))
        click.echo(f'restart {attempt + 1} of {restarts}: all ranks start again', err=True)


def _attempt(run: Callable[..., object], attempt: int, args: tuple[Any, ...], world: int) -> int:
    """Start all ranks, and wait until they end; return 0, or the exit code of a failure."""
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload([run.__module__])  # torch is imported once
    # torchrun has the store in a process of its own as well: no rank takes it with it. Ranks of an
    # attempt never find addresses of ranks that have ended.
    store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
    # Ranks end when this end of their pipe is closed: also by the end of this process, and when
    # the server that forks them has ended, and cannot kill them.
    ends, alive = context.Pipe(duplex=False)
    ranks = []
    for rank in range(world):
        place = _RankPlace(rank, world, store.port, ends)
        arguments = (place, run, attempt, *args)
        ranks.append(context.Process(target=_run, daemon=True, args=arguments))
    try:
        with starting_ranks():
            for process in ranks:
                process.start()
        failed = _first_failure(ranks)
    except (EOFError, ConnectionError):
        click.echo('the process that starts ranks ended', err=True)
        return 1
    finally:
        alive.close()
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
    if failed is None:
        return 0
    code = ranks[failed].exitcode or 0
    how = f'by signal {-code}' if code < 0 else f'with status {code}'
    click.echo(f'rank {failed} ended {how}', err=True)
    return code


@contextmanager
def starting_ranks() -> Iterator[None]:
    """Start the server that forks ranks, and defer Ctrl-C until the context starts all of them.

    Ctrl-C reaches all processes of a terminal. The server ignores it, but only after its imports,
    so it starts with the signal blocked. An ignored signal would be lost here as well. In the
    middle of a start, Ctrl-C would leave a rank that waits for its arguments.

    Raises:
        KeyboardInterrupt: Ctrl-C came. It is raised at the end of the context.
    """
    resource_tracker.ensure_running()  # Else the server would do it, and unblock the signal.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _first_failure(ranks: list[Any]) -> int | None:
    """Wait until a rank fails, and return its number; or until all have ended."""
    while True:
        codes = [process.exitcode for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        running = [process.sentinel for process, code in zip(ranks, codes) if code is None]
        if failed or not running:
            return failed[0] if failed else None
        wait(running)


class _RankPlace(NamedTuple):
    """The place of a process among the ranks of an attempt."""

    rank: int
    world: int
    #: The port of the store.
    port: int
    #: A pipe whose other end is closed when the rank has to end.
    ends: Connection


def _run(place: _RankPlace, run: Callable[..., object], attempt: int, *args: Any) -> None:
    threading.Thread(target=_end_with, args=(place.ends,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it.
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=str(place.world),
        LOCAL_WORLD_SIZE=str(place.world),
        MASTER_ADDR='127.0.0.1',
        MASTER_PORT=str(place.port),
        TORCHELASTIC_USE_AGENT_STORE='True',
    )
    torch.set_num_threads(max(1, len(available_cores()) // place.world))
    accept_any_text()
    try:
        run(attempt, *args)
    except click.ClickException as error:
        click.echo(f'Error: {error.format_message()}', err=True)
        raise SystemExit(error.exit_code) from None


def _end_with(ends: Connection) -> None:
    """End this process when the other end of a pipe is closed."""
    wait([ends])
    os._exit(1)


def available_cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, 'sched_getaffinity'):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def accept_any_text() -> None:
    """Write a question mark for each character that a terminal does not have, such as ``×``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors='replace')
