"""A training step of a pipeline over profiled layers: what a balance takes in time and memory."""
import math
from bisect import bisect_right
from itertools import accumulate
from typing import List, Optional, Sequence, Tuple

from torchgpipe.balance.blockpartition import solve
from torchgpipe.balance.layers import LayerProfile, SkipProfile
from torchgpipe.balance.table import format_bytes

__all__ = ['Balance', 'Step', 'even_cuts', 'group', 'ungroup']


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


class Step:
    """A training step of a pipeline over profiled layers: its times and its memory.

    At its peak, a partition of the layers ``a`` to ``b-1`` holds

    1. parameters, gradients, optimizer state and buffers;
    2. the inputs and the skips from other partitions, of all micro-batches;
    3. activations: of one micro-batch, or without checkpoints of all of them;
    4. the last partition: the outputs and their gradients.
    """

    def __init__(self, layers: Sequence[LayerProfile], skips: Sequence[SkipProfile],
                 input_bytes: int, m: int, param_scale: float, checkpoint: str) -> None:
        recomputed = {'always': 1.0, 'except_last': (m - 1) / m, 'never': 0.0}
        if checkpoint not in recomputed:
            raise ValueError("checkpoint is not one of 'always', 'except_last', or 'never': "
                             f'{checkpoint!r}')
        if not (math.isfinite(param_scale) and param_scale >= 0):
            raise ValueError('param_scale must be a number of parameter sizes, zero or more, but '
                             f'is {param_scale}')
        self.layers = layers
        self.skips = skips
        self.m = m
        self.again = recomputed[checkpoint]
        self.share = 1 if checkpoint == 'never' else m
        self.forward = [x.forward_seconds + (m - 1) * x.forward_overhead for x in layers]
        self.costs = [forward * (1 + self.again) + x.backward_seconds
                      + (m - 1) * x.backward_overhead
                      for forward, x in zip(self.forward, layers)]
        self.resident = [0, *accumulate(
            int((x.parameter_bytes - x.frozen_bytes) * param_scale)
            + x.frozen_bytes + x.buffer_bytes for x in layers)]
        self.activations = [0, *accumulate(x.activation_bytes for x in layers)]
        self.inputs = [input_bytes, *(x.output_bytes for x in layers)]

    def bytes(self, a: int, b: int) -> int:
        """Give the peak memory of a partition; more layers at its end never take less."""
        skips = sum(x.bytes for x in self.skips if x.source < a <= x.target < b)
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
        forward = [sum(self.forward[a:b]) for a, b in parts]
        balance = Balance(lengths)
        balance.layers = tuple((x.name, x.parameter_bytes) for x in self.layers)
        balance.seconds = [sum(self.costs[a:b]) for a, b in parts]
        balance.bytes = [self.bytes(a, b) for a, b in parts]
        backward = [both - once for both, once in zip(balance.seconds, forward)]
        total = self._clocks(forward) + self._clocks(backward)
        alone = sum(x.forward_seconds + x.backward_seconds for x in self.layers)
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
        layers, number = self.layers, len(self.costs)
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


def even_cuts(costs: Sequence[float], edges: Sequence[int], partitions: int) -> List[int]:
    """Cut costs at some edges only; give the number of layers of each partition."""
    blocks = solve(group(costs, edges), partitions)
    return ungroup([len(block) for block in blocks], edges)


def group(costs: Sequence[float], edges: Sequence[int]) -> List[float]:
    """Add up the costs between edges."""
    return [sum(costs[a:b]) for a, b in zip(edges, edges[1:])]


def ungroup(lengths: Sequence[int], edges: Sequence[int]) -> List[int]:
    """Give numbers of layers for numbers of groups between edges."""
    cuts = [edges[k] for k in accumulate([0, *lengths])]
    return [b - a for a, b in zip(cuts, cuts[1:])]
