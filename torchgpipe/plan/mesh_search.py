"""Search a plan for a mesh: data × pipe × tensor, schedule, micro-batch, recomputation, sharding.

::

    meshes of N devices ─▶ candidates ─▶ bounds on time and memory of each
                                              │ those that fit, the lowest bound first
                                              ▼
    a mesh ends when no bound of it  ◀── simulated: its schedule, with messages and collectives
    is below its best time                    │ the best of each mesh
                                              ▼
                           the best of all, and the others with the reason why each is slower

The bound of a rank: its first micro-batch arrives through the stages before, then it works, then
gradients of its last micro-batch go back through these stages. In between, nothing is faster than
its work. So the search returns the fastest candidate, as far as it is simulated.

The steady state of a schedule is periodic. So a candidate with many micro-batches is simulated
with two smaller numbers of them, between which the time of one more is known; the plan that is
returned simulates all.
"""
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from heapq import heapify, heappop
from itertools import accumulate, product
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from torch import nn

from torchgpipe.base.devices import CPU, Device, accelerator
from torchgpipe.base.errors import format_bytes, table
from torchgpipe.base.structure import Value
from torchgpipe.plan.balance import Profile, fastest, positive
from torchgpipe.plan.costs import Costs, LayerProfile, Link, StageCosts
from torchgpipe.plan.machines import MACHINES, Machine
from torchgpipe.plan.profile import profile
from torchgpipe.plan.search import Plan, plan_devices, schedule_of
from torchgpipe.plan.simulation import Simulation, simulate
from torchgpipe.plan.transformers import RECOMPUTATIONS, ParameterBytes, Transformer
from torchgpipe.schedule.generators import NAMES, stages_per_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ['MeshPlan', 'plan', 'plan_mesh']

#: The axes of a mesh, from the outermost to the innermost.
AXES = ('data', 'pipe', 'tensor')

#: Schedules that a search tries by default: no other is faster in less memory.
SCHEDULES = ('1f1b', 'interleaved', 'zb-h1', 'zb-h2', 'zb-v')

#: A bound that exceeds the best time of all meshes by this factor ends the search of a mesh.
HOPELESS = 2.0

#: The least number of micro-batches that are simulated, if there are as many.
FEW = 48


@dataclass(frozen=True)
class MeshPlan(Plan):
    """The settings of a training on a mesh, and predictions of time and memory.

    :func:`plan` makes it, if it gets ``mesh``. ``DistributedGPipe(module, plan,
    mesh=init_mesh(**plan.mesh))`` uses its settings, and ``model.step(…, schedule='auto')`` its
    schedule. ``print(plan)`` shows a table. Predictions are for one step with the optimizer.
    """

    #: The samples of a micro-batch.
    micro_batch: int = field(default=1, kw_only=True)
    #: What backward computes again: ``'none'``, ``'selective'`` (attention) or ``'full'``.
    recomputation: str = field(default='none', kw_only=True)
    #: The seconds of the step by cause, as means over ranks: see :func:`plan_mesh`.
    parts: dict[str, float] = field(default_factory=dict, kw_only=True)
    #: How much slower than the best plan it is, and the main cause.
    reason: str = field(default='', kw_only=True)
    #: The best plan of each other mesh, the fastest one first.
    runners_up: tuple['MeshPlan', ...] = ()
    #: Meshes without a plan, and why.
    refused: dict[str, str] = field(default_factory=dict, kw_only=True)
    #: The most bytes at a time, by place along the pipe axis.
    peaks: tuple[float, ...] = field(default=(), kw_only=True)

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return sum(self.parts.values())

    @property
    def bytes(self) -> dict[str, int]:
        """The most bytes of a rank at a time, by place along the pipe axis."""
        return {place: -int(-bytes // 1) for place, bytes in
                zip(dict.fromkeys(self.devices), self.peaks)}

    @property
    def name(self) -> str:
        """The mesh in words."""
        return _name(self.mesh[axis] for axis in AXES)

    def check(self) -> None:
        """Raise a :exc:`ValueError` if the plan is inconsistent."""
        if not len(self.costs.stages) == len(self.balance) == len(self.devices) or (
                {*self.mesh} != {*AXES}):
            raise ValueError(f'it has {len(self.costs.stages)} stages with costs, and a balance '
                             f'of {len(self.balance)}, on the mesh {self.mesh}')

    def _row(self) -> list[str]:
        most = max(self.bytes.values())
        stages = len(self.balance) // self.mesh['pipe']
        return [*(str(self.mesh[axis]) for axis in AXES), self.schedule, str(stages),
                str(self.micro_batch), str(self.chunks), self.recomputation, self.data,
                f'{self.seconds:.4g}', format_bytes(most), self.reason]

    def __str__(self) -> str:
        header = [*AXES, 'schedule', 'stages', 'micro-batch', 'chunks', 'recomputed', 'parameters',
                  'step, s', 'memory', 'slower by']
        text = table(header, [each._row() for each in (self, *self.runners_up[:9])])
        if len(self.runners_up) > 9:
            text += f'\n… and {len(self.runners_up) - 9} other meshes'
        causes = ', '.join(f'{cause} {seconds / self.seconds:.0%}' for cause, seconds in
                           self.parts.items() if seconds >= .005 * self.seconds)
        text += f'\n\nthe first: {causes}'
        return text + ''.join(f'\n{mesh}: {why}' for mesh, why in [*self.refused.items()][:9])

    def draw(self, title: str | None = None) -> 'Figure':
        """Draw the seconds of the best plans by cause, and the memory of its ranks by kind.

        Raises:
            ImportError: There is no matplotlib, which the extra ``pictures`` brings.
        """
        from matplotlib.figure import Figure
        figure = Figure((10, 6), layout='constrained')
        above, below = figure.subplots(2)
        plans = [self, *self.runners_up[:9]][::-1]
        lefts = [0.0] * len(plans)
        for cause in self.parts:
            seconds = [each.parts[cause] for each in plans]
            above.barh([each.name for each in plans], seconds, left=lefts, label=cause)
            lefts = [left + more for left, more in zip(lefts, seconds)]
        above.set_xlabel('seconds of a step')
        ranks = self.simulation.peak_parts
        bottoms = [0.0] * len(ranks)
        for kind in dict.fromkeys(kind for parts in ranks for kind in parts):
            sizes = [parts.get(kind, 0.0) / 2 ** 30 for parts in ranks]
            below.bar(range(len(ranks)), sizes, bottom=bottoms, label=kind)
            bottoms = [bottom + more for bottom, more in zip(bottoms, sizes)]
        below.set(xlabel='place along the pipe axis', ylabel='GiB at the peak')
        for axes in above, below:
            axes.legend(fontsize='small')
        figure.suptitle(title or self.name)
        return figure


def _name(sizes: Iterable[int]) -> str:
    return ' × '.join(f'{axis} {size}' for axis, size in zip(AXES, sizes))


#: The layers of a model: a formula, or profiles by the number of ranks along the tensor axis.
Layers = Transformer | Profile | Mapping[int, Profile]


def _profile_of(model: Layers, machine: Machine, tensor: int, micro_batch: int,
                recomputation: str, overlap: bool) -> Profile:
    """Return the profile of a rank's layers, for one micro-batch.

    Raises:
        ValueError: These ranks have none.
    """
    if isinstance(model, Transformer):
        return model.profile(machine, tensor, micro_batch, recomputation, overlap)
    profiles = {1: model} if isinstance(model, Profile) else model
    if tensor not in profiles:
        raise ValueError(f'there is no profile for {tensor} ranks of the tensor axis, only for '
                         f'{", ".join(map(str, profiles))}')
    return profiles[tensor].scaled(micro_batch)


class _Case(NamedTuple):
    """A candidate: the settings of a step on a mesh."""

    mesh: tuple[int, int, int]
    schedule: str
    virtual: int
    micro_batch: int
    recomputation: str
    data: str


class _Stages(NamedTuple):
    """The stages of a rank's layers, for one micro-batch."""

    costs: tuple[StageCosts, ...]
    balance: tuple[int, ...]
    #: The number of parameters.
    parameters: tuple[float, ...]
    #: Name and bytes of parameters, by layer.
    layers: tuple[tuple[str, int], ...]


@lru_cache(maxsize=1024)
def _most_in_flight(name: str, devices: int, m: int, virtual: int) -> tuple[int, ...]:
    """Return by device the most activations of stages that it holds at a time."""
    return tuple(max(accumulate((kind == 'F') - (kind in 'BW') for _, kind, _ in row))
                 for row in schedule_of(name, devices, m, virtual).rows)


def _stages_on(name: str, device: int, devices: int, virtual: int) -> Iterable[int]:
    """Return the stages of a device in a schedule."""
    if name == 'zb-v':
        return device, 2 * devices - 1 - device
    return range(device, devices * virtual, devices)


def _few(devices: int, m: int) -> tuple[int, int]:
    """Return two numbers of micro-batches between which a schedule is in its steady state."""
    groups = max(3, -(-FEW // devices))
    return (groups - 1) * devices + m % devices, groups * devices + m % devices


class MeshSearch:
    """A search over meshes, for one model on one machine.

    Args:
        model: The layers.
        machine: The machine.
        batch: The samples of a step.
        state: Bytes of a parameter.
        overlap: Axes whose collectives run concurrently with computation.
        balance: The layers of each stage, if not stages that are equally fast.
    """

    def __init__(self, model: Layers, machine: Machine, batch: int, state: ParameterBytes,
                 overlap: Collection[str], balance: Sequence[int] | None = None) -> None:
        self._model, self._machine, self._batch = model, machine, batch
        self._state, self._overlap, self._balance = state, overlap, balance
        self._profile = cache(self._measure)
        self._stages = cache(self._divide)
        self._even = cache(self._equally_fast)

    def _measure(self, linked: bool, tensor: int, micro_batch: int, recomputation: str) -> Profile:
        machine = self._machine if linked else self._machine.without_links()
        return _profile_of(self._model, machine, tensor, micro_batch, recomputation,
                           'tensor' in self._overlap)

    def _divide(self, linked: bool, tensor: int, micro_batch: int, recomputation: str,
                number: int) -> _Stages:
        """Divide the layers into stages."""
        profile = self._profile(True, tensor, micro_batch, recomputation)
        mode = 'always' if recomputation == 'full' else 'never'
        balance = self._balance or self._even(tensor, mode, number)
        size = self._model.size if isinstance(self._model, Transformer) else self._state.parameter
        cuts = [0, *accumulate(balance)]
        parameters = tuple(sum(x.parameter_bytes for x in profile.layers[a:b]) / size
                           for a, b in zip(cuts, cuts[1:]))
        if number == 1 and isinstance(self._model, Transformer) and self._model.tied:
            parameters = (parameters[0] - self._model.vocabulary * self._model.width / tensor,)
        timed = self._profile(linked, tensor, micro_batch, recomputation)
        costs = Costs.of(timed, balance, 1, mode, param_scale=0.0)
        return _Stages((*costs.stages,), (*balance,), parameters, tuple(
            (x.name, x.parameter_bytes) for x in profile.layers))

    def _equally_fast(self, tensor: int, mode: str, number: int) -> Sequence[int]:
        """Return the balance with equally fast stages, of any micro-batch."""
        profile = self._profile(True, tensor, 1, 'none')
        return fastest(profile, profile.blocks(1, 0.0), number, mode)

    def layers(self, tensor: int) -> tuple[LayerProfile, ...]:
        """Return the layers of a rank; raise a :exc:`ValueError` if ranks cannot share them."""
        return self._profile(True, tensor, 1, 'none').layers

    def chunks(self, case: _Case) -> int:
        """Return the number of micro-batches of a replica."""
        return self._batch // case.mesh[0] // case.micro_batch

    def costs(self, case: _Case, linked: bool = True) -> Costs:
        """Return the costs of a case; without links, no message or collective takes time."""
        (data, pipe, tensor), m, state = case.mesh, self.chunks(case), self._state
        machine = self._machine if linked else self._machine.without_links()
        found = self._stages(linked, tensor, case.micro_batch, case.recomputation,
                             pipe * case.virtual)
        kept, shards = state.on_a_rank(case.data, data), case.data == 'shard'
        stages: list[StageCosts] = []
        # The first stage has the input of all micro-batches from the start.
        waiting = (m - 1) * self._profile(True, tensor, case.micro_batch,
                                          case.recomputation).input_bytes
        for each, parameters in zip(found.costs, found.parameters):
            gradients = machine.gather(parameters * state.gradient, data, pipe * tensor)
            gathered = machine.gather(parameters * state.parameter, data, pipe * tensor)
            stages.append(replace(
                each, recomputed=m if case.recomputation == 'full' else 0,
                resident_bytes=each.resident_bytes + waiting * (not stages) + kept * parameters,
                gather=gathered if shards else 0.0,
                reduction=gradients if shards else 2 * gradients,
                update=state.traffic * parameters / (data if shards else 1) / machine.bandwidth))
        return Costs((*stages,), (), machine.links(pipe, tensor), 'data' in self._overlap)

    def bound(self, case: _Case, costs: Costs) -> tuple[float, float]:
        """Return bounds on the seconds and the bytes of a case."""
        (_, pipe, _), m = case.mesh, self.chunks(case)
        most = _most_in_flight(case.schedule, pipe, min(m, _few(pipe, m)[1]), case.virtual)
        seconds = bytes = before = 0.0
        for device in range(pipe):
            own = [costs.stages[j] for j in _stages_on(case.schedule, device, pipe, case.virtual)]
            work = m * sum(x.forward + (x.forward if x.recomputed else 0.0) + x.backward
                           for x in own)
            ends = sum(x.update + (0.0 if costs.overlap else x.gather + x.reduction) for x in own)
            seconds = max(seconds, before + work + ends)
            first = costs.stages[device]
            before += first.forward + (0.0 if case.schedule.startswith('zb') else first.backward)
            held = min(0.0 if x.recomputed else x.activation_bytes for x in own)
            bytes = max(bytes, sum(x.resident_bytes for x in own) + most[device] * held)
        return seconds, bytes

    def simulation(self, case: _Case, costs: Costs, m: int) -> Simulation:
        """Simulate a case with some of its micro-batches."""
        return simulate(schedule_of(case.schedule, case.mesh[1], m, case.virtual, costs.stops),
                        costs)

    def predict(self, case: _Case, costs: Costs) -> tuple[float, Simulation]:
        """Return the seconds of a case, and the simulation of some of its micro-batches."""
        m = self.chunks(case)
        low, high = _few(case.mesh[1], m)
        if m <= high:
            found = self.simulation(case, costs, m)
            return found.seconds, found
        few, found = (self.simulation(case, costs, number) for number in (low, high))
        each = (found.seconds - few.seconds) / (high - low)
        return found.seconds + (m - high) * each, found

    def plan(self, case: _Case, best: 'MeshPlan | None' = None) -> 'MeshPlan':
        """Return the plan of a case, with the reason why it is slower than the best plan."""
        costs, m, (data, pipe, tensor) = self.costs(case), self.chunks(case), case.mesh
        seconds, simulation = self.predict(case, costs)
        parts = self._parts(case, costs, seconds, simulation)
        reason = ''
        if best is not None:
            cause = max(parts, key=lambda each: parts[each] - best.parts[each])
            reason = f'{seconds / best.seconds - 1:.1%}: {cause}'
        found = self._stages(True, tensor, case.micro_batch, case.recomputation,
                             pipe * case.virtual)
        places = {stage: device for device in range(pipe)
                  for stage in _stages_on(case.schedule, device, pipe, case.virtual)}
        return MeshPlan(
            case.schedule, found.balance,
            tuple(f'pipe {places[stage]}' for stage in range(len(found.balance))), m,
            'always' if case.recomputation == 'full' else 'never', found.layers,
            self._batch // data, parts['compute'] * data * pipe * tensor, costs,
            mesh=dict(zip(AXES, case.mesh)), data=case.data, micro_batch=case.micro_batch,
            recomputation=case.recomputation, parts=parts, reason=reason,
            peaks=simulation.peak_bytes)

    def _parts(self, case: _Case, costs: Costs, seconds: float, simulation: Simulation
               ) -> dict[str, float]:
        """Return the seconds by cause, as means over ranks, and the wait as the rest."""
        m, pipe = self.chunks(case), case.mesh[1]
        free = self.costs(case, linked=False)

        def mean(what: Callable[[StageCosts], float], of: Costs) -> float:
            return m * sum(map(what, of.stages)) / pipe

        def work(x: StageCosts) -> float:
            kinds = 'IW' if case.schedule.startswith('zb') else 'B'
            return sum(map(x.seconds, kinds))

        compute = mean(lambda x: x.forward + work(x), free)
        again = mean(lambda x: x.seconds('R') if x.recomputed else 0.0, free)
        tensor = mean(lambda x: x.forward + work(x) + (
            x.seconds('R') if x.recomputed else 0.0), costs) - compute - again
        last = {timed.device: timed.end for timed in simulation.actions}
        ends = dict(last)
        update = gather = 0.0
        for device, _, kind, start, end in simulation.collected:
            update += (end - start) / pipe if kind == 'update' else 0.0
            gather += (end - start) / pipe if kind == 'gather' else 0.0
            ends[device] = max(ends[device], end) if kind == 'reduction' else ends[device]
        data = gather + sum(ends[device] - last[device] for device in last) / pipe
        parts = {'compute': compute, 'recomputation': again, 'tensor': tensor, 'data': data,
                 'update': update}
        rest = seconds - sum(parts.values())
        unlinked = self.predict(case, replace(costs, links=Link()))[0] if pipe > 1 else seconds
        return {**parts, 'messages': seconds - unlinked, 'bubble': rest - (seconds - unlinked)}


def _meshes(devices: int | Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    """Yield the meshes of a number of devices, or the one that is given."""
    if isinstance(devices, Mapping):
        unknown = {*devices} - {*AXES}
        if unknown:
            raise ValueError(f'a mesh has axes of {AXES}, but this one has {sorted(unknown)}')
        sizes = [positive(devices.get(axis, 1), axis) for axis in AXES]
        yield sizes[0], sizes[1], sizes[2]
        return
    number = positive(devices, 'mesh')
    divisors = [k for k in range(1, number + 1) if number % k == 0]
    for data, tensor in product(divisors, divisors):
        if number % (data * tensor) == 0:
            yield data, number // data // tensor, tensor


@overload
def plan(module: nn.Sequential | Profile, sample: Value = None, *, devices: Sequence[Device],
         **options: Any) -> Plan: ...


@overload
def plan(module: nn.Sequential | Layers, sample: Value = None, *, mesh: int | Mapping[str, int],
         **options: Any) -> MeshPlan: ...


def plan(module: Any, sample: Value = None, *, devices: Any = None, mesh: Any = None,
         **options: Any) -> Plan:
    """Find the fastest way to train a model, on the devices of a process or on a mesh.

    >>> from torchgpipe.plan import Transformer
    >>> gpt2_xl = Transformer(48, 1600, 25, 50257, 1024, biases=True)
    >>> print(plan(gpt2_xl, mesh=8, machine='H100', batch=512).name)
    data 8 × pipe 1 × tensor 1

    Args:
        module: The model, or what is known about its layers.
        sample: A mini-batch, as an input of the model. Leave it out if no layers are measured.
        devices: The devices of this process: with the options of :func:`plan_devices`.
        mesh: The number of devices, or the sizes of the axes of a mesh: with the options of
            :func:`plan_mesh`.
        options: The options of either function.

    Returns:
        The plan, for :class:`~torchgpipe.GPipe` or
        :class:`~torchgpipe.distributed.DistributedGPipe`.

    Raises:
        TypeError: There are devices and a mesh, or none of both.
        ValueError: No plan keeps the memory limits, or an argument is wrong.
    """
    if (devices is None) == (mesh is None):
        raise TypeError('a plan is for the devices of this process or for a mesh: give one of '
                        'devices=… and mesh=…')
    if mesh is None:
        return plan_devices(module, sample, devices=devices, **options)
    return plan_mesh(module, sample, mesh=mesh, **options)


def plan_mesh(module: nn.Sequential | Layers, sample: Value = None, *,
              mesh: int | Mapping[str, int], machine: Machine | str, batch: int,
              memory_limit: float | None = None, state: ParameterBytes = ParameterBytes(),
              schedules: Sequence[str] = SCHEDULES, virtual: int | Iterable[int] = 4,
              micro_batches: Sequence[int] = (1, 2, 4, 8, 16, 32),
              recomputations: Sequence[str] = RECOMPUTATIONS,
              shardings: Sequence[str] = ('replicate', 'shard'), overlap: Collection[str] = (),
              balance: Sequence[int] | None = None, timeout: float = 1.0) -> MeshPlan:
    """Find the fastest plan for a mesh: its sizes, a schedule, micro-batches and recomputation.

    Args:
        module: The sizes of a transformer; or a model, whose layers are measured on this machine;
            or its profile, or profiles by the number of ranks along the tensor axis.
        sample: A mini-batch, as an input of the model, if layers are measured.
        mesh: The number of devices, each of which runs a rank, or the sizes of the axes.
        machine: The machine, or a name in ``MACHINES``.
        batch: The samples of a step, of all replicas.
        memory_limit: Bytes of a device, by default all.
        state: Bytes of a parameter, its gradient and the state of the optimizer.
        schedules: Names of :func:`torchgpipe.schedule.make`.
        virtual: The most stages on a rank, or the numbers to try.
        micro_batches: Samples of a micro-batch, to try.
        recomputations: ``'none'``, ``'selective'``: attention whose scores are in memory, by the
            layers themselves; ``'full'``: ``checkpoint='always'``.
        shardings: ``'replicate'`` and ``'shard'``, to try: ``data`` of
            :class:`~torchgpipe.distributed.DistributedGPipe`.
        overlap: Axes whose collectives run concurrently with computation, of ``'data'`` and
            ``'tensor'``. In this library, none do.
        balance: The layers of each stage; by default stages are equally fast.
        timeout: Approximate time in seconds for the measurement of layers.

    Returns:
        The fastest plan, and as ``runners_up`` the best plan of each other mesh. ``parts`` are
        the seconds by cause: ``'compute'``, ``'recomputation'``, collectives along the
        ``'tensor'`` and the ``'data'`` axis, the optimizer's ``'update'``, ``'messages'`` between
        stages, and the ``'bubble'``, in which ranks wait for each other.

    Raises:
        TypeError: A number is not an integer, or the module is not sequential.
        ValueError: An argument is wrong, or no plan keeps the memory limit.
    """
    if isinstance(machine, str):
        if machine not in MACHINES:
            raise ValueError(f'there is no machine {machine!r}; there are {", ".join(MACHINES)}; '
                             '`python -m benchmarks machine` measures this one')
        machine = MACHINES[machine]
    layers = profile(module, sample, timeout=timeout, device=accelerator() or CPU) if isinstance(
        module, nn.Module) else module
    limit = machine.memory if memory_limit is None else memory_limit
    if not (isinstance(layers, Transformer) and not layers.fused):
        # There are no scores in memory.
        recomputations = [each for each in recomputations if each != 'selective'] or ['none']
    _check_names(schedules, recomputations, shardings, overlap)
    search = MeshSearch(layers, machine, positive(batch, 'batch'), state, overlap, balance)
    refused: dict[str, str] = {}
    heap: list[tuple[float, int, _Case, Costs]] = []
    for sizes in _meshes(mesh):
        name = _name(sizes)
        try:
            found = [*_cases(search, sizes, batch, schedules, virtual, micro_batches,
                             recomputations, shardings)]
        except ValueError as error:
            refused[name] = str(error)
            continue
        bounds = [(*search.bound(case, costs), case, costs) for case, costs in found]
        fitting = [(seconds, case, costs) for seconds, bytes, case, costs in bounds
                   if bytes <= limit]
        if not fitting:
            least = min(bytes for _, bytes, _, _ in bounds)
            refused[name] = (f'takes at least {format_bytes(least)} on a rank, of '
                             f'{format_bytes(limit)}')
        heap += [(seconds, len(heap) + k, case, costs)
                 for k, (seconds, case, costs) in enumerate(fitting)]
    best = _best(search, heap, limit, refused)
    if not best:
        raise ValueError('no plan for this mesh:\n' + '\n'.join(
            f'{name}: {why}' for name, why in refused.items()))
    (_, first), *others = sorted((seconds, case) for seconds, case in best.values())
    fastest_plan = search.plan(first)
    return replace(fastest_plan, refused=refused, runners_up=tuple(sorted(
        (search.plan(case, fastest_plan) for _, case in others), key=lambda each: each.seconds)))


def _check_names(schedules: Sequence[str], recomputations: Sequence[str],
                 shardings: Sequence[str], overlap: Collection[str]) -> None:
    """Raise a :exc:`ValueError` if a name is unknown, or there are none."""
    for what, names, known in (
            ('schedules', schedules, (*NAMES,)),
            ('recomputations', recomputations, RECOMPUTATIONS),
            ('shardings', shardings, ('replicate', 'shard')), ('overlap', overlap, AXES[::2])):
        unknown = [name for name in names if name not in known]
        if unknown or not (names or what == 'overlap'):
            raise ValueError(f'{what} are of {known}, but are {[*names]}')


def _cases(search: MeshSearch, sizes: tuple[int, int, int], batch: int, schedules: Sequence[str],
           virtual: int | Iterable[int], micro_batches: Sequence[int],
           recomputations: Sequence[str], shardings: Sequence[str]
           ) -> Iterator[tuple[_Case, Costs]]:
    """Yield the candidates of a mesh with their costs, or raise a :exc:`ValueError`."""
    data, pipe, tensor = sizes
    if batch % data:
        raise ValueError(f'{data} replicas cannot share {batch} samples')
    share = batch // data
    sizes_of_micro_batches = [b for b in micro_batches if share % b == 0]
    if not sizes_of_micro_batches:
        raise ValueError(f'no micro-batch of {micro_batches} divides the {share} samples of a '
                         'replica')
    number = len(search.layers(tensor))
    if pipe > number:
        raise ValueError(f'{number} layers are too few for {pipe} stages')
    stages = [(name, v) for name in schedules for v in _virtual(name, pipe, virtual)
              if pipe * v <= number]
    if not stages:
        raise ValueError(f'none of the schedules {schedules} runs {number} layers on {pipe} ranks')
    for (name, v), b, recomputation, sharding in product(
            stages, sizes_of_micro_batches, recomputations,
            shardings if data > 1 else ['replicate']):
        case = _Case(sizes, name, v, b, recomputation, sharding)
        yield case, search.costs(case)


def _virtual(name: str, pipe: int, virtual: int | Iterable[int]) -> Iterable[int]:
    """Return the numbers of stages on a rank, of which one rank has one."""
    least, most = stages_per_device(name)
    least = min(2, most)  # One of several would be another schedule.
    if pipe == 1:
        return [1] if least == 1 else []
    if isinstance(virtual, int):
        return range(least, 1 + min(most, virtual))
    return [v for v in virtual if least <= v <= most]


def _best(search: MeshSearch, heap: list[tuple[float, int, _Case, Costs]], limit: float,
          refused: dict[str, str]) -> dict[tuple[int, int, int], tuple[float, _Case]]:
    """Simulate candidates, the lowest bound first; return the best of each mesh."""
    best: dict[tuple[int, int, int], tuple[float, _Case]] = {}
    fastest_of_all = inf
    heapify(heap)
    while heap:
        bound, _, case, costs = heappop(heap)
        known = best.get(case.mesh)
        if known and (bound >= known[0] or bound > HOPELESS * fastest_of_all):
            continue
        seconds, simulation = search.predict(case, costs)
        most = max(simulation.peak_bytes)
        if most > limit:
            if not known:
                refused[_name(case.mesh)] = (f'takes {format_bytes(most)} on a rank, of '
                                             f'{format_bytes(limit)}')
        elif not known or seconds < known[0]:
            best[case.mesh] = seconds, case
            fastest_of_all = min(fastest_of_all, seconds)
            refused.pop(_name(case.mesh), None)
    return best
