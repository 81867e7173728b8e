"""Workers: one thread per device, and the order in which they run the actions of a schedule.

A pipeline hands each worker the cells of its device, and the workers run them at the same time::

    caller   submit ──▶ tasks                     result ◀── future
    worker                └──▶ function() ──────────────────────┘

A worker holds a tensor only while it computes: between tasks its frame refers to nothing but its
queue.

An action starts as soon as what it waits for is done. What another worker does is told by a
message, once for each worker that waits for it::

    worker 0    0F0 ──▶ 0F1 ──────────▶ 0B0 ──▶ 0B1
                 │        │               ▲       ▲
    worker 1     └▶ 1F0 ──┼────▶ 1B0 ─────┘       │
                          └────────────▶ 1F1 ──▶ 1B1
"""
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from torchgpipe.base.context import context, new_lock
from torchgpipe.engine.streams import AbstractStream, get_device, new_stream
from torchgpipe.schedule.generators import forward_order
from torchgpipe.schedule.schedule import Action, Grid, by_step, steps, waits_for

__all__ = ['Future', 'Plan', 'Workers', 'device_key', 'interpret']

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


class Plan(NamedTuple):
    """The actions of each worker, and what each waits for.

    Args:
        rows: By worker, its device and its actions.
        waits: What an action waits for among those of other workers.
        tells: Which other workers wait for an action.
        order: The number of each action, in the order of the schedule's steps.
        last: The worker that has the last stage.
        in_order: Whether forwards can run micro-batch by micro-batch.
    """

    rows: dict[Hashable, tuple[torch.device, list[Action]]]
    waits: dict[Action, set[Action]]
    tells: dict[Action, set[Hashable]]
    order: dict[Action, int]
    last: Hashable
    in_order: bool = True

    @staticmethod
    @lru_cache(maxsize=32)
    def of_forward(start: int, stop: int, devices: tuple[torch.device, ...]) -> 'Plan':
        """Make that of the plain call: micro-batches go through one partition after the other.

        Args:
            start: The first micro-batch.
            stop: The one after the last.
            devices: Where each partition is.
        """
        rows = [[Action(j, 'F', i) for i in range(start, stop)] for j in range(len(devices))]
        return _plan(steps(rows)[0], devices, forward_order(len(devices), start, stop))

    @staticmethod
    @lru_cache(maxsize=32)
    def of(rows: tuple[tuple[Action, ...], ...], devices: tuple[torch.device, ...],
           ordered: frozenset[int]) -> 'Plan':
        """Make it of a schedule.

        Args:
            rows: Those of the schedule.
            devices: Where each stage is.
            ordered: The stages whose forwards run one after the other, micro-batch by micro-batch.
                Where the schedule does not admit that, they run in the order of its own steps.
        """
        pairs, grid, in_order = _in_order(rows, ordered)
        return _plan(grid, devices, pairs)._replace(in_order=in_order)


def _plan(grid: Grid, devices: Sequence[torch.device], pairs: Iterable[tuple[Action, Action]]
          ) -> Plan:
    """Make a plan of the steps of a schedule, and of pairs of which one waits for the other."""
    merged: dict[Hashable, tuple[torch.device, list[Action]]] = {}
    owners: dict[Action, Hashable] = {}
    order: dict[Action, int] = {}
    for k, action in enumerate(by_step(grid)):
        order[action], device = k, devices[action.stage]
        owners[action] = key = device_key(device)
        merged.setdefault(key, (device, []))[1].append(action)
    waits = {action: {*waits_for(action, owners.keys())} for action in owners}
    for one, next in pairs:
        waits[next].add(one)
    tells: dict[Action, set[Hashable]] = {action: set() for action in owners}
    for action, before in waits.items():
        before -= {each for each in before if owners[each] == owners[action]}
        for each in before:
            tells[each].add(owners[action])
    return Plan(merged, waits, tells, order, device_key(devices[-1]))


def _in_order(rows: Sequence[Sequence[Action]], ordered: frozenset[int]
              ) -> tuple[list[tuple[Action, Action]], Grid, bool]:
    """Return pairs of forwards of which the second one waits for the first one, and all steps.

    And whether the pairs are those of one micro-batch after the other.

    Both come from one order of all forwards. It does not depend on which stages are ordered, as
    draws of a stage make others beside it suspect for a while.
    """
    forwards = [x for x in by_step(steps(rows)[0]) if x.kind == 'F']
    by_micro_batch = sorted(forwards, key=lambda action: (action.micro_batch, action.stage))
    _, stuck = steps(rows, _pairs(by_micro_batch))
    pairs = _pairs([x for x in (forwards if stuck else by_micro_batch) if x.stage in ordered])
    return pairs, steps(rows, pairs)[0], not stuck


def _pairs(actions: Sequence[Action]) -> list[tuple[Action, Action]]:
    return [*zip(actions, actions[1:])]


class _Shared(NamedTuple):
    """What workers tell each other: actions that are done, and those that failed.

    ``None`` in a queue says that something has failed.
    """

    queues: dict[Hashable, 'SimpleQueue[Action | None]']
    #: With the numbers of actions; that of an interrupt comes before all.
    errors: list[tuple[int, BaseException]]

    def fail(self, number: int, error: BaseException) -> None:
        """Let actions after this one not start."""
        self.errors.append((number if isinstance(error, Exception) else -1, error))
        for queue in self.queues.values():
            queue.put(None)

    def first_failure(self) -> tuple[int, BaseException]:
        """Return the one that comes first in the schedule, whichever was first in time."""
        return min(self.errors, key=lambda pair: pair[0])

    def stops(self, number: int) -> bool:
        """Return whether an action is not to start, since another one has failed."""
        return self.first_failure()[0] < number


def interpret(plan: Plan, run: Callable[[Action], None], workers: Workers,
              run_here: Callable[[Action], None] | None = None) -> None:
    """Run the actions of a plan.

    Args:
        plan: The plan. Where it is for one worker, the calling thread does its work.
        run: Runs an action.
        workers: The threads.
        run_here: What the calling thread runs actions with, if it is to do the work of the worker
            that has the last stage.

    Raises:
        BaseException: What an action raised, the first one in the order of steps, or an interrupt.
            Actions after it were not started since then, and those under way have ended.
    """
    shared = _Shared({key: SimpleQueue() for key in plan.rows}, [])
    if len(plan.rows) == 1:
        for _, row in plan.rows.values():
            for action in row:
                run(action)
        return
    try:
        futures = workers.submit([
            (device, partial(_follow, plan, key, row, run, shared))
            for key, (device, row) in plan.rows.items() if not (run_here and key == plan.last)])
        if run_here is not None:
            _follow(plan, plan.last, plan.rows[plan.last][1], run_here, shared)
        for future in futures:
            future.result()
    except BaseException as error:
        # KeyboardInterrupt, most likely: what is under way has to end before anyone goes on.
        shared.fail(-1, error)
        workers.stop()
        shared.errors.clear()
        raise
    if shared.errors:
        try:
            raise shared.first_failure()[1]
        finally:
            shared.errors.clear()  # or its traceback, this frame and the error would be a cycle


def _follow(plan: Plan, key: Hashable, row: Sequence[Action], run: Callable[[Action], None],
            shared: _Shared) -> None:
    """Go through the actions of one worker."""
    get = shared.queues[key].get
    done: set[Action | None] = set()
    for action in row:
        number = plan.order[action]
        try:
            while not (plan.waits[action] <= done or (shared.errors and shared.stops(number))):
                done.add(get())
            if shared.errors and shared.stops(number):
                return
            run(action)
        except BaseException as error:
            shared.fail(number, error)
            return
        for other in plan.tells[action]:
            shared.queues[other].put(action)
