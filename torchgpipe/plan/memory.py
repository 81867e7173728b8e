"""What devices hold over time, when it is known when actions run.

For one micro-batch a device holds::

    F ─────────────────────────▶ B or W     activations; where they are given up, from R on
    F ─────────────────────────▶ B or W     what came in, from another device or given up there
    F ──▶ F of the stage it is for          what goes out, where activations are given up
          B of that stage ──▶ B             the gradient of what went out
                              B ──▶ B       what a backward needs while it runs
    F ───────────────────────────▶ end      what comes out of the last stage

While a stage keeps its activations, what it gave is among them.
"""
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torchgpipe.plan.costs import Costs
from torchgpipe.schedule import Timed

__all__ = ['Line', 'bytes_over_time']

#: From which second on a device holds how many bytes.
Line = tuple[tuple[float, float], ...]


class _Hold(NamedTuple):
    """What a device holds from one time to another."""

    device: int
    start: float
    end: float
    bytes: float


def bytes_over_time(actions: Iterable[Timed], costs: Costs, devices: int) -> tuple[Line, ...]:
    """Add up what each device holds."""
    memory = _Memory(actions, costs)
    changes: list[list[tuple[float, float]]] = [[] for _ in range(devices)]
    for device, start, end, bytes in memory.holds():
        if bytes:
            changes[device] += [(start, bytes), (end, -bytes)]
    lines = []
    for now, changed in zip(memory.resident(devices), changes):
        line = {0.0: now}
        for second, bytes in sorted(changed):
            now += bytes
            line[second] = now  # with all that ends and starts at that time
        lines.append((*line.items(),))
    return tuple(lines)


class _Memory:
    """Who holds what, and when."""

    def __init__(self, actions: Iterable[Timed], costs: Costs) -> None:
        self._stages = costs.stages
        self._at: dict[tuple[int, str, int], Timed] = {x.action: x for x in actions}
        self._places = {x.action.stage: x.device for x in self._at.values()}
        self._end = max(x.end for x in self._at.values())
        #: By stage, what comes in: from where, and how many bytes.
        self._edges: list[list[tuple[int, float]]] = [[] for _ in costs.stages]
        for stage, each in enumerate(costs.stages[:-1], 1):
            self._edges[stage].append((stage - 1, each.output_bytes))
        for skip in costs.skips:
            self._edges[skip.target].append((skip.source, skip.bytes))

    def resident(self, devices: int) -> Sequence[float]:
        """Give what each device holds all the time."""
        resident = [0.0] * devices
        for stage, device in self._places.items():
            resident[device] += self._stages[stage].resident_bytes
        return resident

    def holds(self) -> Iterator[_Hold]:
        """Yield all the rest."""
        for (stage, kind, i), timed in self._at.items():
            costs, device = self._stages[stage], timed.device
            if kind == 'F':
                yield from self._of_forward(stage, i, timed)
            elif kind in 'BI':
                yield _Hold(device, timed.start, timed.end, costs.backward_bytes)

    def _of_forward(self, stage: int, i: int, forward: Timed) -> Iterator[_Hold]:
        costs, device = self._stages[stage], forward.device
        backward = self._backward(stage, i)
        last = self._at.get((stage, 'W', i), backward) or forward
        first = forward
        if i < costs.recomputed:
            first = self._at.get((stage, 'R', i), backward) or forward
        yield _Hold(device, first.start, last.end, costs.activation_bytes)
        for source, bytes in self._edges[stage]:
            place, recomputed = self._places[source], i < self._stages[source].recomputed
            if recomputed or place != device:
                yield _Hold(device, forward.start, last.end, bytes)
            if recomputed:
                yield _Hold(place, self._at[source, 'F', i].end, forward.start, bytes)
            gets = self._backward(source, i)
            if backward is not None and gets is not None:
                yield _Hold(place, backward.end, gets.start, bytes)
        if stage == len(self._stages) - 1:
            yield _Hold(device, forward.end, self._end, costs.output_bytes)

    def _backward(self, stage: int, i: int) -> Timed | None:
        return self._at.get((stage, 'B', i)) or self._at.get((stage, 'I', i))
