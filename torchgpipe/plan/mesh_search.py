"""Search a plan for a mesh: data × pipe × tensor, schedule, micro-batch, recomputation, sharding.

::

    meshes of N devices ─▶ candidates of each ─▶ bounds on time and memory
                                                      │ if they fit, the lowest bound first
                                                      ▼
    a mesh ends when no bound of it  ◀── simulated: the schedule, with messages and collectives
    is below its best time                            │ the best of each mesh
                                                      ▼
                           the best of all, and the others with the reason why each is slower

[Note: Bounds of a mesh] A rank works on all micro-batches. Before that, the first one arrives
through the stages before it, while its parameters are gathered. After that, gradients of the last
one go back through these stages, while its own gradients are reduced, the last bucket of them at
least. Exchanges of ranks run concurrently, so that only the longest chain counts::

    rank 0    gather F ……………………………………………… B reduce update
    rank 1      gather F  work of all micro-batches  B reduce update

With a split backward, a rank may end with ``W``, after which nothing goes back. If a schedule
limits the activations of a rank, this limits the rate as well, because each micro-batch is in
flight for the time to the last stage and back. No bound exceeds the simulation, so the search
returns the fastest candidate.

A candidate is simulated with all of its micro-batches: a schedule may take many of them until it
is periodic, and some hold the activations of all.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import accumulate, pairwise, product
from math import ceil, inf, prod
from typing import Any, NamedTuple, overload

from torch import nn

from torchgpipe.base.context import uncollected
from torchgpipe.base.devices import CPU, Device, accelerator
from torchgpipe.base.errors import format_bytes
from torchgpipe.base.settings import AXES, check_axes, name_of
from torchgpipe.base.structure import BUCKET, Value
from torchgpipe.plan.balance import Profile, fastest, positive
from torchgpipe.plan.costs import Costs, Halves, LayerProfile, Link, StageCosts, memory_limits
from torchgpipe.plan.profile import profile
from torchgpipe.plan.progress import progress
from torchgpipe.plan.search import SHARDINGS, MeshPlan, Plan, plan_devices, schedule_of
from torchgpipe.plan.simulation import Simulation, few, simulate
from torchgpipe.plan.transformers import (
    ALL_RECOMPUTATIONS,
    MACHINES,
    RECOMPUTATIONS,
    SCHEDULED_RECOMPUTATIONS,
    Machine,
    ParameterBytes,
    Transformer,
)
from torchgpipe.schedule.generators import NAMES, SPLIT, V_SHAPED, places, stages_per_device
from torchgpipe.schedule.messages import AHEAD
from torchgpipe.schedule.schedule import Schedule

#: Schedules that a search tries by default: no other is faster in less memory.
SCHEDULES = ('1f1b', 'interleaved', *SPLIT)

#: The part of a device's memory that a plan takes by default. The rest is for the context of CUDA,
#: the buffers of NCCL, and gaps between allocations.
USABLE = 0.9

#: A bound that exceeds the best time of all meshes by this factor ends the search of a mesh.
HOPELESS = 1.2

#: The layers of a model: a formula, or profiles by the number of ranks along the tensor axis.
Layers = Transformer | Profile | Mapping[int, Profile]


class _Setting(NamedTuple):
    """The settings on which the costs of layers depend."""

    tensor: int
    micro_batch: int = 1
    recomputation: str = 'none'
    sharding: str = 'replicate'


def _is_scheduled(case: '_Setting | _Case') -> bool:
    """Return whether recomputations are actions of the schedule."""
    return case.recomputation in SCHEDULED_RECOMPUTATIONS


def _without(recomputations: Sequence[str], name: str) -> list[str]:
    """Return the other recomputations, or ``'none'``."""
    names = [*recomputations]
    while name in names:
        names.remove(name)
    return names or ['none']


def _knows_products(model: Layers) -> bool:
    """Return whether there are costs of the operations that a selective recomputation keeps."""
    if isinstance(model, Transformer):
        return True
    profiles = model.values() if isinstance(model, Mapping) else [model]
    for profile_of_ranks in profiles:
        if not profile_of_ranks.has_operations:
            return False
    return True


def _profile_of(
    model: Layers,
    machine: Machine,
    setting: _Setting,
    overlap: bool,
) -> Profile:
    """Return the profile of a rank's layers, for one micro-batch.

    Raises:
        ValueError: These ranks have none.
    """
    if isinstance(model, Transformer):
        return model.profile(machine, *setting, overlap=overlap)
    profiles = {1: model} if isinstance(model, Profile) else model
    if setting.tensor not in profiles:
        raise ValueError(
            f'there is no profile for {setting.tensor} ranks of the tensor axis, only for '
            f'{", ".join(map(str, profiles))}'
        )
    return profiles[setting.tensor].scaled(setting.micro_batch)


class _Case(NamedTuple):
    """A candidate: the settings of a step on a mesh."""

    mesh: tuple[int, int, int]
    schedule: str
    virtual: int
    micro_batch: int
    recomputation: str
    data: str

    @property
    def setting(self) -> _Setting:
        """The settings on which the costs of layers depend."""
        return _Setting(self.mesh[2], self.micro_batch, self.recomputation, self.data)


#: Bounds on the seconds and the bytes of a candidate.
_Bounded = tuple[float, float, _Case]


class _Found(NamedTuple):
    """A simulated candidate: its seconds, and means over ranks of two parts of them."""

    seconds: float
    case: _Case
    #: Collectives over replicas, for which a rank waits.
    data: float
    #: The optimizer.
    update: float
    #: By rank of the pipe axis, the most bytes at a time.
    peaks: tuple[float, ...]


class _Stages(NamedTuple):
    """The stages of a rank's layers, for one micro-batch."""

    #: The costs without parameters that require a gradient.
    costs: Costs
    balance: tuple[int, ...]
    #: By stage, the number of parameters that require a gradient.
    trainable: tuple[float, ...]
    #: By stage, the number of values in the largest of them.
    largest: tuple[float, ...]
    #: By stage, the bytes of the other parameters.
    frozen: tuple[float, ...]


class _RankWork(NamedTuple):
    """The work of a rank for one micro-batch, and the least that it holds."""

    #: The stages of the rank.
    stages: Sequence[int]
    #: Seconds of all actions.
    work: float
    #: The least seconds for which a micro-batch is in flight in its stages, added up.
    flight: float
    #: Seconds of its first stage's forward, and of the backward by which the rank ends; 0 if other
    #: actions may come last.
    forward: float
    last: float
    #: The least bytes that the forward of a stage keeps.
    activations: float
    #: Bytes in use throughout the step, without parameters that require a gradient.
    resident: float


class _Replicated(NamedTuple):
    """The costs of a stage's parameters, which depend on its replicas."""

    #: Bytes in use throughout the step, in addition to frozen parameters.
    resident: float
    #: Bytes of gradients.
    gradients: float
    #: Bytes of the copies of gradients in buckets at the end.
    bucket: float
    #: Bytes of whole parameters while they are gathered.
    gathered: float
    #: Seconds.
    gather: float
    reduction: float
    update: float
    #: The number of buckets of gradients.
    buckets: int


@lru_cache(maxsize=1024)
def _most_in_flight(
    name: str,
    devices: int,
    m: int,
    virtual: int,
    ends: str,
) -> tuple[int, ...]:
    """Return by device the most activations of stages that it holds at a time.

    Args:
        ends: The kinds of actions that free them.
    """
    most = []
    for row in schedule_of(name, devices, m, virtual).rows:
        changes = [(kind == 'F') - (kind in ends) for _, kind, _ in row]
        most.append(max(accumulate(changes)))
    return tuple(most)


def _ends(simulation: Simulation) -> tuple[float, float]:
    """Return the means over devices of the waits for replicas, and of the optimizer."""
    last = {timed.device: timed.end for timed in simulation.actions}
    #: By device and start of an action, the end of the action before.
    before: dict[tuple[int, float], float] = {}
    ends: dict[int, float] = {}
    for device, _, start, end in simulation.actions:
        before[device, start] = ends.get(device, 0.0)
        ends[device] = end
    data = update = 0.0
    for device, _, kind, start, end in simulation.collected:
        if kind == 'update':
            update += end - start
        elif kind == 'reduction':
            data += max(0.0, end - max(start, last[device]))
        elif kind == 'gather':  # An action that starts when it ends has waited for it.
            data += end - max(start, before.get((device, end), end))
    return data / len(last), update / len(last)


def _halves(input_bytes: float, layers: Sequence[LayerProfile]) -> tuple[float, float]:
    """Return the bytes that a backward needs beside activations, and with the first layer alone.

    A layer needs the gradients of its input and output, when later layers have freed theirs.
    """
    most = 0.0
    alive = 0.0
    before = input_bytes
    for layer in layers:
        alive += layer.activation_bytes
        needed = before + layer.output_bytes + layer.backward_bytes
        most = max(most, alive + needed)
        before = layer.output_bytes
    first = layers[0]
    needed_first = input_bytes + first.output_bytes + first.backward_bytes
    return most - alive, first.activation_bytes + needed_first


class MeshSearch:
    """A search over meshes, for one model on one machine.

    Args:
        overlap: Axes whose collectives run concurrently with computation; ``None`` as in this
            library.
        axes: The axes, from the outermost one.
    """

    def __init__(
        self,
        model: Layers,
        machine: Machine,
        batch: int,
        state: ParameterBytes,
        overlap: Collection[str] | None,
        balance: Sequence[int] | None = None,
        axes: Sequence[str] = AXES,
    ) -> None:
        self._model = model
        self._machine = machine
        #: The samples of a step.
        self._batch = batch
        #: The bytes of a parameter.
        self._state = state
        self._overlap = overlap or ()
        self._balance = balance
        self._axes = axes
        #: See :class:`~torchgpipe.plan.Costs`.
        self._overlaps = None if overlap is None else 'data' in overlap
        self._profile = cache(self._measure)
        self._stages = cache(self._divide)
        self._even = cache(self._equally_fast)
        self._parameter_costs = cache(self._replicate)
        self._chains = cache(self._compute)

    def _measure(self, linked: bool, setting: _Setting) -> Profile:
        machine = self._machine if linked else self._machine.without_links()
        return _profile_of(self._model, machine, setting, 'tensor' in self._overlap)

    def _divide(
        self,
        linked: bool,
        setting: _Setting,
        where: tuple[int, ...],
    ) -> _Stages:
        """Divide the layers into stages on the given ranks."""
        mode = 'always' if _is_scheduled(setting) else 'never'
        balance = tuple(self._balance or self._even(setting.tensor, mode, len(where)))
        profile = self._profile(linked, setting).counted_once(
            [rank for rank, number in zip(where, balance) for _ in range(number)],
            in_last=True,
        )
        costs = Costs.of(
            profile,
            balance,
            1,
            mode,
            param_scale=0.0,
            least=self._machine.actions,
            split=self._machine.split,
            keep='products' if setting.recomputation == 'selective' else None,
        )
        trainable = []
        largest = []
        frozen = []
        stages = []
        cuts = [0, *accumulate(balance)]
        for start, end, stage in zip(cuts, cuts[1:], costs.stages):
            layers = profile.layers[start:end]
            input_bytes = profile.layers[start - 1].output_bytes if start else profile.input_bytes
            first, second = _halves(input_bytes, layers)
            number = sum(map(self._trainable, layers))
            share = self._trainable(layers[0]) / max(1.0, number)
            halves = Halves(first, second, share)
            casts = 0
            for layer in layers:
                casts += layer.cast_bytes
            stages.append(replace(stage, halves=halves, cast_bytes=casts))
            largest.append(max(map(self._largest, layers)))
            trainable.append(sum(map(self._trainable, layers)))
            frozen.append(float(sum(layer.frozen_bytes for layer in layers)))
        costs = replace(costs, stages=tuple(stages))
        return _Stages(costs, balance, tuple(trainable), tuple(largest), tuple(frozen))

    def _largest(self, layer: LayerProfile) -> float:
        """Return the number of values in the largest parameter that requires a gradient."""
        if layer.largest_parameter is not None:
            return layer.largest_parameter
        return self._trainable(layer)

    def _trainable(self, layer: LayerProfile) -> float:
        """Return the number of parameters of a layer that require a gradient."""
        if layer.trainable_parameters is not None:
            return layer.trainable_parameters
        size = self._state.parameter
        if isinstance(self._model, Transformer):
            size = self._model.size
        return (layer.parameter_bytes - layer.frozen_bytes) / size

    @property
    def _runs_here(self) -> bool:
        """Whether this library runs the model, whose memory is known in detail.

        Other programs may keep buffers of gradients in use, and order messages in another way.
        """
        return not isinstance(self._model, Transformer) or self._model.eager

    @property
    def _gathered_size(self) -> float:
        """The bytes of a parameter that FSDP gathers."""
        if isinstance(self._model, Transformer) and self._model.eager:
            return self._model.size
        return self._state.parameter

    def _equally_fast(
        self,
        tensor: int,
        mode: str,
        number: int,
    ) -> Sequence[int]:
        """Return the balance with equally fast stages, of any micro-batch."""
        profile = self._profile(True, _Setting(tensor))
        return fastest(profile, profile.blocks(1, 0.0), number, mode)

    def _stride(self, axis: str, mesh: tuple[int, int, int]) -> int:
        """Return the distance of a device to the next one along an axis."""
        sizes = dict(zip(AXES, mesh))
        stride = 1
        for inner in self._axes[self._axes.index(axis) + 1 :]:
            stride *= sizes[inner]
        return stride

    def stages(self, tensor: int) -> Collection[int]:
        """Return possible numbers of stages.

        Raises:
            ValueError: The ranks of the tensor axis cannot share the layers, or the balance is for
                other layers.
        """
        number = len(self._profile(True, _Setting(tensor)).layers)
        if self._balance is None:
            return range(1, number + 1)
        if sum(self._balance) != number or min(self._balance) < 1:
            raise ValueError(f'balance must divide {number} layers, but is {[*self._balance]}')
        return [len(self._balance)]

    def chunks(self, case: _Case) -> int:
        """Return the number of micro-batches of a replica."""
        return self._batch // case.mesh[0] // case.micro_batch

    def _stages_of(self, case: _Case, linked: bool = True) -> _Stages:
        where = places(case.schedule, case.mesh[1], case.virtual)
        return self._stages(linked, case.setting, where)

    def costs(self, case: _Case, linked: bool = True) -> Costs:
        """Return the costs of a case; without links, no message or collective takes time."""
        pipe = case.mesh[1]
        m = self.chunks(case)
        machine = self._machine if linked else self._machine.without_links()
        stages: list[StageCosts] = []
        # The first stage has the input of all micro-batches from the start.
        waiting = (m - 1) * self._profile(True, case.setting).input_bytes
        computed = self._stages_of(case, linked).costs
        # The first rank receives gradients and sends their sum.
        tied = self._tied_gradients(case)
        for k, (stage, parameters) in enumerate(
            zip(computed.stages, self._replicated(case, linked))
        ):
            resident = stage.resident_bytes + parameters.resident + waiting
            memory: dict[str, Any] = {'halves': None}
            if self._runs_here:
                memory = {
                    'gradient_bytes': parameters.gradients,
                    # The gradient of a tied parameter is in no bucket.
                    'bucket_bytes': 0.0 if tied[k] else parameters.bucket,
                    'tied_bytes': (2 if k else 3) * tied[k],
                }
            else:
                resident += parameters.gradients
            stages.append(
                replace(
                    stage,
                    recomputed=m if _is_scheduled(case) else 0,
                    resident_bytes=resident,
                    **memory,
                    gather=parameters.gather,
                    gathered_bytes=parameters.gathered,
                    reduction=parameters.reduction,
                    buckets=parameters.buckets,
                    update=parameters.update,
                )
            )
            waiting = 0
        stride = self._stride('pipe', case.mesh)
        links = machine.links(pipe, stride, prod(case.mesh) // (pipe * stride))
        held = AHEAD if self._runs_here else 0
        return Costs((*stages,), computed.skips, links, self._overlaps, held)

    def _replicated(self, case: _Case, linked: bool = True) -> tuple[_Replicated, ...]:
        """Return by stage the costs of parameters."""
        where = places(case.schedule, case.mesh[1], case.virtual)
        # The times of micro-batches do not matter here.
        setting = case.setting._replace(micro_batch=1)
        return self._parameter_costs(linked, case.mesh, setting, where)

    def _replicate(
        self,
        linked: bool,
        mesh: tuple[int, int, int],
        setting: _Setting,
        where: tuple[int, ...],
    ) -> tuple[_Replicated, ...]:
        data = mesh[0]
        stride = self._stride('data', mesh)
        sharding = setting.sharding
        state = self._state
        machine = self._machine if linked else self._machine.without_links()
        stages = self._stages(linked, setting, where)
        shards = sharding == 'shard'
        frees = self._frees(sharding, data)
        kept = state.on_a_rank(sharding, data, freed=frees) - state.gradient
        costs = []
        for trainable, largest, frozen in zip(stages.trainable, stages.largest, stages.frozen):
            whole = trainable * self._gathered_size + frozen
            gradients = trainable * state.gradient
            reduce = machine.reduce_scatter if shards else machine.all_reduce
            resident = trainable * kept
            if shards:
                # Stages count frozen parameters as whole; a rank has a part of them as well.
                resident += frozen / data - frozen * frees
            costs.append(
                _Replicated(
                    resident,
                    gradients,
                    # FSDP has no copies.
                    0.0
                    if shards or data == 1
                    else min(gradients, BUCKET + largest * state.gradient),
                    whole if frees else 0.0,
                    machine.gather(whole, data, stride) if shards else 0.0,
                    reduce(gradients, data, stride),
                    state.traffic * trainable / (data if shards else 1) / machine.bandwidth,
                    # FSDP reduces the gradients of a stage at once.
                    1 if shards else max(1, ceil(gradients / BUCKET)),
                )
            )
        return tuple(costs)

    def _compute(
        self,
        setting: _Setting,
        where: tuple[int, ...],
        splits: bool,
    ) -> list[_RankWork]:
        """Return the work of each rank for one micro-batch."""
        stages = self._stages(True, setting, where).costs.stages
        again = _is_scheduled(setting)
        #: By stage, the seconds from its forward to the end of the model and back. Recomputations
        #: run while a rank waits for gradients.
        rest = [*accumulate(x.forward + x.seconds('I' if splits else 'B') for x in stages[::-1])][
            ::-1
        ]
        ranks = []
        for rank in range(1 + max(where)):
            own = [stage for stage, place in enumerate(where) if place == rank]
            work = flight = 0.0
            for stage in own:
                costs = stages[stage]
                work += costs.forward + again * costs.seconds('R')
                work += costs.seconds('I') + costs.seconds('W') if splits else costs.backward
                flight += rest[stage] + splits * costs.seconds('W')
            first = stages[rank]
            last = 0.0 if splits else first.backward
            activations = 0.0 if again else min(stages[stage].activation_bytes for stage in own)
            buffers = sum(stages[stage].resident_bytes for stage in own)
            ranks.append(_RankWork(own, work, flight, first.forward, last, activations, buffers))
        return ranks

    def bound(self, case: _Case) -> tuple[float, float]:
        """Return bounds on the seconds and the bytes of a case: [Note: Bounds of a mesh]."""
        data = case.mesh[0]
        m = self.chunks(case)
        splits = case.schedule in SPLIT
        where = places(case.schedule, case.mesh[1], case.virtual)
        ranks = self._chains(case.setting, where, splits)
        parameters = self._replicated(case)
        seconds = bytes = start = end = 0.0
        in_flight = self.in_flight(case)
        activations = in_flight
        if not all(stage.is_split for stage in self._stages_of(case).costs.stages):
            activations = self.in_flight(case, 'BI')
        for rank, (x, held) in enumerate(zip(ranks, in_flight)):
            own = [parameters[stage] for stage in x.stages]
            gather, reduction = self._exposed(own, parameters[rank], x.forward, splits, data)
            update = sum(stage.update for stage in own)
            start = max(gather, start)
            end = reduction + update if splits else max(reduction + update, end)
            work = m * x.work
            if case.schedule in V_SHAPED:  # They hold only so many activations.
                work = max(work, m * x.flight / held)
            seconds = max(seconds, start + work + end)
            start += x.forward
            end += x.last
            resident = x.resident
            gradients = 0.0
            gathered = inf
            for stage in own:
                resident += stage.resident
                gradients += stage.gradients
                gathered = min(gathered, stage.gathered)
            moving = activations[rank] * x.activations
            moving += gathered
            if self._runs_here:
                moving = max(moving, gradients)  # Activations come before gradients.
            else:
                moving += gradients
            bytes = max(bytes, resident + moving)
        return seconds, bytes

    def _exposed(
        self,
        own: Sequence[_Replicated],
        first: _Replicated,
        forward: float,
        splits: bool,
        data: int,
    ) -> tuple[float, float]:
        """Return the seconds of a rank's exchanges before its first and after its last action."""
        if data == 1:
            return 0.0, 0.0
        if self._overlaps is None:
            ends = own if splits else [first]
            # Only the last bucket has to follow a backward.
            return first.gather, min(stage.reduction / stage.buckets for stage in ends)
        if self._overlaps:
            return max(0.0, first.gather - forward), 0.0
        return sum(stage.gather for stage in own), sum(stage.reduction for stage in own)

    def _frees(self, sharding: str, data: int) -> bool:
        """Return whether whole parameters are counted while they are gathered."""
        return sharding == 'shard' and data > 1 and self._overlaps is None

    def in_flight(self, case: _Case, ends: str = 'BW') -> tuple[int, ...]:
        """Return by rank the most micro-batches of its stages between ``F`` and other actions."""
        pipe = case.mesh[1]
        m = self.chunks(case)
        number = min(m, few(case.schedule, pipe, m)[1])
        return _most_in_flight(case.schedule, pipe, number, case.virtual, ends)

    def simulate(self, case: _Case, costs: Costs) -> Simulation:
        """Simulate all micro-batches of a case."""
        schedule = schedule_of(
            case.schedule, case.mesh[1], self.chunks(case), case.virtual, costs.stops
        )
        return simulate(schedule, costs)

    def plan(self, found: _Found, best: 'MeshPlan | None' = None) -> 'MeshPlan':
        """Return the plan of a case, with the reason why it is slower than the best plan."""
        case = found.case
        seconds = found.seconds
        costs = self.costs(case)
        m = self.chunks(case)
        data, pipe, tensor = case.mesh
        messages = 0.0
        if pipe > 1 and (best is None or seconds < HOPELESS * best.seconds):
            messages = seconds - self.simulate(case, replace(costs, links=Link())).seconds
        parts = self._parts(found, costs, messages)
        reason = ''
        if best is not None:
            cause = max(parts, key=lambda each: parts[each] - best.parts[each])
            reason = f'{seconds / best.seconds - 1:.1%}: {cause}'
        whole = {1: self._model} if isinstance(self._model, Profile) else self._model
        layers = whole[1].layers if isinstance(whole, Mapping) and 1 in whole else ()
        return MeshPlan(
            case.schedule,
            self._stages_of(case).balance,
            tuple(f'pipe {rank}' for rank in places(case.schedule, pipe, case.virtual)),
            m,
            'always' if _is_scheduled(case) else 'never',
            tuple((x.name, x.parameter_bytes) for x in layers),
            self._batch // data,
            parts['compute'] * data * pipe * tensor,
            costs,
            mesh=dict(zip(AXES, case.mesh)),
            axes=tuple(self._axes),
            data=case.data,
            micro_batch=case.micro_batch,
            recomputation=case.recomputation,
            keep='products' if case.recomputation == 'selective' else {},
            parts=parts,
            reason=reason,
            peaks=found.peaks,
            flops=self._flops(case),
            traffic=self._traffic(case),
        )

    def _stage_layers(self, case: _Case) -> Iterator[Sequence[LayerProfile]]:
        """Yield the layers of each stage."""
        layers = self._profile(True, case.setting).layers
        start = 0
        for number in self._stages_of(case).balance:
            yield layers[start : start + number]
            start += number

    def _flops(self, case: _Case) -> tuple[float, ...]:
        """Return by stage the FLOPs of a rank in a step."""
        flops = []
        for layers in self._stage_layers(case):
            micro_batch = 0.0
            for layer in layers:
                is_kept = case.recomputation == 'selective' and layer.operations
                passes = 2 if _is_scheduled(case) and not is_kept else 1
                micro_batch += passes * layer.forward_flops + layer.backward_flops
            flops.append(self.chunks(case) * micro_batch)
        return tuple(flops)

    def _traffic(self, case: _Case) -> dict[str, float]:
        """Return by axis the bytes that the ranks of one pipeline exchange in a step."""
        m = self.chunks(case)
        passes = 2.0 if case.recomputation == 'full' else 1.0
        if case.recomputation == 'selective' and getattr(self._model, 'sequence_parallel', False):
            passes = 1.5  # The gathers are repeated, and the reductions are not.
        traffic = dict.fromkeys(AXES, 0.0)
        for layers in self._stage_layers(case):
            for layer in layers:
                exchanged = passes * layer.forward_exchange + layer.backward_exchange
                traffic['tensor'] += m * exchanged

        where = places(case.schedule, case.mesh[1], case.virtual)
        tied = self._tied_gradients(case)
        for stage, parameters in enumerate(self._replicated(case)):
            if case.mesh[0] > 1:
                traffic['data'] += parameters.gradients
            if case.data == 'shard':
                traffic['data'] += parameters.gathered
                # A tied parameter is whole at the end, when its rank has freed later stages.
                is_freed = where.index(where[stage]) != stage
                traffic['data'] += parameters.gathered * (is_freed and tied[stage] > 0)
        stages = self._stages_of(case).costs.stages
        for costs, (place, after) in zip(stages, pairwise(where)):
            if place != after:
                traffic['pipe'] += 2 * m * costs.output_bytes  # the output and its gradient
        traffic['pipe'] += sum(tied)
        return traffic

    def _tied_gradients(self, case: _Case) -> list[float]:
        """Return by stage the bytes of gradients that its rank sends to ranks with copies."""
        where = places(case.schedule, case.mesh[1], case.virtual)
        stage_of_layer = []
        for stage, number in enumerate(self._stages_of(case).balance):
            stage_of_layer += [stage] * number
        sent = [0.0] * len(where)
        for tie in self._profile(True, case.setting).ties:
            first_stages: dict[int, int] = {}
            for layer in tie.layers:
                stage = stage_of_layer[layer]
                first_stages.setdefault(where[stage], stage)
            if not tie.is_frozen:
                for stage in first_stages.values():
                    copies = len(first_stages) - 1
                    sent[stage] += copies * self._state.gradient * tie.parameters
        return sent

    def _parts(
        self,
        found: _Found,
        costs: Costs,
        messages: float,
    ) -> dict[str, float]:
        """Return the seconds by cause, as means over ranks, and the wait as the rest."""
        case = found.case
        m = self.chunks(found.case)
        splits = case.schedule in SPLIT

        def mean(kinds: str, of: Costs) -> float:
            return m * sum(x.seconds(kind) for x in of.stages for kind in kinds) / case.mesh[1]

        def work(of: Costs) -> tuple[float, float]:
            again = mean('R', of) if _is_scheduled(case) else 0.0
            return mean('FIW' if splits else 'FB', of), again

        compute, again = work(self.costs(case, linked=False))
        parts = {
            'compute': compute,
            'recomputation': again,
            'tensor': max(0.0, sum(work(costs)) - compute - again),
            'data': found.data,
            'update': found.update,
            'messages': messages,
        }
        # Rounding must leave no time below zero.
        return {**parts, 'bubble': max(0.0, found.seconds - sum(parts.values()))}


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
def plan(
    module: nn.Sequential | Profile,
    sample: Value = None,
    *,
    devices: Sequence[Device],
    **options: Any,
) -> Plan: ...


@overload
def plan(
    module: nn.Sequential | Layers,
    sample: Value = None,
    *,
    mesh: int | Mapping[str, int],
    **options: Any,
) -> MeshPlan: ...


def plan(
    module: Any,
    sample: Value = None,
    *,
    devices: Any = None,
    mesh: Any = None,
    **options: Any,
) -> Plan:
    """Find the fastest way to train a model, on the devices of a process or on a mesh.

    >>> from torchgpipe.plan import Transformer
    >>> gpt2_xl = Transformer(48, 1600, 25, 50257, 1024, biases=True)
    >>> print(plan(gpt2_xl, mesh=8, machine='H100', batch=512).name)
    data 8 × pipe 1 × tensor 1

    Args:
        module: The model, its profile, or the sizes of a transformer.
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
        raise TypeError(
            'a plan is for the devices of this process or for a mesh: give one of '
            'devices=… and mesh=…'
        )
    if isinstance(module, nn.Module) and sample is None:
        raise TypeError('layers are measured with a sample: plan(module, sample, …)')
    if mesh is None:
        return plan_devices(module, sample, devices=devices, **options)
    return plan_mesh(module, sample, mesh=mesh, **options)


def plan_mesh(
    module: nn.Sequential | Layers,
    sample: Value = None,
    *,
    mesh: int | Mapping[str, int],
    machine: Machine | str,
    batch: int,
    memory_limit: float | None = None,
    state: ParameterBytes = ParameterBytes(),
    schedules: Sequence[str] = SCHEDULES,
    virtual: int | Iterable[int] = 4,
    micro_batches: Iterable[int] = (1, 2, 4, 8, 16, 32),
    recomputations: Sequence[str] = RECOMPUTATIONS,
    shardings: Sequence[str] = SHARDINGS,
    overlap: Collection[str] | None = None,
    balance: Sequence[int] | None = None,
    axes: Sequence[str] = AXES,
    timeout: float = 1.0,
) -> MeshPlan:
    """Find the fastest plan for a mesh: its sizes, a schedule, micro-batches and recomputation.

    Args:
        module: The sizes of a transformer; or a model, whose layers are measured on this machine;
            or its profile, or profiles by the number of ranks along the tensor axis.
        sample: A mini-batch, as an input of the model, if layers are measured.
        mesh: The number of devices, each of which runs a rank, or the sizes of the axes.
        machine: The machine, or a name in ``MACHINES``.
        batch: The samples of a step, of all replicas.
        memory_limit: Bytes of a device for tensors, by default nine tenths of its memory.
        state: Bytes of a parameter, its gradient and the state of the optimizer.
        schedules: Names of :func:`torchgpipe.schedule.make`.
        virtual: The most stages on a rank, or the numbers to try.
        micro_batches: Samples of a micro-batch, to try.
        recomputations: ``'none'``; ``'selective'``: ``checkpoint='always'`` with
            ``keep='products'``; ``'full'``: ``checkpoint='always'``. For a transformer without
            fused attention, also ``'attention'``, which layers have to do themselves.
        shardings: ``'replicate'`` and ``'shard'``, to try: ``data`` of
            :class:`~torchgpipe.distributed.DistributedGPipe`.
        overlap: Axes whose collectives run concurrently with computation, of ``'data'`` and
            ``'tensor'``. By default, collectives over replicas overlap as in this library:
            gradients are reduced in buckets within the last backward of their stage, and
            parameters are gathered while other stages run. An empty list means no overlap at all.
        balance: The layers of each stage; by default stages are equally fast.
        axes: The axes, from the outermost one, as for
            :func:`~torchgpipe.distributed.init_mesh`.
        timeout: Approximate time in seconds for the measurement of layers.

    Returns:
        The fastest plan, and as ``runners_up`` the best plan of each other mesh. A mesh
        whose plans all take at least 1.2 times as long is not searched to its end, so it may have
        a faster plan than its runner-up. ``parts`` are
        the seconds by cause: ``'compute'``, ``'recomputation'``, collectives along the
        ``'tensor'`` and the ``'data'`` axis, the optimizer's ``'update'``, ``'messages'`` between
        stages, and the ``'bubble'``, in which ranks wait for each other.

    Raises:
        TypeError: A number is not an integer, or the module is not sequential.
        ValueError: An argument is wrong, or no plan keeps the memory limit.
    """
    if isinstance(machine, str) and machine in MACHINES:
        machine = MACHINES[machine]
    if not isinstance(machine, Machine):
        raise ValueError(
            f'there is no machine {machine!r}; there are {", ".join(MACHINES)}; '
            '`python -m benchmarks machine` measures this one'
        )
    layers = (
        profile(module, sample, timeout=timeout, device=accelerator() or CPU)
        if isinstance(module, nn.Module)
        else module
    )
    if isinstance(layers, Transformer):
        machine.peak(layers.dtype)
    elif not isinstance(layers, (Profile, Mapping)):
        raise TypeError(f'a plan is for a module, a profile or a Transformer, not {layers!r}')
    _check_times(layers)
    memory_limits(memory_limit, 1, 'limits')
    limit = USABLE * machine.memory if memory_limit is None else memory_limit
    _check_names(schedules, recomputations, shardings, overlap)
    check_axes(axes)
    if not (isinstance(layers, Transformer) and not layers.fused):
        # There are no scores in memory.
        recomputations = _without(recomputations, 'attention')
    if not _knows_products(layers):
        recomputations = _without(recomputations, 'selective')
    micro_batches = [positive(b, 'micro_batches') for b in micro_batches]
    virtual = (
        [*range(1, 1 + positive(virtual, 'virtual'))]
        if isinstance(virtual, int)
        else [positive(v, 'virtual') for v in virtual]
    )
    # Few devices are all on one host, whatever its size.
    devices = prod(next(_meshes(mesh)))
    machine = replace(machine, devices_per_host=min(machine.devices_per_host, devices))
    search = MeshSearch(layers, machine, positive(batch, 'batch'), state, overlap, balance, axes)
    with uncollected():  # It would take a third of the time, and find no garbage.
        return _planned(
            search,
            mesh,
            limit,
            partial(
                _cases,
                search,
                batch=batch,
                schedules=schedules,
                virtual=virtual,
                micro_batches=micro_batches,
                recomputations=recomputations,
                shardings=shardings,
            ),
        )


def _planned(
    search: MeshSearch,
    mesh: int | Mapping[str, int],
    limit: float,
    cases_of: Callable[[tuple[int, int, int]], Iterable[_Case]],
) -> MeshPlan:
    """Return the fastest plan, among candidates by mesh."""
    refused: dict[str, str] = {}
    meshes: list[list[_Bounded]] = []
    for sizes in progress([*_meshes(mesh)], 'plan: bounds of meshes'):
        try:
            meshes.append(sorted((*search.bound(case), case) for case in cases_of(sizes)))
        except ValueError as error:
            refused[name_of(sizes)] = str(error)

    def first(cases: list[_Bounded]) -> float:
        return next((seconds for seconds, bytes, _ in cases if bytes <= limit), inf)

    found = sorted(_best(search, sorted(meshes, key=first), limit, refused))
    if not found:
        raise ValueError(
            'no plan for this mesh:\n'
            + '\n'.join(f'{name}: {why}' for name, why in refused.items())
        )
    fastest_plan = search.plan(found[0])
    return replace(
        fastest_plan,
        refused=refused,
        runners_up=tuple(search.plan(each, fastest_plan) for each in found[1:]),
    )


def _check_times(layers: Layers) -> None:
    """Raise a :exc:`ValueError` if no layer of a profile takes time."""
    profiles: list[Profile] = []
    if isinstance(layers, Profile):
        profiles = [layers]
    elif isinstance(layers, Mapping):
        profiles = [*layers.values()]
    for measured in profiles:
        if not any(x.forward_seconds + x.backward_seconds for x in measured.layers):
            raise ValueError(
                'the profile has no times: give the profile of measured layers, as '
                'torchgpipe.balance.profile makes it'
            )


def _check_names(
    schedules: Sequence[str],
    recomputations: Sequence[str],
    shardings: Sequence[str],
    overlap: Collection[str] | None,
) -> None:
    """Raise a :exc:`ValueError` if a name is unknown, or there are none."""
    for option, names, known in (
        ('schedules', schedules, (*NAMES,)),
        ('recomputations', recomputations, ALL_RECOMPUTATIONS),
        ('shardings', shardings, SHARDINGS),
        ('overlap', overlap or (), AXES[::2]),
    ):
        unknown = [name for name in names if name not in known]
        if unknown or not (names or option == 'overlap'):
            raise ValueError(f'{option} are of {known}, but are {[*names]}')


def _cases(
    search: MeshSearch,
    sizes: tuple[int, int, int],
    batch: int,
    schedules: Sequence[str],
    virtual: Sequence[int],
    micro_batches: Sequence[int],
    recomputations: Sequence[str],
    shardings: Sequence[str],
) -> Iterator[_Case]:
    """Yield the candidates of a mesh, or raise a :exc:`ValueError`."""
    data, pipe, tensor = sizes
    if batch % data:
        raise ValueError(f'{data} replicas cannot share {batch} samples')
    share = batch // data
    sizes_of_micro_batches = [b for b in micro_batches if share % b == 0]
    if not sizes_of_micro_batches:
        raise ValueError(
            f'no micro-batch of {micro_batches} divides the {share} samples of a replica'
        )
    numbers = search.stages(tensor)
    if pipe > max(numbers):
        raise ValueError(f'{pipe} ranks have a stage each, but there are {max(numbers)} at most')
    stages = [
        (name, v)
        for name in schedules
        for v in _virtual(name, pipe, virtual)
        if pipe * v in numbers
    ]
    if not stages:
        raise ValueError(
            f'none of the schedules {schedules} runs on {pipe} ranks, with {virtual} '
            f'stages on each and {max(numbers)} at most'
        )
    # With few ranks, some names have the same order.
    distinct: dict[Schedule, tuple[str, int]] = {}
    for name, v in stages:
        distinct.setdefault(schedule_of(name, pipe, pipe, v), (name, v))
    for (name, v), b, recomputation, sharding in product(
        distinct.values(),
        sizes_of_micro_batches,
        recomputations,
        shardings if data > 1 else ['replicate'],
    ):
        yield _Case(sizes, name, v, b, recomputation, sharding)


def _virtual(
    name: str,
    pipe: int,
    virtual: Iterable[int],
) -> Iterable[int]:
    """Return the numbers of stages on a rank, of which one rank has one."""
    _, most = stages_per_device(name)
    if pipe == 1:
        return [1] if most == 1 and name not in SPLIT else []
    # One of several stages would be another schedule.
    return [v for v in virtual if min(2, most) <= v <= most]


def _best(
    search: MeshSearch,
    meshes: list[list[_Bounded]],
    limit: float,
    refused: dict[str, str],
) -> Iterator[_Found]:
    """Simulate the candidates of each mesh, the lowest bound first; yield the best of each."""
    fastest_of_all = inf
    for cases in progress(meshes, 'plan: simulations of meshes'):
        best = None
        least = inf
        for bound, bytes, case in cases:
            if best and bound >= min(best.seconds, HOPELESS * fastest_of_all):
                break
            if bytes <= limit:
                simulation = search.simulate(case, search.costs(case))
                if best and simulation.seconds >= best.seconds:
                    continue
                bytes = max(simulation.peak_bytes)
                if bytes <= limit:
                    best = _Found(
                        simulation.seconds, case, *_ends(simulation), simulation.peak_bytes
                    )
            least = min(least, bytes)
        if best:
            fastest_of_all = min(fastest_of_all, best.seconds)
            yield best
        else:
            refused[name_of(cases[0][-1].mesh)] = (
                f'takes at least {format_bytes(least)} on a rank, of {format_bytes(limit)}'
            )
