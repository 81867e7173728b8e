"""Steps of torch.distributed.pipelining, in a process for each stage, each with one thread.

The processes wait for their orders, so that their steps can be measured in turn with others::

    here           'Schedule1F1B' ──▶ │ … │ ──▶ begin, end, loss
    process 0                         │ F F B F B B
    process 1                         │   F B F B

Whatever becomes of one of them, none is left: they end when this process closes its end of their
pipes or kills them, and none waits longer for another one than :data:`PATIENCE`.
"""
import multiprocessing
import signal
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import distributed
from torch.nn import functional as F

from benchmarks.harness.memory import peak_of_activations
from benchmarks.models.stacks import STACKS

__all__ = ['Answer', 'Processes', 'is_available']

#: Seconds.
PATIENCE = 120


class Answer(NamedTuple):
    """What a process says of a step.

    Attributes:
        begin: When it began, by a clock that all processes share.
        end: When it ended.
        loss: The loss of the mini-batch; of the last process only.
        peak: The peak of activations in bytes, if that was asked for.
    """

    begin: float
    end: float
    loss: float | None
    peak: int | None


def is_available() -> bool:
    """Tell whether this PyTorch has what it takes."""
    return distributed.is_available() and distributed.is_gloo_available()


class Processes:
    """Processes with a stage each, as a context.

    Args:
        n: How many.
        stack: The name of a stack.
        cells: Cells of the stack, which the processes share equally.
        depth: Layers of a cell.
        chunks: Micro-batches of a mini-batch.
        names: Those of classes in :mod:`torch.distributed.pipelining`.
    """

    def __init__(self, n: int, stack: str, cells: int, depth: int, chunks: int,
                 names: Sequence[str]) -> None:
        self._n = n
        self._work = (stack, cells, depth, chunks, tuple(names))
        self._pipes: dict[Connection, int] = {}
        self._exit = ExitStack()

    def __enter__(self) -> 'Processes':
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            store = (Path(folder) / 'store').as_uri()
            context = multiprocessing.get_context('spawn')
            for rank in range(self._n):
                here, there = context.Pipe()
                process = context.Process(target=_serve, daemon=True, args=(
                    rank, self._n, store, there, *self._work))
                process.start()
                stack.callback(_end, process, here)
                there.close()  # Only its process has it now, so what is read here ends with that.
                self._pipes[here] = rank
            self._answers()
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._exit.close()

    def step(self, name: str, count_memory: bool = False) -> list[Answer]:
        """Let all processes take a step, and wait for them.

        Raises:
            click.ClickException: One of them failed, or none has answered for long.
        """
        for pipe in self._pipes:
            # If a process has ended, there is more to learn from what it said last.
            with suppress(BrokenPipeError):
                pipe.send((name, count_memory))
        return self._answers()

    def _answers(self) -> list[Any]:
        """Wait for an answer of each process, the first failure first."""
        answers: dict[int, Any] = {}
        while len(answers) < self._n:
            missing = [pipe for pipe, rank in self._pipes.items() if rank not in answers]
            for pipe in wait(missing, 2 * PATIENCE) or [None]:
                answers |= self._answer(pipe)
        return [answers[rank] for rank in range(self._n)]

    def _answer(self, pipe: Any) -> dict[int, Any]:
        if pipe is None:
            raise click.ClickException(f'no process has answered for {2 * PATIENCE} seconds')
        try:
            answer = pipe.recv()
        except (EOFError, ConnectionError):
            answer = 'it ended'
        if isinstance(answer, str):
            raise click.ClickException(f'process {self._pipes[pipe]} of {self._n}: {answer}')
        return {self._pipes[pipe]: answer}


def _end(process: Any, pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.join()


def _serve(rank: int, n: int, store: str, pipe: Connection, *work: Any) -> None:
    """Take steps when told so, until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this.
    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError):
        try:
            distributed.init_process_group('gloo', store, timedelta(seconds=PATIENCE),
                                           world_size=n, rank=rank)
            stage = _Stage(rank, n, *work)
            pipe.send(None)  # It is there.
            while True:
                pipe.send(stage.step(*pipe.recv()))
        except Exception as error:
            if isinstance(error, (EOFError, BrokenPipeError)):
                raise
            pipe.send(''.join(traceback.format_exception_only(error)).strip())


class _Stage:
    def __init__(self, rank: int, n: int, stack: str, cells: int, depth: int, chunks: int,
                 names: Sequence[str]) -> None:
        from torch.distributed import pipelining

        self._input, self._target = STACKS[stack].data(chunks)
        own = cells // n
        self._layers = STACKS[stack].build(cells, depth)[own * rank:own * (rank + 1)]
        self._is_first, self._is_last = rank == 0, rank == n - 1
        self._schedules = {name: getattr(pipelining, name)(
            pipelining.PipelineStage(self._layers, rank, n, torch.device('cpu')), chunks,
            loss_fn=F.mse_loss) for name in names}

    def step(self, name: str, count_memory: bool) -> Answer:
        for parameter in self._layers.parameters():
            parameter.grad = None
        losses: list[torch.Tensor] = []
        call = partial(self._schedules[name].step, *[self._input] * self._is_first,
                       target=self._target if self._is_last else None,
                       losses=losses if self._is_last else None, return_outputs=False)
        begin = time.perf_counter()
        peak = peak_of_activations(call) if count_memory else call()
        end = time.perf_counter()
        loss = torch.stack(losses).mean().item() if losses else None
        return Answer(begin, end, loss, peak)
