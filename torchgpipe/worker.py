"""Workers: one thread per device, which outlives the forward pass.

A pipeline hands each device a task per clock, and the devices' workers run them at the same time::

    caller   put ─────────▶ in_queue                 out_queue ─────────▶ get
    worker                     └──▶ task.compute() ──────┘

A worker holds a tensor only while it computes: between tasks its frame refers to nothing but its
queues.
"""
import sys
import threading
import weakref
from collections import deque
from contextlib import contextmanager
from itertools import repeat, starmap
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Type, Union

import torch

from torchgpipe.ambient import Ambient
from torchgpipe.microbatch import Batch
from torchgpipe.stream import AbstractStream, get_device, new_stream, use_device, use_stream

__all__ = ['Task', 'Workers', 'device_key', 'spawn_workers']

ExcInfo = Tuple[Type[BaseException], BaseException, TracebackType]

#: ``(True, (task, batch))`` or ``(False, exc_info)``.
Result = Tuple[bool, Any]

InQueue = SimpleQueue[Optional['Task']]
OutQueue = SimpleQueue[Result]


class Task:
    """A piece of work for a worker, with the state of the thread that made it.

    :func:`spawn_workers` has an example.

    Args:
        stream: The stream that is current while the task computes or finalizes.
        compute: What the worker calls.
        finalize: What whoever gets the result calls with it, if anything.
        reply: Where the result goes, if not to the worker's own queue. Two threads may use the
            same workers, so each has to get its own results.
        ambient: The state, if it has been captured already.
    """

    __slots__ = ('_ambient', '_compute', '_finalize', 'reply', 'stream')

    def __init__(self, stream: AbstractStream, *, compute: Callable[[], Batch],
                 finalize: Optional[Callable[[Batch], None]], reply: Optional['OutQueue'] = None,
                 ambient: Optional[Ambient] = None) -> None:
        self.stream = stream
        self.reply = reply
        self._compute = compute
        self._finalize = finalize
        self._ambient = ambient or Ambient.capture()

    def compute(self) -> Batch:
        """Run the work in the maker's state."""
        with use_device(get_device(self.stream)), use_stream(self.stream):
            return self._ambient.run(self._compute)

    def finalize(self, batch: Batch) -> None:
        """Run the second half of the work, in the thread that got the result."""
        if self._finalize is None:
            return
        with use_device(get_device(self.stream)), use_stream(self.stream):
            self._finalize(batch)


def _answer(task: Task, out_queue: OutQueue) -> Tuple[OutQueue, Result]:
    queue = out_queue if task.reply is None else task.reply
    try:
        return queue, (True, (task, task.compute()))
    except BaseException:
        return queue, (False, sys.exc_info())


def _work(in_queue: InQueue, out_queue: OutQueue) -> None:
    # A deque of no length drains the iterators without binding a task or a result to a name: what
    # the thread held on to while it waits for the next task would stay alive.
    answers = map(_answer, iter(in_queue.get, None), repeat(out_queue))
    deque(starmap(SimpleQueue.put, answers), maxlen=0)


def device_key(device: Any) -> Tuple[str, int]:
    """Tell which worker serves a device: ``cpu`` is ``cpu:0``, ``cpu:1`` is another one."""
    return device.type, device.index or 0


class Worker:
    """A thread and its two queues."""

    def __init__(self, key: Tuple[str, int]) -> None:
        self.in_queue: InQueue = SimpleQueue()
        self.out_queue: OutQueue = SimpleQueue()
        # Whatever happens between here and the moment when someone keeps this object: a thread
        # whose worker nobody has ends.
        weakref.finalize(self, self.in_queue.put, None)
        # A daemon, so that the interpreter does not wait for it before it runs exit handlers, of
        # which `Workers` has one that stops it.
        self.thread = threading.Thread(target=_work, args=(self.in_queue, self.out_queue),
                                       name=f'torchgpipe-{key[0]}:{key[1]}', daemon=True)
        self.thread.start()


class Workers:
    """What a pipeline keeps from one forward pass to the next: threads and copy streams.

    Threads start when they are first asked for, and end when this object is collected. A copy,
    also a pickled one, starts with none of its own.
    """

    def __init__(self) -> None:
        self._workers: Dict[Tuple[str, int], Worker] = {}
        self._lock = threading.RLock()
        self._copy_streams: Dict[Tuple[str, int], List[AbstractStream]] = {}
        weakref.finalize(self, _stop, self._workers, self._lock)

    def __reduce__(self) -> Tuple[Type['Workers'], Tuple[()]]:
        return Workers, ()

    def worker(self, device: Any) -> Worker:
        """Give the worker of a device; start it if there is none, as after a fork."""
        key = device_key(device)
        with self._lock:
            worker = self._workers.get(key)
            if worker is None or not worker.thread.is_alive():
                worker = self._workers[key] = Worker(key)
        return worker

    def submit(self, device: Any, task: Task) -> None:
        """Hand a task to the worker of a device, and never to one that has been told to end."""
        with self._lock:
            self.worker(device).in_queue.put(task)

    def copy_streams(self, device: torch.device, m: int) -> List[AbstractStream]:
        """Give ``m`` streams of a device to copy micro-batches on."""
        streams = self._copy_streams.setdefault(device_key(device), [])
        while len(streams) < m:
            streams.append(new_stream(device))
        return streams[:m]

    def stop(self) -> None:
        """Let the tasks in flight end, then the threads; new ones start when needed."""
        _stop(self._workers, self._lock)


def _stop(workers: Dict[Tuple[str, int], Worker], lock: threading.RLock) -> None:
    with lock:
        stopped = list(workers.values())
        # Forgotten first: if an interrupt cuts the waiting short, the next forward starts with new
        # threads, and these end by themselves.
        workers.clear()
        for worker in stopped:
            worker.in_queue.put(None)
    for worker in stopped:
        # The garbage collector may run this in the very thread that it ends.
        if worker.thread is not threading.current_thread():
            worker.thread.join()


@contextmanager
def spawn_workers(devices: Sequence[Union[torch.device, Any]]
                  ) -> Iterator[Tuple[List[InQueue], List[OutQueue]]]:
    """Run workers within the context.

    >>> import torch
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
    workers = Workers()
    try:
        each = [workers.worker(device) for device in devices]
        yield [worker.in_queue for worker in each], [worker.out_queue for worker in each]
    finally:
        workers.stop()
