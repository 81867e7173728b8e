"""One training step by a schedule: forward and backward, with the loss inside."""

import os
from collections.abc import Collection, Hashable, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from torchgpipe.engine.microbatches import Chunk
from torchgpipe.engine.partition import Engine
from torchgpipe.engine.scheduled import Step
from torchgpipe.losses import Losses
from torchgpipe.schedule import Schedule, ScheduleLike, make
from torchgpipe.schedule.generators import stages_per_device


def find_schedule(
    schedule: ScheduleLike,
    workers: Sequence[Hashable],
    m: int,
) -> Schedule:
    """Return a schedule whose stages are the partitions.

    Raises:
        ValueError: There is no such schedule, or it is for other partitions, devices or
            micro-batches.
    """
    result = read_schedule(schedule)
    if not isinstance(result, Schedule):
        # Several partitions may have one worker.
        devices = len({*workers})
        result = _named(result, len(workers), devices, m)
    _check_fit(result, tuple(workers), m)
    return result


def read_schedule(schedule: ScheduleLike) -> Schedule | str:
    """Return a schedule, read from its file if it has one, or its name."""
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, os.PathLike) or str(schedule).lower().endswith('.csv'):
        # A file may start with a byte order mark.
        return Schedule.parse(Path(schedule).read_text('utf-8-sig'))
    return schedule


@lru_cache(maxsize=32)  # All steps of a training use the same schedule.
def _named(
    name: str,
    n: int,
    devices: int,
    m: int,
) -> Schedule:
    """Make a schedule for ``n`` partitions, with as many of them per device as it needs.

    One worker can do the work of several devices, so there may be fewer devices.
    """
    least, most = stages_per_device(name)
    v = max(least, min(n // devices, most))
    if n % v:
        raise ValueError(
            f'{name!r} takes {v} partitions on each device, but there are {n} '
            f'partitions on {devices} devices'
        )
    return make(name, n // v, m, v)


@lru_cache(maxsize=32)  # A check runs the whole schedule.
def _check_fit(
    schedule: Schedule,
    workers: tuple[Any, ...],
    m: int,
) -> None:
    schedule.validate()
    n = 1 + max(chain.from_iterable(schedule.stages))
    if n != len(workers) or schedule.micro_batches != m:
        raise ValueError(
            f'the schedule is for {n} stages and {schedule.micro_batches} '
            f'micro-batches, but there are {len(workers)} partitions and {m} '
            'micro-batches; make one of these numbers: '
            f"torchgpipe.schedule.make('1f1b', {len(workers)}, {m})"
        )
    kinds = {action.kind for action in chain.from_iterable(schedule.rows)}
    if kinds.isdisjoint('BI'):
        raise ValueError('the schedule has no backward; a step takes F and B of each micro-batch')
    for stages in schedule.stages:
        # One worker can do the work of several devices, but not the other way round.
        if len({workers[stage] for stage in stages}) <= 1:
            continue
        devices = ['{}:{}'.format(*workers[stage]) for stage in stages]
        argument = 'places' if workers[0][0] == 'rank' else 'devices'
        # The message has the argument that makes the schedule fit.
        places = [0] * n
        for device, row in enumerate(schedule.stages):
            for stage in row:
                places[stage] = device
        raise ValueError(
            f'the schedule has stages {list(stages)} on one device, but these partitions are '
            f'on {devices}; put them in this order: {argument}={places}'
        )


@lru_cache(maxsize=32)
def recomputing(
    schedule: Schedule, stops: tuple[range, ...]
) -> tuple[Schedule, tuple[Collection[int], ...]]:
    """Return a schedule with all recomputations, and by stage their micro-batches."""
    result = schedule.recomputing(stops)
    by_stage = map(result.recomputed, range(len(stops)))
    return result, tuple(by_stage)


def run_step(
    engine: Engine,
    batches: list[Chunk],
    losses: Losses,
    schedule: ScheduleLike,
    keeps_output: bool,
    recomputed: Sequence[range],
    **options: Any,
) -> Step:
    """Run a step, and replace the batches by the outputs, if these are kept."""
    workers = [partition.worker for partition in engine.partitions]
    plan = find_schedule(schedule, workers, len(batches))
    early, by_stage = recomputing(plan, tuple(recomputed))
    rows = early.rows
    if engine.one_worker:
        # One worker does not wait for gradients, so it recomputes within the backward.
        rows = plan.rows
    step = Step(
        engine,
        batches,
        rows,
        losses,
        recomputed=by_stage,
        **options,
    )
    step.losses = losses.in_layers
    step.keeps_output = keeps_output
    step.run()
    return step
