"""The pipeline of torchgpipe 0.0.7, created for each forward pass: micro-batches and workers."""
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import torch
from torch import nn

from torchgpipe.base.context import ThreadState
from torchgpipe.engine.microbatches import Chunk
from torchgpipe.engine.partition import Engine
from torchgpipe.engine.plain_call import PlainCall
from torchgpipe.engine.streams import AbstractStream, use_stream
from torchgpipe.engine.workers import device_key
from torchgpipe.legacy.microbatch import Batch, check, gather, scatter
from torchgpipe.skip.layout import SkipLayout

__all__ = ['Batch', 'Pipeline', 'Task', 'check', 'clock_cycles', 'gather', 'scatter',
           'spawn_workers']

ExcInfo = tuple[type[BaseException], BaseException, TracebackType]

#: ``(True, (task, batch))`` or ``(False, exc_info)``.
Result = tuple[bool, Any]

InQueue = SimpleQueue['Task | None']
OutQueue = SimpleQueue[Result]


class Pipeline(PlainCall):
    """One pass of micro-batches through partitions (Huang et al., "GPipe", 2019).

    >>> from torchgpipe.microbatch import gather, scatter
    >>> batches = scatter(torch.ones(4, 2), chunks=2)
    >>> partitions = [nn.Sequential(nn.Flatten()), nn.Sequential(nn.ReLU())]
    >>> Pipeline(batches, partitions).run()
    >>> gather(batches).shape
    torch.Size([4, 2])

    Args:
        batches: The micro-batches; :meth:`run` replaces each by its output.
        partitions: One after the other.
        devices: One per partition; all on the CPU by default.
        copy_streams: ``copy_streams[j][i]`` copies micro-batch ``i`` into or out of partition
            ``j``; made if missing.
        skip_layout: The source and target partition of each skip; by default, read from the
            layers.
        checkpoint_stop: The first ``checkpoint_stop`` micro-batches are checkpointed.
    """

    def __init__(self, batches: list[Batch], partitions: Iterable[nn.Sequential],
                 devices: Sequence[torch.device] | None = None,
                 copy_streams: Sequence[Sequence[AbstractStream]] | None = None,
                 skip_layout: SkipLayout | None = None, checkpoint_stop: int = 0) -> None:
        engine = Engine(partitions, devices, skip_layout)
        self._given = batches
        super().__init__(engine, [Chunk(tuple(batch), batch.kind) for batch in batches],
                         [checkpoint_stop] * len(engine.partitions), copy_streams)

    def run(self) -> None:
        """Run all cells, and end the threads; afterwards the batches hold the outputs."""
        self._given.clear()  # So a tensor is freed when the engine does not need it any more.
        try:
            super().run()
        finally:
            self._given += [Batch.of(batch.tensors, batch.kind) for batch in self._batches]
            self._engine.workers.stop()


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """Yield, clock by clock, the cells ``(i, j)`` that run at the same time.

    These are micro-batches and partitions, if all cells take equally long.

    >>> list(clock_cycles(m=3, n=2))
    [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]

    Args:
        m: Number of micro-batches.
        n: Number of partitions.

    Yields:
        ``m + n - 1`` lists, partitions ascending within each (Huang et al., "GPipe", 2019).
    """
    for k in range(m + n - 1):
        yield [(k - j, j) for j in range(n) if 0 <= k - j < m]


class Task:
    """A piece of work for a worker, with the state of the thread that made it.

    :func:`spawn_workers` has an example.

    Args:
        stream: The stream that is current while the task computes or finalizes.
        compute: The function that the worker calls.
        finalize: A function that the receiver of the result calls with it, if any.
    """

    __slots__ = ('_compute', '_finalize', '_state', 'stream')

    def __init__(self, stream: AbstractStream, *, compute: Callable[[], Batch],
                 finalize: Callable[[Batch], None] | None) -> None:
        self.stream = stream
        self._compute = compute
        self._finalize = finalize
        self._state = ThreadState.capture()

    def compute(self) -> Batch:
        """Run the work in the state of the thread that made the task."""
        with use_stream(self.stream):
            return self._state.run(self._compute, self._state.num_threads)

    def finalize(self, batch: Batch) -> None:
        """Run the second half of the work, in the thread that got the result."""
        if self._finalize is None:
            return
        with use_stream(self.stream):
            self._finalize(batch)


def _result_of(task: Task) -> Result:
    try:
        return True, (task, task.compute())
    except BaseException:
        return False, sys.exc_info()


def _work(in_queue: InQueue, out_queue: OutQueue) -> None:
    while (task := in_queue.get()) is not None:
        results = [_result_of(task)]
        # Objects in this frame's variables would stay alive while it waits for the next task.
        del task
        out_queue.put(results.pop())


@contextmanager
def spawn_workers(devices: Sequence[torch.device | Any]
                  ) -> Iterator[tuple[list[InQueue], list[OutQueue]]]:
    """Run workers within the context.

    >>> from torchgpipe.stream import CPUStream
    >>> with spawn_workers([torch.device('cpu')]) as (in_queues, out_queues):
    ...     in_queues[0].put(Task(CPUStream, compute=lambda: Batch(torch.ones(1)), finalize=None))
    ...     ok, (task, batch) = out_queues[0].get()
    >>> ok, batch.tensor
    (True, tensor([1.]))

    Args:
        devices: One per partition; equal ones share a worker. Any object with the attributes
            ``type`` and ``index`` works.

    Yields:
        Lists of queues, one pair per device: tasks go in, ``(True, (task, batch))`` or
        ``(False, exc_info)`` comes out.
    """
    keys = [device_key(device) for device in devices]
    queues: dict[Any, tuple[InQueue, OutQueue]] = {
        key: (SimpleQueue(), SimpleQueue()) for key in keys}
    threads = [threading.Thread(target=_work, args=pair, daemon=True) for pair in queues.values()]
    try:
        for thread in threads:
            thread.start()
        yield [queues[key][0] for key in keys], [queues[key][1] for key in keys]
    finally:
        for in_queue, _ in queues.values():
            in_queue.put(None)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
