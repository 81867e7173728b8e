"""Search a plan: balance, chunks, checkpoints, schedule and virtual stages, within memory.

For each schedule, :func:`plan_devices` simulates all numbers of chunks, modes of checkpointing and
numbers of stages, with the balance whose stages are equally fast. Then it checks whether these
plans fit into memory, the fastest first. A plan that does not fit gets another balance that does.
The new plan joins the others at the place of its own time. The first plan that fits is the best of
its schedule::

    never, 8 chunks      too much    ▶ 0.9 s with another balance ┐
    except_last, 16      fits        ◀── the best                 │
    never, 4 chunks                                           ◀───┘

:func:`fit` makes the other balance. A stage's memory at its peak depends on the number of its
micro-batches in flight, and so on the schedule. It determines the furthest end of a stage for a
bounded cut. A device may need more or less memory than the sum of its stages, because they have
their peaks at different times. The difference corrects the device's limit for the next cut.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache, partial
from heapq import heapify, heappop, heappush
from itertools import accumulate, count
from math import inf
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from torchgpipe.base.devices import Device, is_cpu, memory_of, parse_device
from torchgpipe.base.errors import duration, format_bytes, table
from torchgpipe.base.html import figure_as_html, rows_as_html, text_as_html
from torchgpipe.base.settings import AXES, Settings, check_axes, checkpoint_stops, name_of
from torchgpipe.base.structure import Value
from torchgpipe.engine.workers import device_key
from torchgpipe.plan.balance import (
    Profile,
    bounded_cuts,
    check_partitions,
    fastest,
    neighbours,
    positive,
)
from torchgpipe.plan.costs import (
    Blocks,
    Costs,
    Halves,
    Link,
    Links,
    MemoryLimit,
    SkipProfile,
    StageCosts,
    measure_links,
    measure_overhead,
    memory_limits,
    peaks,
)
from torchgpipe.plan.memory import MEMORY
from torchgpipe.plan.orders import search_schedule
from torchgpipe.plan.profile import as_a_worker, profile
from torchgpipe.plan.progress import progress
from torchgpipe.plan.selective import select
from torchgpipe.plan.simulation import Limits, Simulation, excess, simulate
from torchgpipe.plan.transformers import ALL_RECOMPUTATIONS
from torchgpipe.schedule import NAMES, Schedule, make
from torchgpipe.schedule.generators import PLAIN_CALL, plain_call, stages_per_device
from torchgpipe.schedule.schedule import action_boxes, in_flight

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@lru_cache(maxsize=16)
def schedule_of(
    name: str, devices: int, m: int, virtual: int, stops: tuple[int, ...] = ()
) -> Schedule:
    """Return a schedule, with recomputations."""
    if name == PLAIN_CALL:
        return plain_call(devices, m, stops)[0]
    schedule = make(name, devices, m, virtual)
    return schedule.recomputing(stops) if any(stops) else schedule


TPlan = TypeVar('TPlan', bound='Plan')

#: The name of a searched schedule.
SEARCHED = 'searched'

#: The use of parameters by replicas: ``data`` of
#: :class:`~torchgpipe.distributed.DistributedGPipe`.
SHARDINGS = ('replicate', 'shard')


@dataclass(frozen=True)
class Plan(Settings):
    """The settings to run a model with, and predictions of time and memory.

    :func:`~torchgpipe.plan.plan` makes it. ``GPipe(module, plan)`` uses its settings, and then
    ``model.step(…, schedule='auto')`` its schedule. ``print(plan)`` shows a table. Predictions are
    for one training step, without the loss and the optimizer.
    """

    #: Samples in a mini-batch.
    batch_size: int
    #: Time of the unwrapped model, on one device.
    sequential_seconds: float
    #: The costs of the stages, for one micro-batch.
    costs: Costs
    #: The best plan for each other schedule, the fastest one first.
    runners_up: tuple['Plan', ...] = ()

    @cached_property
    def simulation(self) -> Simulation:
        """The predicted step, with each action and with memory over time."""
        m = min(self.chunks, self.batch_size)
        n = len({*self.devices})
        if self.schedule == PLAIN_CALL and all(map(is_cpu, self.devices)):
            schedule, pairs = plain_call(n, m, one_thread=True)
            return simulate(schedule, self.costs, pairs)
        if self.order:
            return simulate(Schedule.parse(self.order), self.costs)
        return simulate(
            schedule_of(self.schedule, n, m, len(self.balance) // n, self.costs.stops), self.costs
        )

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return self.simulation.seconds

    @property
    def speed_up(self) -> float:
        """The speed relative to the unwrapped model on one device, if one device could hold it."""
        if self.seconds:
            return self.sequential_seconds / self.seconds
        return 1.0

    @property
    def bubble(self) -> float:
        """The part of the devices' time in which they wait, from 0 to 1."""
        return self.simulation.bubble

    @property
    def bytes(self) -> dict[str, int]:
        """The most bytes on each device at a time."""
        return {
            device: -int(-bytes // 1)
            for device, bytes in zip(dict.fromkeys(self.devices), self.simulation.peak_bytes)
        }

    def __str__(self) -> str:
        rows = [
            [
                each.schedule,
                each.chunks,
                each._checkpointing(),
                len(each.balance),
                f'{each.seconds * 1e3:.3f}',
                f'{each.bubble:.1%}',
                f'{each.speed_up:.2f}',
                format_bytes(max(each.bytes.values())),
            ]
            for each in (self, *self.runners_up)
        ]
        header = [
            'schedule',
            'chunks',
            'checkpoint',
            'partitions',
            'step, ms',
            'bubble',
            'speed-up',
            'most memory',
        ]
        own = table(
            ['partition', 'device', 'layers'],
            [[str(j), *each] for j, each in enumerate(zip(self.devices, self.balance))],
        )
        kept = ''
        if isinstance(self.keep, Mapping) and self.keep:
            kept = f'\n\n{self._kept(self.keep)}'
        return (
            f'{table(header, rows)}\n\n{own}{kept}\n\n{self.batch_size} samples by the first of '
            'these schedules'
        )

    def _checkpointing(self) -> str:
        """Return the modes of checkpointing, each once."""
        modes = [self.checkpoint] if isinstance(self.checkpoint, str) else self.checkpoint
        text = ', '.join(dict.fromkeys(modes))
        return f'{text}, selective' if self.keep else text

    def _kept(self, keep: Mapping[str, tuple[str, ...]]) -> str:
        """Return a table of the operations whose results checkpointing keeps."""
        layers: dict[tuple[str, ...], list[str]] = {}
        for layer, operations in keep.items():
            layers.setdefault(tuple(sorted(operations)), []).append(layer)
        rows = []
        for kept, names in layers.items():
            rows.append([', '.join(names), ', '.join(kept)])
        return table(['layers', 'kept results'], rows)

    def _repr_html_(self) -> str:
        names = [
            f'{device} {busy / (self.seconds or 1.0):.0%}'
            for device, busy in zip(dict.fromkeys(self.devices), self.simulation.busy)
        ]
        boxes = action_boxes(self.simulation.actions, time=duration)
        caption = f'predicted step: {duration(self.seconds)}, bubble {self.bubble:.1%}'
        return text_as_html(str(self)) + rows_as_html(names, boxes, caption)

    def check(self) -> None:
        """Raise a :exc:`ValueError` or a :exc:`TypeError` if the plan is inconsistent."""
        stages = len(self.balance)
        for name, numbers in (
            ('balance', self.balance),
            ('chunks', [self.chunks]),
            ('batch_size', [self.batch_size]),
        ):
            for number in numbers:
                positive(number, name)
        if not stages or not stages == len(self.devices) == len(self.costs.stages):
            raise ValueError(
                f'the balance is {self.balance}, with costs of '
                f'{len(self.costs.stages)} stages on devices {self.devices}'
            )
        checkpoint_stops(self.checkpoint, 1, stages)
        self._check_schedule()

    def _check_schedule(self) -> None:
        """Raise a :exc:`ValueError` if the stages on the devices cannot run in this schedule."""
        names = [*dict.fromkeys(self.devices)]
        found = [names.index(device) for device in self.devices]
        if self.schedule == SEARCHED:
            schedule = Schedule.parse(self.order)
            schedule.validate()
        elif self.order:
            raise ValueError(f'only a {SEARCHED!r} schedule has an order, not {self.schedule!r}')
        else:
            # Places do not depend on the number of micro-batches.
            virtual = len(self.balance) // len(names)
            schedule = schedule_of(self.schedule, len(names), len(names), virtual)
        places = {stage: row for row, stages in enumerate(schedule.stages) for stage in stages}
        if [places.get(stage) for stage in range(1 + max(places))] != found:
            raise ValueError(
                f'the schedule {self.schedule!r} has its stages on other devices '
                f'than {self.devices}'
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in types that JSON supports: dictionaries, lists, strings, numbers."""
        return {'version': 1, **_unlimited(asdict(self), inf, None)}

    @classmethod
    def from_dict(cls: type[TPlan], data: dict[str, Any]) -> TPlan:
        """Return a plan from the result of :meth:`to_dict`, possibly after a trip through JSON.

        Raises:
            ValueError: The dictionary is not a plan.
        """
        try:
            if data['version'] != 1:
                raise ValueError(f'its version is {data["version"]!r}, not 1')
            return _plan(_unlimited(data, None, inf), cls)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f'this is not a plan, as Plan.to_dict() writes it: {type(error).__name__}: {error}'
            ) from None


@dataclass(frozen=True)
class MeshPlan(Plan):
    """The settings of a training on a mesh, and predictions of time and memory.

    :func:`~torchgpipe.plan.plan` makes it, if it gets ``mesh``. ``DistributedGPipe(module, plan,
    mesh=init_mesh(**plan.mesh, axes=plan.axes))`` uses its settings, and ``model.step(…,
    schedule='auto')`` its schedule. ``print(plan)`` shows a table. Predictions are for one step
    with the optimizer.
    """

    #: The samples of a micro-batch.
    micro_batch: int = field(default=1, kw_only=True)
    #: The recomputation in backward, which is ``'none'``, ``'selective'`` (all but products),
    #: ``'full'`` or ``'attention'``.
    recomputation: str = field(default='none', kw_only=True)
    #: The seconds of the step by cause, as means over ranks. See
    #: :func:`~torchgpipe.plan.plan_mesh`.
    parts: dict[str, float] = field(default_factory=dict, kw_only=True, hash=False)
    #: The most bytes of a rank at a time, by place along the pipe axis.
    peaks: tuple[float, ...] = field(default=(), kw_only=True)
    #: By stage, the FLOPs of a rank in a step, with recomputations. Zeros if the layers are
    #: measured.
    flops: tuple[float, ...] = field(default=(), kw_only=True)
    #: The bytes by axis that the ranks of one pipeline exchange in a step. They are messages along
    #: ``'pipe'``, and collectives along the others. A collective has the bytes of its input or its
    #: output, whichever is larger.
    traffic: dict[str, float] = field(default_factory=dict, kw_only=True, hash=False)
    #: How much slower than the best plan it is, and the main cause.
    reason: str = field(default='', kw_only=True)
    #: The best plan of each other mesh, the fastest one first.
    runners_up: tuple['MeshPlan', ...] = ()
    #: Meshes without a plan, and why.
    refused: dict[str, str] = field(default_factory=dict, kw_only=True, hash=False)

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return sum(self.parts.values())

    @property
    def bytes(self) -> dict[str, int]:
        """The most bytes of a rank at a time, by place along the pipe axis."""
        return {
            place: -int(-bytes // 1)
            for place, bytes in zip(dict.fromkeys(self.devices), self.peaks)
        }

    @property
    def name(self) -> str:
        """The mesh in words."""
        return name_of(self.mesh[axis] for axis in AXES)

    def check(self) -> None:
        """Raise a :exc:`ValueError` or a :exc:`TypeError` if the plan is inconsistent."""
        super().check()
        if {*self.mesh} != {*AXES}:
            raise ValueError(f'a mesh has axes {AXES}, but this one is {self.mesh}')
        check_axes(self.axes)
        for axis, size in self.mesh.items():
            positive(size, axis)
        samples = self.chunks * positive(self.micro_batch, 'micro_batch')
        if self.mesh['pipe'] != len({*self.devices}) or self.batch_size != samples:
            raise ValueError(
                f'on {self.mesh} with stages on {self.devices}, there are '
                f'{self.batch_size} samples in {self.chunks} × {self.micro_batch}'
            )
        known = self.data in SHARDINGS and self.recomputation in ALL_RECOMPUTATIONS
        if not known or len(self.peaks) not in (0, self.mesh['pipe']) or not self.seconds > 0:
            raise ValueError(
                f'data is {self.data!r}, recomputation {self.recomputation!r}, with '
                f'peaks {self.peaks}, in {self.seconds} s'
            )

    def _row(self) -> list[str]:
        stages = len(self.balance) // self.mesh['pipe']
        return [
            *(str(self.mesh[axis]) for axis in AXES),
            self.schedule,
            str(stages),
            str(self.micro_batch),
            str(self.chunks),
            self.recomputation,
            self.data,
            f'{self.seconds:.4g}',
            format_bytes(max(self.bytes.values())),
            self.reason,
        ]

    def __str__(self) -> str:
        header = [
            *AXES,
            'schedule',
            'stages',
            'micro-batch',
            'chunks',
            'recomputed',
            'parameters',
            'step, s',
            'memory',
            'slower by',
        ]
        text = table(header, [each._row() for each in (self, *self.runners_up[:9])])
        text += f'\n… and {len(self.runners_up) - 9} other meshes' * (len(self.runners_up) > 9)
        causes = ', '.join(
            f'{cause} {seconds / self.seconds:.0%}'
            for cause, seconds in self.parts.items()
            if seconds >= 0.005 * self.seconds
        )
        text += f'\n\nthe first: {causes}'
        text += ''.join(f'\n{mesh}: {why}' for mesh, why in [*self.refused.items()][:9])
        return text + f'\n… and {len(self.refused) - 9} others' * (len(self.refused) > 9)

    def _repr_html_(self) -> str:
        return text_as_html(str(self)) + figure_as_html(self.draw)

    def draw(self, title: str | None = None) -> 'Figure':
        """Draw the seconds of the best plans by cause, and the memory of its ranks by kind.

        Raises:
            ImportError: There is no matplotlib, which the extra ``pictures`` brings.
        """
        from matplotlib.figure import Figure

        figure = Figure((10, 6), layout='constrained')
        above, below = figure.subplots(2)
        plans = [self, *self.runners_up[:9]][::-1]
        ranks = self.simulation.peak_parts
        lefts = [0.0] * len(plans)
        for cause in self.parts:
            seconds = [each.parts[cause] for each in plans]
            above.barh([each.name for each in plans], seconds, left=lefts, label=cause)
            lefts = [left + more for left, more in zip(lefts, seconds)]
        above.set_xlabel('seconds of a step')
        bottoms = [0.0] * len(ranks)
        for kind in MEMORY:
            sizes = [parts.get(kind, 0.0) / 2**30 for parts in ranks]
            below.bar(range(len(ranks)), sizes, bottom=bottoms, label=kind)
            bottoms = [bottom + more for bottom, more in zip(bottoms, sizes)]
        below.set(xlabel='place along the pipe axis', ylabel='GiB at the peak')
        below.xaxis.get_major_locator().set_params(integer=True)
        for axes in above, below:
            axes.legend(fontsize='small', loc='center left', bbox_to_anchor=(1, 0.5))
        figure.suptitle(title or self.name)
        return figure


def _unlimited(data: Any, old: float | None, new: float | None) -> Any:
    """Replace the value that stands for unlimited bandwidth, because JSON has no infinity."""
    if isinstance(data, dict):
        return {
            key: new if key == 'bandwidth' and value == old else _unlimited(value, old, new)
            for key, value in data.items()
        }
    if isinstance(data, (list, tuple)):
        return [_unlimited(each, old, new) for each in data]
    return data


def _links(row: Sequence[dict[str, Any]]) -> tuple[Link, ...]:
    return tuple(Link(**link) for link in row)


def _stage_costs(data: dict[str, Any]) -> StageCosts:
    halves = data.get('halves')
    if halves is not None:
        halves = Halves(*halves)
    return StageCosts(**{**data, 'halves': halves})


def _plan(data: dict[str, Any], cls: type[TPlan]) -> TPlan:
    data.pop('version', None)
    costs = data['costs']
    links: Any
    if isinstance(costs['links'], dict):
        links = Link(**costs['links'])
    else:
        links = tuple(_links(row) for row in costs['links'])
    data['costs'] = Costs(
        tuple(map(_stage_costs, costs['stages'])),
        tuple(SkipProfile(**skip) for skip in costs['skips']),
        links,
        costs.get('overlap', False),
        costs.get('messages', 0),
    )
    data['layers'] = tuple((str(name), int(size)) for name, size in data['layers'])
    data['runners_up'] = tuple(_plan(each, cls) for each in data['runners_up'])
    for name in ('axes', 'balance', 'devices', 'flops', 'peaks'):
        if name in data:
            data[name] = tuple(data[name])
    if not isinstance(data['checkpoint'], str):
        data['checkpoint'] = tuple(data['checkpoint'])
    keep = data.get('keep', {})
    if not isinstance(keep, str):
        data['keep'] = dict(zip(keep, map(tuple, keep.values())))
    plan = cls(**data)
    plan.check()
    return plan


#: The number of times that a balance is made again.
ROUNDS = 4

#: The number of units into which the time of all layers together is divided.
UNITS = 20000


def fit(
    plan: Plan,
    blocks: Blocks,
    edges: Sequence[int],
    limits: Limits,
    planned: Callable[[list[int]], Plan],
) -> Plan | None:
    """Return a plan that keeps the limits, if one is found, with stages as equal as possible."""
    n = len(limits)
    schedule = schedule_of(plan.schedule, n, blocks.m, len(plan.balance) // n)
    mode = str(plan.checkpoint)
    peak = peaks(schedule, mode, plan.schedule == PLAIN_CALL)
    last = len(peak) - 1
    # Whole numbers are faster, and more precise than any measurement.
    seconds = blocks.seconds(mode)
    unit = (sum(seconds) or 1.0) / UNITS
    costs = [round(cost / unit) for cost in seconds]
    for _ in range(ROUNDS):
        cuts = [0, *accumulate(plan.balance)]
        cases: list[Any] = [None] * len(peak)
        for limit, size, own in zip(limits, plan.bytes.values(), schedule.stages):
            known = sum(blocks.bytes(cuts[j], cuts[j + 1], peak[j]) for j in own)
            share = limit if limit is None else (limit - (size - known)) / len(own)
            for j in own:
                cases[j] = peak[j], share, j == last
        found = {case: blocks.furthest(edges, *case) for case in {*cases}}
        balance = bounded_cuts(costs, edges, [found[case] for case in cases])
        if balance is None:
            return None
        plan = planned(balance)
        if not any(excess([*plan.bytes.values()], limits)):
            return plan
    return None


# Plans have at most as many chunks as the larger of these numbers allows.
#: The number in total.
MOST_CHUNKS = 64
#: The number for each device.
MOST_CHUNKS_PER_DEVICE = 8

#: The number of balances that are tried near the closest ones, if no other keeps the limits.
TRIES = 100


def plan_devices(
    module: nn.Sequential | Profile,
    sample: Value = None,
    *,
    devices: Sequence[Device],
    batch: int | None = None,
    memory_limit: MemoryLimit = None,
    param_scale: float = 2.0,
    schedules: Iterable[str] = (PLAIN_CALL, *NAMES),
    chunks: Iterable[int] | None = None,
    checkpoints: Iterable[str] = ('never', 'except_last', 'always'),
    virtual: int = 2,
    links: Links | None = None,
    overhead: Mapping[str, float] | None = None,
    timeout: float = 1.0,
    batch_dim: Any = 0,
) -> Plan:
    """Find the fastest way to train a model on several devices, within their memory.

    Measurements are made of the layers, one at a time on the first device, of copies between
    devices, and of the overhead of an action. The rest is simulated.

    >>> from torchgpipe import GPipe
    >>> model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    >>> found = plan_devices(model, torch.rand(64, 8), devices=['cpu:0', 'cpu:1'], timeout=0.01)
    >>> model = GPipe(model, found)
    >>> loss = model.step(torch.rand(64, 8), torch.rand(64, 8), nn.MSELoss(), schedule='auto')

    Args:
        module: The model, or its profile by :func:`torchgpipe.balance.profile`.
        sample: A mini-batch, as an input of the model. Leave it out with a profile.
        devices: Each device once. All of them are used. With a profile, this machine need not have
            them.
        batch: Samples in a mini-batch, if other than in the sample.
        memory_limit: Bytes of each device: one number for all of them, or one for each, where
            ``None`` is no limit.
        param_scale: Bytes for a trainable parameter, its gradient and the optimizer's state,
            relative to the parameter: SGD 2–3, Adam 4–5, Adadelta 4, Adagrad 3, RMSprop 3–5.
        schedules: Names of :func:`torchgpipe.schedule.make`, ``'plain call'``, and ``'searched'``,
            which is not tried by default: :func:`~torchgpipe.plan.search_schedule` from the best
            of the others, for some seconds. Batches then have a sample for each micro-batch.
        chunks: Numbers of micro-batches; by default powers of two and multiples of the number of
            devices.
        checkpoints: Modes, as for :class:`~torchgpipe.GPipe`.
        virtual: The most partitions on a device.
        links: The links from device to device, by their indices in ``devices``. By default they
            are measured; with a profile, copies take no time.
        overhead: Seconds that an action takes in addition to its layers, by kind: ``'F'``,
            ``'B'``, ``'I'``, ``'W'``, ``'R'``. By default they are measured; with a profile,
            there is no overhead.
        timeout: Approximate time in seconds for the measurement of layers.
        batch_dim: The batch dimension: see :class:`~torchgpipe.GPipe`.

    Returns:
        The fastest plan, with the best plan of each other schedule. Among plans that are equally
        fast, the plan that takes less memory is preferred.

    Raises:
        TypeError: The module is not sequential, the sample is not made of tensors, or a number is
            not an integer.
        ValueError: An argument is wrong, there are fewer layers than devices, or no plan keeps the
            memory limits. The message then has the missing bytes.
    """
    names = _names(devices)
    schedules = [*schedules]
    measured = not isinstance(module, Profile)
    measure: Callable[..., Profile] = partial(
        profile, sample=sample, device=memory_of(names[0]), timeout=timeout, batch_dim=batch_dim
    )
    costs = plain = (
        module if isinstance(module, Profile) else as_a_worker(names, partial(measure, module))
    )
    if measured and PLAIN_CALL in schedules and len(names) > 1 and all(map(is_cpu, names)):
        plain = _with_backward(costs, measure(module))
    size = costs.batch_size if batch is None else positive(batch, 'batch')
    costs = costs.scaled(size)
    plain = plain.scaled(size)
    check_partitions(costs.layers, len(names))
    if links is None:
        links = measure_links(names) if measured else Link()
    if overhead is None:
        overhead = measure_overhead(names) if measured else {}
    limits = memory_limits(memory_limit, len(names), 'devices')
    search = _Search(costs, plain, names, limits, param_scale, links, overhead)
    search.check_parameters()
    counts = (
        _chunks(len(names), size)
        if chunks is None
        else sorted({min(positive(each, 'chunks'), size) for each in chunks})
    )
    for name in {*schedules} - {PLAIN_CALL, SEARCHED, *NAMES}:
        raise ValueError(
            f'there is no schedule {name!r}; there are {PLAIN_CALL}, {SEARCHED}, '
            f'{", ".join(NAMES)}'
        )
    base = NAMES if SEARCHED in {*schedules} <= {PLAIN_CALL, SEARCHED} else []
    found = []
    generated = [name for name in (*schedules, *base) if name != SEARCHED]
    for name in progress(generated, 'plan: schedules'):
        candidate = search.best(name, counts, [*checkpoints], virtual)
        if candidate is not None:
            found.append(candidate)
    if SEARCHED in schedules:
        found += sorted(search.searched(found), key=attrgetter('seconds'))[:1]
    if not (found := found or [each for each in [search.nearby()] if each]):
        raise search.error()
    best, *others = sorted(
        found, key=lambda each: (_about(each.seconds), max(each.bytes.values()))
    )
    return replace(best, runners_up=tuple(others))


class _Search:
    """A search over a profile, and the profile of the plain call."""

    def __init__(
        self,
        costs: Profile,
        plain: Profile,
        devices: Sequence[str],
        limits: Limits,
        param_scale: float,
        links: Links,
        overhead: Mapping[str, float],
    ) -> None:
        self._profile = costs
        self._plain = plain
        self._devices = devices
        self._limits = limits
        self._param_scale = param_scale
        self._links = links
        self._overhead = overhead
        self._seconds = sum(x.forward_seconds + x.backward_seconds for x in costs.layers)
        self._balances: dict[tuple[int, int, str], list[int]] = {}
        #: By schedule, the plan closest to the limits, and the bytes by which it exceeds one.
        self._closest: dict[str, tuple[float, Plan]] = {}
        self._error = ValueError(
            'there is nothing to choose from: name schedules, chunks and checkpoints'
        )

    def check_parameters(self) -> None:
        """Raise if the limits are too small even for the memory in use all the time."""
        if None in self._limits:
            return
        size = self._profile.blocks(1, self._param_scale).resident[-1]
        room = sum(limit or 0 for limit in self._limits)
        if size > room:
            raise ValueError(
                f"no plan keeps the memory limit: parameters, gradients, the optimizer's state "
                f'and buffers take {format_bytes(size)}, and the limits add up to '
                f'{format_bytes(room)}, which is {format_bytes(size - room)} less. Take larger '
                'devices or more of them, or an optimizer with less state (param_scale)'
            )

    def best(
        self, name: str, chunks: Sequence[int], checkpoints: Sequence[str], virtual: int
    ) -> Plan | None:
        """Return the fastest plan of a schedule that keeps the limits, if there is one."""
        number = count()  # Equally fast plans keep their order.
        heap = [
            (self._bound(each), next(number), each)
            for each in self._each(name, chunks, checkpoints, virtual)
        ]
        heapify(heap)
        while heap:
            bound, _, plan = heappop(heap)
            if not self._fits(plan):
                other = self._fitted(plan)
                if other is not None:
                    heappush(heap, (self._bound(other), next(number), other))
            elif bound == _about(plan.seconds):
                return plan
            else:
                plan = self._selective(plan)
                heappush(heap, (_about(plan.seconds), next(number), plan))
        return None

    def _bound(self, plan: Plan) -> float:
        """Return the time of a plan, if checkpointing could keep all results."""
        has_operations = self._profile.has_operations
        if not has_operations or plan.checkpoint == 'never' or not any(self._limits):
            return _about(plan.seconds)
        stages = tuple(map(partial(replace, recomputation=0.0), plan.costs.stages))
        return _about(replace(plan, costs=replace(plan.costs, stages=stages)).seconds)

    def _selective(self, plan: Plan) -> Plan:
        """Return a plan that fits, with kept results in the rest of the memory if it is faster."""
        n = len(self._devices)
        m = min(plan.chunks, plan.batch_size)
        schedule = schedule_of(plan.schedule, n, m, len(plan.balance) // n)
        room: list[float] = []
        for limit, size in zip(self._limits, plan.bytes.values()):
            room.append(inf if limit is None else float(limit - size))
        for _ in range(ROUNDS):
            selected = select(
                self._profile.layers,
                plan.balance,
                plan.costs,
                str(plan.checkpoint),
                m,
                in_flight(schedule),
                [*map(self._devices.index, plan.devices)],
                room,
            )
            modes: str | tuple[str, ...] = selected.modes
            if len({*modes}) == 1:
                modes = modes[0]
            better = self._plan(plan.schedule, plan.balance, plan.chunks, modes, selected.keep)
            missing = self._missing(better)
            if not any(missing):
                return better if better.seconds < plan.seconds else plan
            # The schedule has its peaks at other times, or a copy waits.
            for device, more in enumerate(missing):
                room[device] -= 1.1 * more
        return plan

    def _each(
        self, name: str, chunks: Sequence[int], checkpoints: Sequence[str], virtual: int
    ) -> Iterator[Plan]:
        """Yield all plans of a schedule whose stages are equally fast."""
        n = len(self._devices)
        _, most = stages_per_device(name)
        least = min(2, most)  # One of several would be another schedule.
        for v in range(least, min(most, virtual) + 1) if n > 1 or least == 1 else ():
            for checkpoint in checkpoints:
                for m in chunks:
                    try:
                        balance = self._even(v * n, m, checkpoint)
                    except ValueError as error:  # too few layers
                        self._error = error
                        continue
                    yield self._plan(name, balance, m, checkpoint)

    def _even(self, stages: int, m: int, checkpoint: str) -> list[int]:
        key = stages, m, checkpoint
        if key not in self._balances:
            self._balances[key] = fastest(
                self._profile, self._profile.blocks(m, self._param_scale), stages, checkpoint
            )
        return self._balances[key]

    def _plan(
        self,
        name: str,
        balance: Sequence[int],
        m: int,
        checkpoint: str | tuple[str, ...],
        keep: Mapping[str, tuple[str, ...]] | None = None,
    ) -> Plan:
        profile = self._plain if name == PLAIN_CALL else self._profile
        n = len(self._devices)
        stages = schedule_of(name, n, m, len(balance) // n).stages
        places = {stage: device for device, own in zip(self._devices, stages) for stage in own}
        profile = profile.counted_once(
            [places[stage] for stage, number in enumerate(balance) for _ in range(number)]
        )
        costs = Costs.of(
            profile,
            balance,
            m,
            checkpoint,
            param_scale=self._param_scale,
            links=self._links,
            overhead=self._overhead,
            keep=keep,
        )
        if name == PLAIN_CALL:
            # The gradient of the whole output exists before backward.
            *others, last = costs.stages
            last = replace(last, resident_bytes=last.resident_bytes + m * last.output_bytes)
            costs = replace(costs, stages=(*others, last))
        return Plan(
            name,
            tuple(balance),
            tuple(places[stage] for stage in range(len(balance))),
            m,
            checkpoint,
            tuple((x.name, x.parameter_bytes) for x in self._profile.layers),
            self._profile.batch_size,
            self._seconds,
            costs,
            keep=keep or {},
        )

    def _fits(self, plan: Plan) -> bool:
        above = max(self._missing(plan))
        if above < self._closest.get(plan.schedule, (inf, plan))[0]:
            self._closest[plan.schedule] = above, plan
        return above == 0

    def _missing(self, plan: Plan) -> list[float]:
        """Return the bytes by which each device exceeds its limit."""
        return excess([*plan.bytes.values()], self._limits)

    def _fitted(self, plan: Plan) -> Plan | None:
        """Return the plan with another balance that fits, if one is found."""

        def planned(balance: list[int]) -> Plan:
            found = self._plan(plan.schedule, balance, plan.chunks, plan.checkpoint)
            self._fits(found)
            return found

        return fit(
            plan,
            self._profile.blocks(plan.chunks, self._param_scale),
            self._profile.edges(),
            self._limits,
            planned,
        )

    def searched(self, found: Iterable[Plan]) -> Iterator[Plan]:
        """Yield plans with a searched order, for the fastest plan or the one closest to limits."""
        plans = (
            *sorted(found, key=attrgetter('seconds')),
            *(plan for _, plan in sorted(self._closest.values(), key=itemgetter(0))),
        )
        for plan in [each for each in plans if each.schedule != PLAIN_CALL][:1]:
            at = [self._devices.index(device) for device in plan.devices]
            m = plan.chunks
            for balance in {plan.balance, (*self._even(len(at), m, 'never'),)}:
                plan = self._plan(plan.schedule, balance, m, 'never')
                with suppress(ValueError):  # None keeps the limits.
                    one = search_schedule(plan.costs, 1 + max(at), m, self._limits, places=at)
                    yield replace(plan, schedule=SEARCHED, order=one.schedule.to_csv())

    def nearby(self) -> Plan | None:
        """Search for a plan that fits near the closest plans, layer by layer."""
        tries = TRIES
        for _, plan in sorted(self._closest.values(), key=lambda each: each[0]):
            better: Plan | None = plan
            while better is not None:
                plan = better
                better = None
                if self._fits(plan):
                    return plan
                least = sum(self._missing(plan))
                for balance in neighbours(plan.balance, self._profile.edges()):
                    tries -= 1
                    if tries < 0:
                        return None
                    other = self._plan(plan.schedule, balance, plan.chunks, plan.checkpoint)
                    if sum(self._missing(other)) < least:
                        better = other
                        break
        return None

    def error(self) -> ValueError:
        """Return the error that no plan fits, with the missing bytes."""
        if not self._closest:
            return self._error
        missing, plan = min(self._closest.values(), key=lambda each: each[0])
        j = max(range(len(self._devices)), key=self._missing(plan).__getitem__)
        device = self._devices[j]
        limit = format_bytes(self._limits[j] or 0)
        return ValueError(
            f'no plan keeps the memory limit. The closest one that was found takes '
            f'{format_bytes(plan.bytes[device])} on {device}, {format_bytes(missing)} more than '
            f'its limit of {limit}: {plan.schedule!r} with {plan.chunks} chunks, checkpoint='
            f'{plan.checkpoint!r}, balance {list(plan.balance)}. Take larger devices or more of '
            'them, a smaller batch, more chunks, or an optimizer with less state (param_scale)'
        )


def _with_backward(costs: Profile, other: Profile) -> Profile:
    """Return a profile with the backward of another one: one thread of the plain call has all."""
    return replace(
        costs,
        layers=tuple(
            replace(x, backward_seconds=y.backward_seconds, backward_overhead=y.backward_overhead)
            for x, y in zip(costs.layers, other.layers)
        ),
    )


def _about(seconds: float) -> float:
    """Round a time, so that rounding errors do not affect comparisons."""
    return float(f'{seconds:.6g}')


def _chunks(devices: int, batch: int) -> list[int]:
    most = min(batch, max(MOST_CHUNKS, MOST_CHUNKS_PER_DEVICE * devices))
    return sorted(
        {m for k in range(most.bit_length()) for m in (2**k, 2**k * devices) if m <= most}
    )


def _names(devices: Sequence[Device]) -> list[str]:
    if isinstance(devices, (str, int, torch.device)):
        raise TypeError(f'devices must be a sequence of devices: [{devices!r}]')
    found = [*map(parse_device, devices)]
    names = [str(device) for device in found]
    if not names or len({*map(device_key, found)}) < len(names):
        raise ValueError(
            f'devices must be one or more, each of them once, but are {names}; how '
            'many partitions each of them gets, the plan says (virtual)'
        )
    return names
