"""The interpreter: each worker runs its actions of a schedule, in order.

An action starts as soon as what it waits for is done. What another worker does is told by a
message, once for each worker that waits for it::

    worker 0    0F0 ──▶ 0F1 ──────────▶ 0B0 ──▶ 0B1
                 │        │               ▲       ▲
    worker 1     └▶ 1F0 ──┼────▶ 1B0 ─────┘       │
                          └────────────▶ 1F1 ──▶ 1B1
"""
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import NamedTuple

import torch

from torchgpipe.engine.worker import Workers, device_key
from torchgpipe.schedule.action import Action
from torchgpipe.schedule.plain import forward_order
from torchgpipe.schedule.schedule import Grid, by_step, steps, waits_for

__all__ = ['Plan', 'interpret']


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
