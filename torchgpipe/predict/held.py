"""What devices hold over time, when it is known when actions run.

For one micro-batch a device holds::

    F ─────────────────────────▶ B or W     activations; where they are given up, from R on
    F of the stage before ─────▶ B or W     what came in, from another device or given up there;
                                            a skip waits there, and is here from its F on
          B of the next stage ─▶ B          the gradient of what went out
                              B ──▶ B       what a backward needs while it runs
    F ───────────────────────────▶ end      what comes out of the last stage

While a stage keeps its activations, what it gave is among them. What goes to the next device waits
there, since copies wait for nobody.
"""
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchgpipe.predict.costs import Costs
from torchgpipe.schedule.action import Timed

__all__ = ['Line', 'bytes_over_time']

#: From which second on a device holds how many bytes.
Line = tuple[tuple[float, float], ...]

#: When each action runs, by stage, kind and micro-batch.
Times = dict[tuple[int, str, int], Timed]


class _Hold(NamedTuple):
    """What a device holds from one time to another."""

    device: int
    start: float
    end: float
    bytes: float


def bytes_over_time(actions: Iterable[Timed], costs: Costs, devices: int) -> tuple[Line, ...]:
    """Add up what each device holds."""
    times: Times = {x.action: x for x in actions}
    resident = [0.0] * devices
    for stage, device in {action[0]: x.device for action, x in times.items()}.items():
        resident[device] += costs.stages[stage].resident_bytes
    changes: list[list[tuple[float, float]]] = [[] for _ in range(devices)]
    for device, start, end, bytes in _holds(times, costs):
        if bytes:
            changes[device] += [(start, bytes), (end, -bytes)]
    lines = []
    for now, changed in zip(resident, changes):
        line = {0.0: now}
        for second, bytes in sorted(changed):
            now += bytes
            line[second] = now  # with all that ends and starts at that time
        lines.append((*line.items(),))
    return tuple(lines)


def _holds(times: Times, costs: Costs) -> Iterator[_Hold]:
    """Yield what is not there all the time."""
    end = max(x.end for x in times.values())
    #: By stage, what comes in: from where, how many bytes, and whether it waits there.
    edges: list[list[tuple[int, float, bool]]] = [[] for _ in costs.stages]
    for stage, each in enumerate(costs.stages[:-1], 1):
        edges[stage].append((stage - 1, each.output_bytes, False))
    for skip in costs.skips:
        edges[skip.target].append((skip.source, skip.bytes, True))
    for (stage, kind, i), timed in times.items():
        each = costs.stages[stage]
        if kind == 'F':
            yield from _of_forward(times, costs, edges[stage], stage, i)
            if stage == len(costs.stages) - 1:
                yield _Hold(timed.device, timed.end, end, each.output_bytes)
        elif kind in 'BI':
            yield _Hold(timed.device, timed.start, timed.end, each.backward_bytes)


def _of_forward(times: Times, costs: Costs, edges: Iterable[tuple[int, float, bool]], stage: int,
                i: int) -> Iterator[_Hold]:
    """Yield what is held from a forward on, and gradients of what came in."""
    each, forward = costs.stages[stage], times[stage, 'F', i]
    backward = _backward(times, stage, i)
    last = times.get((stage, 'W', i), backward) or forward
    first = forward
    if i < each.recomputed:
        first = times.get((stage, 'R', i), backward) or forward
    yield _Hold(forward.device, first.start, last.end, each.activation_bytes)
    for source, bytes, waits in edges:
        before, gets = times[source, 'F', i], _backward(times, source, i)
        recomputed = i < costs.stages[source].recomputed
        if waits and recomputed:
            yield _Hold(before.device, before.end, forward.start, bytes)
        if recomputed or before.device != forward.device:
            start = forward.start if waits else before.end
            yield _Hold(forward.device, start, last.end, bytes)
        if backward is not None and gets is not None:
            yield _Hold(before.device, backward.end, gets.start, bytes)


def _backward(times: Times, stage: int, i: int) -> Timed | None:
    return times.get((stage, 'B', i)) or times.get((stage, 'I', i))
