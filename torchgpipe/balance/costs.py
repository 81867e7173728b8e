"""What layers cost, as data: profiles, the balances that follow from them, what these predict."""
import math
from bisect import bisect_right
from dataclasses import asdict, dataclass, fields
from itertools import accumulate
from typing import Any, Dict, Iterable, List, Optional, Sequence, Set, Tuple, Type, TypeVar, Union

from torchgpipe.balance.blockpartition import check_partitions, solve
from torchgpipe.balance.bounded import solve_bounded
from torchgpipe.balance.table import format_bytes, table

__all__ = ['Balance', 'LayerProfile', 'Profile', 'SkipProfile', 'even_cuts']

T = TypeVar('T')

MemoryLimit = Union[None, int, Sequence[Optional[int]]]


@dataclass(frozen=True)
class LayerProfile:
    """What one layer costs in a training step on the sample, by itself."""

    #: In the sequential module.
    name: str
    #: Medians.
    forward_seconds: float
    backward_seconds: float
    #: All parameters, and those among them that require no gradient.
    parameter_bytes: int
    frozen_bytes: int
    buffer_bytes: int
    #: Memory that the forward made and autograd keeps for the backward of this or later layers.
    activation_bytes: int
    #: What crosses the boundary if a partition ends here, skips not counted.
    output_bytes: int
    #: The layer, by index, whose result this one changes in place, if any; the first such.
    changes: Optional[int] = None
    #: What of the times above does not shrink with the batch: spent once per micro-batch.
    forward_overhead: float = 0.0
    backward_overhead: float = 0.0


@dataclass(frozen=True)
class SkipProfile:
    """A skip tensor: from which layer to which, by index, and its size."""

    source: int
    target: int
    bytes: int


class Balance(List[int]):
    """The number of layers of each partition, for ``GPipe(balance=…)``, and what it predicts."""

    #: Per partition, for one training step on one mini-batch, waiting not counted.
    seconds: List[float]
    #: Per partition, at the peak of a training step.
    bytes: List[int]
    #: The part of the devices' time in a step in which they wait.
    bubble: float
    #: How much faster than the unwrapped model on one device, if that could hold it.
    speed_up: float
    #: The layers that it is for: names and bytes of parameters.
    layers: Tuple[Tuple[str, int], ...]


@dataclass(frozen=True)
class Profile:
    """What the layers of a sequential module cost: made by :func:`torchgpipe.balance.profile`.

    Times are medians in seconds, sizes are in bytes, all for one training step on the whole
    sample, without checkpoints. ``print(profile)`` shows a table.
    """

    layers: Tuple[LayerProfile, ...]
    skips: Tuple[SkipProfile, ...]
    #: The batch size of the sample.
    batch_size: int
    input_bytes: int
    #: Where it was measured.
    device: str

    def __str__(self) -> str:
        rows = [[layer.name, f'{layer.forward_seconds * 1e3:.3f}',
                 f'{layer.backward_seconds * 1e3:.3f}', format_bytes(layer.parameter_bytes),
                 format_bytes(layer.activation_bytes), format_bytes(layer.output_bytes)]
                for layer in self.layers]
        rows.append(['total', f'{sum(x.forward_seconds for x in self.layers) * 1e3:.3f}',
                     f'{sum(x.backward_seconds for x in self.layers) * 1e3:.3f}',
                     format_bytes(sum(x.parameter_bytes for x in self.layers)),
                     format_bytes(sum(x.activation_bytes for x in self.layers)), ''])
        return table(['layer', 'forward, ms', 'backward, ms', 'parameters', 'activations',
                      'output'], rows) + f'\n\n{self.batch_size} samples on {self.device}'

    def to_dict(self) -> Dict[str, Any]:
        """Give it as what JSON can hold."""
        return {'version': 1, **asdict(self), 'layers': [asdict(x) for x in self.layers],
                'skips': [asdict(x) for x in self.skips]}

    @staticmethod
    def from_dict(data: Dict[str, Any]) -> 'Profile':
        """Take what :meth:`to_dict` gave.

        Raises:
            ValueError: It is something else.
        """
        if not isinstance(data, dict) or data.get('version') != 1:
            raise ValueError("this is not a profile: it has no 'version': 1, as Profile.to_dict() "
                             'writes it')
        rest = {key: value for key, value in data.items() if key != 'version'}
        for key, cls in (('layers', LayerProfile), ('skips', SkipProfile)):
            items = rest.get(key)
            rest[key] = tuple(_make(cls, item) for item in items) \
                if isinstance(items, (list, tuple)) else items
        if not (isinstance(rest['layers'], tuple) and isinstance(rest['skips'], tuple)):
            raise ValueError("this is not a profile: its 'layers' and 'skips' are no lists")
        return _make(Profile, rest)

    def balance(self, partitions: int, *, chunks: int, memory_limit: MemoryLimit = None,
                param_scale: float = 2.0, checkpoint: str = 'except_last') -> Balance:
        """Find the balance whose slowest partition is as fast as possible.

        That is exact, by dynamic programming over the measured times; ties are broken as evenly as
        possible.

        Args:
            partitions: Number of partitions.
            chunks: Number of micro-batches.
            memory_limit: Bytes of each device: one number for all of them, or one per partition,
                where ``None`` is no limit.
            param_scale: Bytes for a trainable parameter, its gradient and the optimizer's state,
                relative to the parameter: SGD 2–3, Adam 4–5, Adadelta 4, Adagrad 3, RMSprop 3–5.
            checkpoint: As for :class:`~torchgpipe.GPipe`.

        Returns:
            The balance, with what it predicts.

        Raises:
            ValueError: An argument is wrong, or no balance keeps the limits.
        """
        partitions, chunks = _take(partitions, 'partitions'), _take(chunks, 'chunks')
        limits = _take_limits(memory_limit, partitions)
        step = _Step(self, min(chunks, self.batch_size), param_scale, checkpoint)
        check_partitions(step.costs, partitions)
        edges = self.edges()
        if len(edges) <= partitions:
            if checkpoint != 'never':
                raise ValueError(_inseparable(self, len(edges) - 1, partitions))
            edges = list(range(len(self.layers) + 1))
        if all(limit is None for limit in limits):
            return step.predict(even_cuts(step.costs, edges, partitions))
        furthest = [step.furthest(edges, limit, last=j == partitions - 1)
                    for j, limit in enumerate(limits)]
        lengths = solve_bounded(_sums(step.costs, edges), furthest)
        if lengths is None:
            raise ValueError(step.why_not(edges, limits, furthest))
        return step.predict(_ungroup(lengths, edges))

    def edges(self) -> List[int]:
        """Give the places where partitions may start and end.

        A layer that changes in place what another one gave belongs into its partition. A
        checkpointed partition must not change its own input, and elsewhere the change may come too
        late for a skip.
        """
        forbidden: Set[int] = set()
        for index, layer in enumerate(self.layers):
            if layer.changes is not None:
                forbidden.update(range(layer.changes + 1, index + 1))
        return [edge for edge in range(len(self.layers) + 1) if edge not in forbidden]


def even_cuts(costs: Sequence[float], edges: Sequence[int], partitions: int) -> List[int]:
    """Cut costs at some edges only; give the number of layers of each partition."""
    blocks = solve(_sums(costs, edges), partitions)
    return _ungroup([len(block) for block in blocks], edges)


def _sums(costs: Sequence[float], edges: Sequence[int]) -> List[float]:
    return [sum(costs[a:b]) for a, b in zip(edges, edges[1:])]


def _ungroup(lengths: Sequence[int], edges: Sequence[int]) -> List[int]:
    cuts = [edges[k] for k in accumulate([0, *lengths])]
    return [b - a for a, b in zip(cuts, cuts[1:])]


def _inseparable(profile: 'Profile', groups: int, partitions: int) -> str:
    layer = next(x for x in profile.layers if x.changes is not None)
    return (f'{len(profile.layers)} layers make only {groups} groups for {partitions} partitions, '
            "since a layer that changes another one's result in place has to be in its partition: "
            f"'{layer.name}' is one; let it not work in place, or use checkpoint='never'")


class _Step:
    """A training step of a pipeline over the layers of a profile: its times and its memory.

    At its peak, a partition of the layers ``a`` to ``b-1`` holds

    1. parameters, gradients, optimizer state and buffers;
    2. the inputs and the skips from other partitions, of all micro-batches;
    3. activations: of one micro-batch, or without checkpoints of all of them;
    4. the last partition: the outputs and their gradients.
    """

    def __init__(self, profile: Profile, m: int, param_scale: float, checkpoint: str) -> None:
        recomputed = {'always': 1.0, 'except_last': (m - 1) / m, 'never': 0.0}
        if checkpoint not in recomputed:
            raise ValueError("checkpoint is not one of 'always', 'except_last', or 'never': "
                             f'{checkpoint!r}')
        if not (math.isfinite(param_scale) and param_scale >= 0):
            raise ValueError('param_scale must be a number of parameter sizes, zero or more, but '
                             f'is {param_scale}')
        self.profile = profile
        self.m = m
        self.again = recomputed[checkpoint]
        self.share = 1 if checkpoint == 'never' else m
        self.forward = [x.forward_seconds + (m - 1) * x.forward_overhead for x in profile.layers]
        self.costs = [forward * (1 + self.again) + x.backward_seconds
                      + (m - 1) * x.backward_overhead
                      for forward, x in zip(self.forward, profile.layers)]
        self.resident = [0, *accumulate(
            int((x.parameter_bytes - x.frozen_bytes) * param_scale)
            + x.frozen_bytes + x.buffer_bytes for x in profile.layers)]
        self.activations = [0, *accumulate(x.activation_bytes for x in profile.layers)]
        self.inputs = [profile.input_bytes, *(x.output_bytes for x in profile.layers)]

    def bytes(self, a: int, b: int) -> int:
        """Give the peak memory of a partition; more layers at its end never take less."""
        skips = sum(x.bytes for x in self.profile.skips if x.source < a <= x.target < b)
        activations = math.ceil((self.activations[b] - self.activations[a]) / self.share)
        output = 2 * self.inputs[-1] if b == len(self.costs) else 0
        return self.resident[b] - self.resident[a] + self.inputs[a] + skips + activations + output

    def furthest(self, edges: Sequence[int], limit: Optional[int], last: bool) -> List[int]:
        """Give the furthest edge at which a partition can end, by the one where it starts."""
        number = len(edges) - 1
        if limit is None:
            return [number] * number
        if last:
            return [number if self.bytes(edges[a], edges[-1]) <= limit else a
                    for a in range(number)]
        return [a + bisect_right(edges[a + 1:], limit,
                                 key=lambda b, a=edges[a]: self.bytes(a, b))  # type: ignore[misc]
                for a in range(number)]

    def predict(self, lengths: List[int]) -> Balance:
        """Make the balance, and say what to expect of it."""
        cuts = [0, *accumulate(lengths)]
        parts = list(zip(cuts, cuts[1:]))
        layers = self.profile.layers
        forward = [sum(self.forward[a:b]) for a, b in parts]
        balance = Balance(lengths)
        balance.layers = tuple((x.name, x.parameter_bytes) for x in layers)
        balance.seconds = [sum(self.costs[a:b]) for a, b in parts]
        balance.bytes = [self.bytes(a, b) for a, b in parts]
        backward = [both - once for both, once in zip(balance.seconds, forward)]
        total = self._clocks(forward) + self._clocks(backward)
        alone = sum(x.forward_seconds + x.backward_seconds for x in layers)
        balance.bubble = 1 - sum(balance.seconds) / (len(lengths) * total) if total else 0.0
        balance.speed_up = alone / total if total else 1.0
        return balance

    def _clocks(self, seconds: List[float]) -> float:
        """Add up the clocks of one direction; each takes as long as its slowest cell."""
        m, n = self.m, len(seconds)
        return sum(max(seconds[max(0, k - m + 1):k + 1]) / m for k in range(m + n - 1))

    def why_not(self, edges: Sequence[int], limits: Sequence[Optional[int]],
                furthest: Sequence[Sequence[int]]) -> str:
        """Say which layer does not fit, or that all of them together do not."""
        layers, number = self.profile.layers, len(self.costs)
        largest = max(math.inf if limit is None else limit for limit in limits)
        for a, layer in enumerate(layers):
            if self.bytes(a, a + 1) > largest:
                need = format_bytes(self.bytes(a, a + 1))
                return (f"layer '{layer.name}' alone needs {need}, but the largest memory limit "
                        f'is {format_bytes(largest)}; raise chunks, split the layer, or take a '
                        'larger device')
        activations = math.ceil(self.activations[-1] / self.share)
        total = self.resident[-1] + activations + self.inputs[0] + 2 * self.inputs[-1]
        room = sum(math.inf if limit is None else limit for limit in limits)
        if total > room:
            return (f'all {number} layers together need {format_bytes(total)} or more, but the '
                    f'memory limits add up to {format_bytes(room)}; take more or larger '
                    'devices, or raise chunks')
        for j, ends in enumerate(furthest):
            if all(end <= a for a, end in enumerate(ends)):
                return (f'partition {j} has a memory limit of {format_bytes(limits[j] or 0)}, in '
                        f"which no layer fits{' as the last one' * (j == len(limits) - 1)}")
        reached = 0
        for ends in furthest[:-1]:
            reached = max(ends[:reached + 1][:len(ends)])
            if reached == len(ends):
                break
        reached = edges[reached]
        return (f'no balance of {number} layers over {len(limits)} partitions keeps the memory '
                f'limits {[None if x is None else format_bytes(x) for x in limits]}, though all '
                f'layers together need {format_bytes(total)}: all partitions but the last hold at '
                f'most the first {reached} layers, and the last one not the rest from layer '
                f"'{layers[min(reached, number - 1)].name}' on; raise chunks, or take larger "
                'devices')


def _make(cls: Type[T], data: Any) -> T:
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    if not isinstance(data, dict) or set(data) != names:
        found = sorted(data) if isinstance(data, dict) else data
        raise ValueError(f'this is not a profile: a {cls.__name__} has {sorted(names)}, but here '
                         f'is {found}')
    return cls(**data)


def _take(number: int, what: str) -> int:
    if isinstance(number, bool) or not hasattr(number, '__index__'):
        raise TypeError(f'{what} must be an integer, but is {number!r}')
    if number < 1:
        raise ValueError(f'{what} must be a positive integer, but is {number}')
    return number.__index__()


def _take_limits(limit: MemoryLimit, partitions: int) -> List[Optional[int]]:
    if isinstance(limit, Iterable):
        limits = list(limit)
        if len(limits) != partitions:
            raise ValueError(f'memory_limit has {len(limits)} entries for {partitions} '
                             'partitions; give one number for all, or one for each')
    else:
        limits = [limit] * partitions
    for one in limits:
        if one is not None and not (isinstance(one, (int, float)) and one >= 0):
            raise ValueError('memory_limit must be a number of bytes, zero or more, but is '
                             f'{one!r}')
    return limits
