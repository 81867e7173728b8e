"""The memory of devices over time in a simulated step, by kind.

For one micro-batch, :func:`bytes_over_time` counts on a device::

    F ─────────────────────────▶ B or W     activations; if recomputed, from R on, except results
                                            that checkpointing keeps, until the recomputation
                                            uses them
    F of the stage before ─────▶ B or W     the input, from another device or recomputed there;
                                            a skip waits there, and is here from its F on
          B of the next stage ─▶ B          the gradient of the output
                              B ──▶ B       temporary memory of a backward
    F ─────────────────────────▶ B or W     the output of the last stage, or its gradient
                       the first B ──▶ end  gradients of parameters
    B ───▶ F or B of a later micro-batch    a message that has been sent, if devices hold some

While a stage keeps its activations, its output is one of them. Copies start at once, so an input
waits on the device that receives it.

At the end of a step, ranks of a mesh hold copies of gradients: buckets that replicas reduce, and
gradients of tied parameters. In the second half of a backward, gradients of parameters take the
place of activations: see :class:`~torchgpipe.plan.costs.Halves`.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torchgpipe.plan.costs import Costs
from torchgpipe.schedule.schedule import Timed

#: Pairs of a second and the bytes that a device holds from then on.
Line = tuple[tuple[float, float], ...]

#: When each action runs, by stage, kind and micro-batch.
Times = dict[tuple[int, str, int], Timed]


class Collected(NamedTuple):
    """A collective over replicas, or the update after it, with its time."""

    #: The row of the schedule.
    device: int
    #: The stage whose parameters are involved.
    stage: int
    #: ``'gather'``, ``'free'`` (of gathered parameters), ``'reduction'`` or ``'update'``.
    kind: str
    #: Seconds from the start of the step.
    start: float
    #: Seconds from the start of the step.
    end: float


#: Kinds of memory: in use throughout, saved for backward, inputs of stages, gradients of outputs
#: and of parameters, messages that were sent, temporary, and the output of the model.
MEMORY = (
    'resident',
    'activations',
    'inputs',
    'gradients',
    'parameter gradients',
    'messages',
    'backward',
    'output',
)


class _Hold(NamedTuple):
    """Memory that a device holds from one time to another."""

    device: int
    start: float
    end: float
    bytes: float
    kind: str


def _resident(
    times: Times,
    costs: Costs,
    devices: int,
) -> list[float]:
    resident = [0.0] * devices
    for stage, device in {action[0]: x.device for action, x in times.items()}.items():
        resident[device] += costs.stages[stage].resident_bytes
    return resident


def _gathered(collected: Sequence[Collected], costs: Costs) -> Iterator[_Hold]:
    """Yield the memory of gathered parameters."""
    starts: dict[int, float] = {}
    end_of_step = max((exchange.end for exchange in collected), default=0.0)
    for device, stage, kind, start, end in collected:
        if kind == 'gather':
            starts[stage] = start
            # The parts of all ranks, before they are parameters.
            yield _Hold(device, start, end, costs.stages[stage].gathered_bytes, 'resident')
        elif stage in starts:  # by a free or a reduction
            if kind != 'free' and costs.stages[stage].tied_bytes:
                end = end_of_step  # Tied parameters are exchanged as whole ones.
            yield _Hold(
                device, starts.pop(stage), end, costs.stages[stage].gathered_bytes, 'resident'
            )


def bytes_over_time(
    actions: Iterable[Timed],
    costs: Costs,
    devices: int,
    collected: Sequence[Collected] = (),
) -> tuple[Line, ...]:
    """Return the memory that each device holds over time."""
    times: Times = {x.action: x for x in actions}
    resident = _resident(times, costs, devices)
    changes: list[list[tuple[float, float]]] = [[] for _ in range(devices)]
    for device, start, end, bytes, _ in _all_holds(times, costs, collected):
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


def _is_recomputed(
    times: Times,
    costs: Costs,
    stage: int,
    i: int,
) -> bool:
    return (stage, 'R', i) in times or i < costs.stages[stage].recomputed


def parts_at(
    seconds: Sequence[float],
    actions: Iterable[Timed],
    costs: Costs,
    collected: Sequence[Collected] = (),
) -> tuple[dict[str, float], ...]:
    """Return the bytes of each device at a time, by kind of ``MEMORY``.

    Args:
        seconds: By device, the time.
    """
    times: Times = {x.action: x for x in actions}
    parts: list[dict[str, float]] = [defaultdict(float) for _ in seconds]
    for device, size in enumerate(_resident(times, costs, len(parts))):
        parts[device]['resident'] = size
    for hold in _all_holds(times, costs, collected):
        if hold.start <= seconds[hold.device] < hold.end:
            parts[hold.device][hold.kind] += hold.bytes
    return tuple(map(dict, parts))


class _Span(NamedTuple):
    """The time in which a device works on a stage."""

    device: int
    start: float
    end: float


def _spans(times: Times) -> dict[int, _Span]:
    """Return the span of each stage."""
    spans: dict[int, _Span] = {}
    for (stage, _, _), timed in times.items():
        span = spans.get(stage)
        if span is None:
            span = _Span(timed.device, timed.start, timed.end)
        start = min(span.start, timed.start)
        end = max(span.end, timed.end)
        spans[stage] = _Span(timed.device, start, end)
    return spans


def _all_holds(
    times: Times,
    costs: Costs,
    collected: Sequence[Collected],
) -> Iterator[_Hold]:
    """Yield all memory that is not in use throughout the step."""
    yield from _holds(times, costs)
    yield from _gathered(collected, costs)
    spans = _spans(times)
    #: By device, the end of its last action.
    last: dict[int, float] = defaultdict(float)
    for span in spans.values():
        last[span.device] = max(last[span.device], span.end)
    end = max(last.values())
    for exchange in collected:
        end = max(end, exchange.end)
    #: By device, the time when it has waited for its messages, and exchanges tied gradients.
    ties = {}
    for device, second in last.items():
        ties[device] = (second + end) / 2

    for stage, span in spans.items():
        size = costs.stages[stage].cast_bytes
        yield _Hold(span.device, span.start, span.end, size, 'activations')
        size = costs.stages[stage].tied_bytes
        yield _Hold(span.device, ties[span.device], end, size, 'parameter gradients')
    yield from _parameter_gradients(times, costs, end)
    yield from _reduced(spans, costs, collected)
    if costs.messages:
        yield from _sent(times, costs, ties)


def _parameter_gradients(
    times: Times,
    costs: Costs,
    end: float,
) -> Iterator[_Hold]:
    """Yield the memory of gradients of parameters: see :class:`StageCosts`."""
    first: dict[int, Timed] = {}
    for (stage, kind, _), timed in times.items():
        last_half = 'W' if costs.stages[stage].is_split else 'I'
        if kind not in ('B', last_half):
            continue
        if stage not in first or timed.end < first[stage].end:
            first[stage] = timed

    for stage, timed in first.items():
        size = costs.stages[stage].gradient_bytes
        middle = _middle(costs, timed)
        halves = costs.stages[stage].halves
        if halves is not None and middle < timed.end:
            early = size * (1 - halves.share)
            yield _Hold(timed.device, middle, timed.end, early, 'parameter gradients')
        yield _Hold(timed.device, timed.end, end, size, 'parameter gradients')


def _reduced(
    spans: Mapping[int, _Span],
    costs: Costs,
    collected: Iterable[Collected],
) -> Iterator[_Hold]:
    """Yield the memory of the last buckets: copies of gradients, until their sums replace these.

    Earlier buckets are reduced within the last backward, while it frees activations.
    """
    for device, stage, kind, start, end in collected:
        if kind == 'reduction':
            size = costs.stages[stage].bucket_bytes
            start = max(start, spans[stage].end)
            yield _Hold(device, start, end, size, 'parameter gradients')


def _middle(costs: Costs, timed: Timed) -> float:
    """Return the time from which a backward holds gradients of parameters, not activations."""
    stage, kind, _ = timed.action
    costs_of_stage = costs.stages[stage]
    is_backward = kind == 'B' or (kind == 'I' and not costs_of_stage.is_split)
    if is_backward and costs_of_stage.halves is not None:
        return (timed.start + timed.end) / 2
    return timed.end


def _sent(
    times: Times,
    costs: Costs,
    ends: Mapping[int, float],
) -> Iterator[_Hold]:
    """Yield the memory of messages that a device has sent, while nothing else holds them.

    Args:
        ends: By device, the second until which it waits for all of them.
    """
    #: By sender and receiver, the time of each message, the time until something else holds it,
    #: and its size.
    messages: dict[tuple[int, int], list[tuple[float, float, float]]] = defaultdict(list)
    for (stage, kind, i), timed in times.items():
        if kind == 'F':
            receiver = times.get((stage + 1, 'F', i))
            size = costs.stages[stage].output_bytes
            last = timed
            if not _is_recomputed(times, costs, stage, i):
                last = _last(times, costs, stage, i) or timed
        elif kind in 'BI':
            receiver = _backward(times, stage - 1, i)
            size = costs.stages[stage - 1].output_bytes
            last = timed
        else:
            continue
        if receiver is not None and receiver.device != timed.device:
            edge = timed.device, receiver.device
            messages[edge].append((timed.end, last.end, size))

    for (device, _), sent in messages.items():
        sent.sort()
        for k, (_, free, size) in enumerate(sent):
            later = k + costs.messages
            let_go = ends[device]
            if later < len(sent):
                let_go = sent[later][0]
            if let_go > free:
                yield _Hold(device, free, let_go, size, 'messages')


def _holds(times: Times, costs: Costs) -> Iterator[_Hold]:
    """Yield the memory that is not in use throughout the step."""
    end = max(x.end for x in times.values())
    #: By stage, its inputs: source stage, bytes, and whether the input waits at the source.
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
                last = _last(times, costs, stage, i)
                yield _Hold(
                    timed.device, timed.end, last.end if last else end, each.output_bytes, 'output'
                )
        elif kind in 'BI':
            middle = _middle(costs, timed)
            if each.halves is None or middle == timed.end:
                yield _Hold(timed.device, timed.start, timed.end, each.backward_bytes, 'backward')
            else:
                halves = each.halves
                yield _Hold(timed.device, timed.start, middle, halves.first, 'backward')
                yield _Hold(timed.device, middle, timed.end, halves.second, 'backward')


def _of_forward(
    times: Times,
    costs: Costs,
    edges: Iterable[tuple[int, float, bool]],
    stage: int,
    i: int,
) -> Iterator[_Hold]:
    """Yield the memory that is held from a forward on, and the gradients of its inputs."""
    each = costs.stages[stage]
    forward = times[stage, 'F', i]
    backward = _backward(times, stage, i)
    last = _last(times, costs, stage, i) or forward
    first = forward
    freed = _middle(costs, last)
    repeated = each.activation_bytes
    if _is_recomputed(times, costs, stage, i):
        first = times.get((stage, 'R', i), backward) or forward
        repeated -= each.kept_activation_bytes
        kept = each.kept_bytes - each.kept_activation_bytes
        yield _Hold(forward.device, forward.start, first.start, kept, 'activations')
        kept = each.kept_activation_bytes
        yield _Hold(forward.device, forward.start, freed, kept, 'activations')
    yield _Hold(forward.device, first.start, freed, repeated, 'activations')
    for source, bytes, waits in edges:
        before = times[source, 'F', i]
        gets = _backward(times, source, i)
        recomputed = _is_recomputed(times, costs, source, i)
        if waits and recomputed:
            yield _Hold(before.device, before.end, forward.start, bytes, 'inputs')
        if recomputed or before.device != forward.device:
            start = forward.start if waits else before.end
            yield _Hold(forward.device, start, last.end, bytes, 'inputs')
        if backward is not None and gets is not None:
            yield _Hold(before.device, backward.end, gets.start, bytes, 'gradients')


def _last(
    times: Times,
    costs: Costs,
    stage: int,
    i: int,
) -> Timed | None:
    """Return the action that frees the activations of a micro-batch, if there is a backward."""
    backward = _backward(times, stage, i)
    if costs.stages[stage].is_split:
        return times.get((stage, 'W', i), backward)
    return backward


def _backward(
    times: Times,
    stage: int,
    i: int,
) -> Timed | None:
    return times.get((stage, 'B', i)) or times.get((stage, 'I', i))
