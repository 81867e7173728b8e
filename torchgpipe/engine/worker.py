"""Workers: one thread per device, which outlives the forward pass.

A pipeline hands each worker the cells of its device, and the workers run them at the same time::

    caller   submit ──▶ tasks                     result ◀── future
    worker                └──▶ function() ──────────────────────┘

A worker holds a tensor only while it computes: between tasks its frame refers to nothing but its
queue.
"""
import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch

from torchgpipe.base.context import context, new_lock
from torchgpipe.engine.stream import AbstractStream, get_device, new_stream

__all__ = ['Future', 'Workers', 'device_key']

T = TypeVar('T')

#: Whether a function gave a value, and the value or the error.
Outcome = tuple[bool, Any]


class Future(Generic[T]):
    """What a worker will give: the value of a function, or the error that it raised."""

    __slots__ = ('_outcomes', 'put')

    def __init__(self) -> None:
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self.put = self._outcomes.put

    def result(self) -> T:
        """Wait for the value, once; raise the error if there was one."""
        ok, value = self._outcomes.get()
        if ok:
            return value  # type: ignore[no-any-return]
        try:
            raise value
        finally:
            del value  # or its traceback, this frame and the error would be a cycle


#: Where an outcome goes, and what to call.
Task = tuple[Callable[[Outcome], None], Callable[[], Any]]


def device_key(device: Any) -> tuple[str, int]:
    """Tell which worker serves a device: ``cpu`` is ``cpu:0``, ``cpu:1`` is another one."""
    return device.type, device.index or 0


class Worker:
    """A thread and its queue.

    Args:
        name: The thread's name.
        owner: The id of the :class:`Workers` that it is one of.
    """

    def __init__(self, name: str, owner: int) -> None:
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        # Whatever happens between here and the moment when someone keeps this object: a thread
        # whose worker nobody has ends.
        weakref.finalize(self, self.tasks.put, None)
        # A daemon, so that the interpreter does not wait for it before it runs exit handlers, of
        # which `Workers` has one that stops it.
        self.thread = threading.Thread(target=_work, args=(self.tasks, owner), name=name,
                                       daemon=True)
        self.thread.start()


def _work(tasks: 'SimpleQueue[Task | None]', owner: int) -> None:
    context.workers = frozenset({owner})
    while (task := tasks.get()) is not None:
        put, function = task
        outcome = _outcome_of(function)
        # What this frame refers to while it waits for the next task would stay alive.
        del task, function
        put(outcome)
        del put, outcome


def _outcome_of(function: Callable[[], Any]) -> Outcome:
    try:
        return True, function()
    except BaseException as error:
        return False, error


class Workers:
    """What a pipeline keeps from one forward pass to the next: threads and copy streams.

    Threads start when they are first asked for, and end when this object is collected. A copy,
    also a pickled one, starts with none of its own.
    """

    def __init__(self) -> None:
        self._workers: dict[tuple[str, int], Worker] = {}
        self._lock = new_lock()
        self._copy_streams: dict[tuple[str, int], list[AbstractStream]] = {}
        self._host_streams: dict[tuple[str, int], AbstractStream] = {}
        weakref.finalize(self, _stop, self._workers, self._lock)

    def __reduce__(self) -> tuple[type['Workers'], tuple[()]]:
        return Workers, ()

    def worker(self, device: Any) -> Worker:
        """Return the worker of a device; start it if there is none, as after a fork.

        Whoever shares this object with other threads calls :meth:`submit`.
        """
        key = device_key(device)
        worker = self._workers.get(key)
        if worker is None or not worker.thread.is_alive():
            worker = self._workers[key] = Worker(f'torchgpipe-{key[0]}:{key[1]}', id(self))
        return worker

    def check_caller(self) -> None:
        """See that the calling thread is none for which these workers wait.

        Raises:
            RuntimeError: It is one, so they would wait for themselves.
        """
        if id(self) in context.workers:
            raise RuntimeError(
                'a layer, or a finalizer that ran beside it, called the GPipe that runs it, whose '
                'workers would wait for themselves. Call the layers instead, or put all '
                "partitions on one device, as in devices=['cpu', 'cpu'].")

    def submit(self, tasks: Sequence[tuple[Any, Callable[[], T]]]) -> list[Future[T]]:
        """Let the workers of devices call functions, which may wait for each other.

        All are handed over at once: if those of two callers came in another order to one worker
        than to another, each caller's could wait for one that is behind the other's.
        """
        futures: list[Future[T]] = [Future() for _ in tasks]
        with self._lock:  # Never to one that has been told to end.
            for future, (device, function) in zip(futures, tasks):
                self.worker(device).tasks.put((future.put, function))
        return futures

    def copy_streams(self, device: torch.device, m: int) -> list[AbstractStream]:
        """Give ``m`` streams of a device to copy micro-batches on."""
        # Threads that do this at the same time make more streams than needed, and get the same.
        streams = self._copy_streams.setdefault(device_key(device), [])
        while len(streams) < m:
            streams.append(new_stream(device))
        return streams[:m]

    def index_of(self, stream: AbstractStream) -> int | None:
        """Return the number of a copy stream among those of its device, if it is one of these."""
        streams = self._copy_streams.get(device_key(get_device(stream)), [])
        return next((i for i, each in enumerate(streams) if each is stream), None)

    def host_stream(self, device: torch.device) -> AbstractStream:
        """Return the stream of a device on which tensors go to the host, and come back."""
        with self._lock:
            key = device_key(device)
            if key not in self._host_streams:
                self._host_streams[key] = new_stream(device)
            return self._host_streams[key]

    def stop(self) -> None:
        """Let the tasks in flight end, then the threads; new ones start when needed."""
        _stop(self._workers, self._lock)


def _stop(workers: dict[tuple[str, int], Worker], lock: Any) -> None:
    with lock:
        stopped = list(workers.values())
        # Forgotten first: if an interrupt cuts the waiting short, the next forward starts with new
        # threads, and these end by themselves.
        workers.clear()
        for worker in stopped:
            worker.tasks.put(None)
    for worker in stopped:
        # The garbage collector may run this in the very thread that it ends.
        if worker.thread is not threading.current_thread():
            worker.thread.join()
