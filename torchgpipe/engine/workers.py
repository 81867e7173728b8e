"""Workers: one thread per device, and the order in which they run the actions of a schedule.

:class:`Workers` submits functions to the threads of devices, which run concurrently::

    caller   submit ──▶ tasks                     result ◀── future
    worker                └──▶ function() ──────────────────────┘

A worker holds a tensor only while it computes. Between tasks its frame refers only to its queue.

A :class:`WorkerPlan` has the actions of each worker, and :func:`interpret` runs them. An action
starts as soon as its predecessors are done. After an action, its worker sends a message to each
worker that waits for it::

    worker 0    0F0 ──▶ 0F1 ──────────▶ 0B0 ──▶ 0B1
                 │        │               ▲       ▲
    worker 1     └▶ 1F0 ──┼────▶ 1B0 ─────┘       │
                          └────────────▶ 1F1 ──▶ 1B1
"""

import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchgpipe.base.context import context
from torchgpipe.base.devices import DeviceKey
from torchgpipe.base.locks import new_lock
from torchgpipe.base.private import unseen
from torchgpipe.engine.streams import AbstractStream, get_device, new_stream
from torchgpipe.schedule.generators import forward_order
from torchgpipe.schedule.schedule import Action, Grid, by_step, steps, waits_for

T = TypeVar('T')

# Workers: threads and their queues.

#: Whether a function returned, and its value or its error.
Outcome = tuple[bool, Any]


def empty_autograd_queue() -> None:
    """Free the nodes that a failed backward pass left in the calling thread's queue.

    PyTorch frees them when the thread's next pass comes across them, or when the thread ends. A
    node may refer to Python objects. If the interpreter ends before the thread has freed them, the
    process aborts ("terminate called without an active exception"). ``Thread.join`` does not wait
    long enough before Python 3.13.

    Autograd runs the node with the highest sequence number first. Each thread counts for itself,
    so the first node of a new thread runs after all nodes in the queue.
    """
    graphs: SimpleQueue[tuple[Tensor, Tensor]] = SimpleQueue()
    thread = threading.Thread(target=_put_graph, args=(graphs,), daemon=True)
    thread.start()
    output, leaf = graphs.get()
    with unseen():
        torch.autograd.grad(output, leaf)


def _put_graph(graphs: 'SimpleQueue[tuple[Tensor, Tensor]]') -> None:
    """Put the output and the leaf of a small graph."""
    leaf = torch.zeros((), requires_grad=True)
    graphs.put((leaf.view_as(leaf), leaf))


class Future(Generic[T]):
    """The future outcome of a worker's task: the value of a function, or its error."""

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
            del value  # Otherwise its traceback, this frame and the error would be a cycle.


#: A function that takes the outcome, and the function to call.
Task = tuple[Callable[[Outcome], None], Callable[[], Any]]


def device_key(device: Any) -> DeviceKey:
    """Return the key of a device's worker. ``cpu`` is ``cpu:0``; ``cpu:1`` has another worker."""
    return device.type, device.index or 0


class Worker:
    """A thread and its queue."""

    def __init__(self, name: str, owner: int) -> None:
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        # The thread ends when this object is freed, even if an interrupt comes before the caller
        # has stored it.
        weakref.finalize(self, self.tasks.put, None)
        # A daemon, so that the interpreter does not wait for it before it runs exit handlers. The
        # handler of `Workers` stops it.
        self.thread = threading.Thread(
            target=_work,
            args=(self.tasks, owner),
            name=name,
            daemon=True,
        )
        self.thread.start()


def _work(tasks: 'SimpleQueue[Task | None]', owner: int) -> None:
    context.workers = frozenset({owner})
    while True:
        task = tasks.get()
        if task is None:
            return
        put, function = task
        outcome = _outcome_of(function)
        # References in this frame would stay alive while it waits for the next task.
        del task, function
        put(outcome)
        del put, outcome


def _outcome_of(function: Callable[[], Any]) -> Outcome:
    try:
        return True, function()
    except BaseException as error:
        return False, error


class Workers:
    """The threads and copy streams that a pipeline keeps between forward passes.

    Threads start at first use, and end when this object is collected. A copy, or a pickled one,
    starts without threads.
    """

    def __init__(self) -> None:
        self._workers: dict[DeviceKey, Worker] = {}
        self._lock = new_lock()
        self._copy_streams: dict[DeviceKey, list[AbstractStream]] = {}
        self._host_streams: dict[DeviceKey, AbstractStream] = {}
        weakref.finalize(self, _stop, self._workers, self._lock)

    def __reduce__(self) -> tuple[type['Workers'], tuple[()]]:
        return Workers, ()

    def worker(self, device: Any) -> Worker:
        """Return the worker of a device. Start it if it does not run, such as after a fork.

        If several threads share this object, use :meth:`submit`.
        """
        key = device_key(device)
        worker = self._workers.get(key)
        if worker is None or not worker.thread.is_alive():
            worker = Worker('torchgpipe-{}:{}'.format(*key), id(self))
            self._workers[key] = worker
        return worker

    def check_caller(self) -> None:
        """Check that these workers do not wait for the calling thread.

        Raises:
            RuntimeError: They do, so they would wait for themselves.
        """
        if id(self) in context.workers:
            raise RuntimeError(
                'a layer, or a finalizer that ran beside it, called the GPipe that runs it, whose '
                'workers would wait for themselves. Call the layers instead, or put all '
                "partitions on one device, as in devices=['cpu', 'cpu']."
            )

    def submit(self, tasks: Sequence[tuple[Any, Callable[[], T]]]) -> list[Future[T]]:
        """Submit functions to the workers of devices. The functions may wait for each other.

        All are submitted under one lock. Otherwise two workers could get the functions of two
        callers in different orders, which could then wait for each other forever.
        """
        futures = []
        with self._lock:  # So that no worker is ending.
            for device, function in tasks:
                future: Future[T] = Future()
                self.worker(device).tasks.put((future.put, function))
                futures.append(future)
        return futures

    def copy_streams(
        self,
        device: torch.device,
        m: int,
    ) -> list[AbstractStream]:
        """Return ``m`` copy streams of a device, one for each micro-batch."""
        # Concurrent threads make more streams than needed, and get the same ones.
        streams = self._copy_streams.setdefault(device_key(device), [])
        while len(streams) < m:
            streams.append(new_stream(device))
        return streams[:m]

    def index_of(self, stream: AbstractStream) -> int | None:
        """Return the index of a copy stream on its device; ``None`` for any other stream."""
        streams = self._copy_streams.get(device_key(get_device(stream)), [])
        for i, copy_stream in enumerate(streams):
            if copy_stream is stream:
                return i
        return None

    def host_stream(self, device: torch.device) -> AbstractStream:
        """Return the stream of a device that copies tensors to the host and back."""
        with self._lock:
            key = device_key(device)
            if key not in self._host_streams:
                self._host_streams[key] = new_stream(device)
            return self._host_streams[key]

    def stop(self) -> None:
        """End the threads after their submitted tasks. New threads start when needed."""
        _stop(self._workers, self._lock)


def _stop(
    workers: dict[DeviceKey, Worker],
    lock: Any,
) -> None:
    with lock:
        stopped = list(workers.values())
        # Removed first: if an interrupt ends the wait early, the next forward starts new threads,
        # and these end by themselves.
        workers.clear()
        for worker in stopped:
            worker.tasks.put(None)
    for worker in stopped:
        # The garbage collector may run this in the thread that it ends.
        if worker.thread is not threading.current_thread():
            worker.thread.join()


# Plans: the order of actions on the workers.


@dataclass(eq=False)
class WorkerPlan:
    """The actions of each worker, and their predecessors."""

    #: The worker with the last stage.
    last: Hashable
    #: By worker, its device and its actions.
    rows: dict[Hashable, tuple[torch.device, list[Action]]] = field(default_factory=dict)
    #: By action, the actions of other workers that it waits for.
    waits: dict[Action, set[Action]] = field(default_factory=dict)
    #: By action, the other workers that wait for it.
    tells: dict[Action, set[Hashable]] = field(default_factory=dict)
    #: The number of each action, in the order of the schedule's steps.
    order: dict[Action, int] = field(default_factory=dict)
    #: Whether forwards can run micro-batch by micro-batch.
    in_order: bool = True

    @staticmethod
    @lru_cache(maxsize=32)
    def of_forward(
        start: int,
        stop: int,
        devices: tuple[torch.device, ...],
    ) -> 'WorkerPlan':
        """Return the plan of the plain call: micro-batches pass through partitions in order.

        Args:
            stop: The micro-batch after the last one.
        """
        rows = []
        for j in range(len(devices)):
            row = [Action(j, 'F', i) for i in range(start, stop)]
            rows.append(row)
        grid, _ = steps(rows)
        return _plan(grid, devices, forward_order(len(devices), start, stop))

    @staticmethod
    @lru_cache(maxsize=32)
    def of(
        rows: tuple[tuple[Action, ...], ...],
        devices: tuple[torch.device, ...],
        ordered: frozenset[int],
    ) -> 'WorkerPlan':
        """Return the plan of a schedule.

        Args:
            ordered: The stages whose forwards run one after the other, micro-batch by micro-batch.
                If the schedule does not allow this order, they run in the order of its own steps.
        """
        pairs, grid, in_order = _in_order(rows, ordered)
        plan = _plan(grid, devices, pairs)
        plan.in_order = in_order
        return plan


def _plan(
    grid: Grid,
    devices: Sequence[torch.device],
    pairs: Iterable[tuple[Action, Action]],
) -> WorkerPlan:
    """Return a plan of a schedule's steps and of pairs whose second action waits for the first."""
    plan = WorkerPlan(device_key(devices[-1]))
    owners: dict[Action, Hashable] = {}
    for number, action in enumerate(by_step(grid)):
        device = devices[action.stage]
        owner = device_key(device)
        owners[action] = owner
        _, row = plan.rows.setdefault(owner, (device, []))
        row.append(action)
        plan.order[action] = number
        plan.waits[action] = set()
        plan.tells[action] = set()

    predecessors = [*pairs]
    for action in owners:
        for predecessor in waits_for(action, owners.keys()):
            predecessors.append((predecessor, action))
    for predecessor, action in predecessors:
        # Actions of one worker run in the order of its row.
        if owners[predecessor] != owners[action]:
            plan.waits[action].add(predecessor)
            plan.tells[predecessor].add(owners[action])
    return plan


def _in_order(
    rows: Sequence[Sequence[Action]], ordered: frozenset[int]
) -> tuple[list[tuple[Action, Action]], Grid, bool]:
    """Return pairs of forwards whose second one waits for the first, and all steps.

    The third result is whether the pairs follow the order of micro-batches.
    """
    forwards = [action for action in by_step(steps(rows)[0]) if action.kind == 'F']
    by_micro_batch = sorted(forwards, key=lambda action: (action.micro_batch, action.stage))
    _, blocked = steps(rows, pairwise(by_micro_batch))
    order = forwards if blocked else by_micro_batch
    # Pairs and steps result from one order of all forwards. It does not depend on the ordered
    # stages, because a draw in one stage may add other stages to them for a while.
    pairs = [*pairwise([action for action in order if action.stage in ordered])]
    return pairs, steps(rows, pairs)[0], not blocked


class _Progress(NamedTuple):
    """The messages of workers: finished actions, and errors.

    ``None`` in a queue means that an action has failed.
    """

    queues: dict[Hashable, 'SimpleQueue[Action | None]']
    #: Errors with the numbers of their actions. An interrupt has number -1, before all actions.
    errors: list[tuple[int, BaseException]]

    def fail(self, number: int, error: BaseException) -> None:
        """Record an error, so that later actions do not start."""
        if not isinstance(error, Exception):
            number = -1
        self.errors.append((number, error))
        for queue in self.queues.values():
            queue.put(None)

    def first_failure(self) -> tuple[int, BaseException]:
        """Return the error that comes first in the schedule, not in time."""
        return min(self.errors, key=lambda pair: pair[0])

    def stops(self, number: int) -> bool:
        """Return whether an action must not start, because an earlier one has failed."""
        return self.first_failure()[0] < number


def interpret(
    plan: WorkerPlan,
    run: Callable[[Action], None],
    workers: Workers,
    run_in_caller: Callable[[Action], None] | None = None,
) -> None:
    """Run the actions of a plan.

    Args:
        plan: The plan. If it has one worker, the calling thread runs all actions.
        run_in_caller: Runs an action in the calling thread, which then does the work of the worker
            with the last stage. By default, that worker runs its actions.

    Raises:
        BaseException: The first error of an action in the order of steps, or an interrupt. Later
            actions were not started since then, and running actions have ended.
    """
    if len(plan.rows) == 1:
        for _, row in plan.rows.values():
            for action in row:
                run(action)
        return
    progress = _Progress({worker: SimpleQueue() for worker in plan.rows}, [])
    tasks = []
    for worker, (device, _) in plan.rows.items():
        if run_in_caller is None or worker != plan.last:
            tasks.append((device, partial(_follow, plan, worker, run, progress)))
    try:
        futures = workers.submit(tasks)
        if run_in_caller is not None:
            _follow(plan, plan.last, run_in_caller, progress)
        for future in futures:
            future.result()
    except BaseException as error:
        # Most likely a KeyboardInterrupt. Running actions have to end before the caller continues.
        progress.fail(-1, error)
        workers.stop()
        progress.errors.clear()
        raise
    if progress.errors:
        try:
            raise progress.first_failure()[1]
        finally:
            # Otherwise its traceback, this frame and the error would be a cycle.
            progress.errors.clear()


def _follow(
    plan: WorkerPlan,
    worker: Hashable,
    run: Callable[[Action], None],
    progress: _Progress,
) -> None:
    """Run the actions of one worker."""
    get = progress.queues[worker].get
    # The messages so far. An error in another worker is one as well, and ends the wait.
    done: set[Action | None] = set()
    _, row = plan.rows[worker]
    for action in row:
        number = plan.order[action]
        try:
            while not plan.waits[action] <= done:
                if progress.errors and progress.stops(number):
                    break
                done.add(get())
            if progress.errors and progress.stops(number):
                return
            run(action)
        except BaseException as error:
            progress.fail(number, error)
            empty_autograd_queue()
            return
        for waiting_worker in plan.tells[action]:
            progress.queues[waiting_worker].put(action)
