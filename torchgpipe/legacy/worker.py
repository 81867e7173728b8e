"""The workers of torchgpipe 0.0.7: tasks go into a queue, results come out of another."""
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import torch

from torchgpipe.engine.batch import Batch
from torchgpipe.engine.stream import AbstractStream, use_stream
from torchgpipe.engine.thread_state import ThreadState
from torchgpipe.engine.worker import device_key

__all__ = ['Task', 'spawn_workers']

ExcInfo = tuple[type[BaseException], BaseException, TracebackType]

#: ``(True, (task, batch))`` or ``(False, exc_info)``.
Result = tuple[bool, Any]

InQueue = SimpleQueue['Task | None']
OutQueue = SimpleQueue[Result]


class Task:
    """A piece of work for a worker, with the state of the thread that made it.

    :func:`spawn_workers` has an example.

    Args:
        stream: The stream that is current while the task computes or finalizes.
        compute: What the worker calls.
        finalize: What whoever gets the result calls with it, if anything.
    """

    __slots__ = ('_compute', '_finalize', '_state', 'stream')

    def __init__(self, stream: AbstractStream, *, compute: Callable[[], Batch],
                 finalize: Callable[[Batch], None] | None) -> None:
        self.stream = stream
        self._compute = compute
        self._finalize = finalize
        self._state = ThreadState.capture()

    def compute(self) -> Batch:
        """Run the work in the maker's state."""
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
        # What this frame refers to while it waits for the next task would stay alive.
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
            ``type`` and ``index`` will do.

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
