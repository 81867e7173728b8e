"""A training step of a pipeline over profiled layers: what a balance takes in time and memory."""
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from torchgpipe.balance.blockpartition import solve
from torchgpipe.balance.bounded import reachable
from torchgpipe.balance.layers import LayerProfile, SkipProfile
from torchgpipe.balance.table import format_bytes

__all__ = ['Balance', 'StepCost', 'even_cuts', 'group', 'ungroup']


class Balance(list[int]):
    """The number of layers of each partition, for ``GPipe(balance=…)``, and what it predicts.

    Made by :meth:`Profile.balance`. It is a list of integers that also knows the layers that it is
    for; ``list(balance)`` forgets them.

    >>> from torchgpipe.balance import Profile
    >>> layers = LayerProfile('a', 1, 2, 8, 0, 0, 4, 4), LayerProfile('b', 1, 1, 8, 0, 0, 4, 4)
    >>> profile = Profile(layers, (), batch_size=16, input_bytes=4, device='cpu')
    >>> balance = profile.balance(2, chunks=4, checkpoint='never')
    >>> balance, balance.seconds, round(balance.speed_up, 2)
    ([1, 1], [3.0, 2.0], 1.43)
    """

    #: Seconds of each partition for one training step on one mini-batch, waiting not counted.
    seconds: list[float]
    #: Bytes of each partition at the peak of a training step, apart from what a layer needs for
    #: itself while it runs, and from what an allocator adds.
    bytes: list[int]
    #: The part of the devices' time in a step in which they wait, from 0 to 1.
    bubble: float
    #: How much faster than the unwrapped model on one device, if that could hold it.
    speed_up: float
    #: Names and bytes of parameters of the layers that it is for.
    layers: tuple[tuple[str, int], ...]


class StepCost:
    """A training step of a pipeline over profiled layers: its times and its memory.

    At its peak, a partition of the layers ``a`` to ``b-1`` holds

    1. parameters, gradients, optimizer state and buffers;
    2. the inputs and the skips from other partitions, of all micro-batches;
    3. activations: of one micro-batch, or without checkpoints of all of them;
    4. of one micro-batch, what the backward of a layer takes and gives;
    5. skips that wait to be popped, of as many micro-batches as there are partitions after it;
    6. the last partition: the outputs and their gradients.

    That is an upper bound but for what a layer needs for itself while it runs.
    """

    def __init__(self, layers: Sequence[LayerProfile], skips: Sequence[SkipProfile],
                 input_bytes: int, partitions: int, m: int, param_scale: float, checkpoint: str
                 ) -> None:
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
        self.waiting = min(m, max(1, partitions - 1)) / m
        self.recomputed = recomputed[checkpoint]
        self.share = 1 if checkpoint == 'never' else m
        self.forward = [x.forward_seconds + (m - 1) * x.forward_overhead for x in layers]
        self.costs = [forward * (1 + self.recomputed) + x.backward_seconds
                      + (m - 1) * x.backward_overhead
                      for forward, x in zip(self.forward, layers)]
        self.resident = [0, *accumulate(
            int((x.parameter_bytes - x.frozen_bytes) * param_scale)
            + x.frozen_bytes + x.buffer_bytes for x in layers)]
        self.activations = [0, *accumulate(x.activation_bytes for x in layers)]
        self.inputs = [input_bytes, *(x.output_bytes for x in layers)]
        self.passing = [a + b for a, b in zip(self.inputs, self.inputs[1:])]

    def bytes(self, a: int, b: int) -> int:
        """Give the peak memory of a partition; more layers at its end never take less."""
        come = sum(x.bytes for x in self.skips if x.source < a <= x.target < b)
        wait = sum(x.bytes for x in self.skips if a <= x.source < b) * self.waiting
        activations = (self.activations[b] - self.activations[a]) / self.share
        backward = max(self.passing[a:b]) / self.m
        output = 2 * self.inputs[-1] if b == len(self.costs) else 0
        rest: int = math.ceil(wait + activations + backward)
        return self.resident[b] - self.resident[a] + self.inputs[a] + come + output + rest

    def furthest(self, edges: Sequence[int], limit: int | None, last: bool) -> list[int]:
        """Give the furthest edge at which a partition can end, by the one where it starts."""
        number = len(edges) - 1
        if limit is None:
            return [number] * number
        if last:
            return [number if self.bytes(edges[a], edges[-1]) <= limit else a
                    for a in range(number)]
        return [bisect_right(edges, limit, a + 1,
                             key=lambda b, a=edges[a]: self.bytes(a, b)) - 1  # type: ignore[misc]
                for a in range(number)]

    def predict(self, lengths: list[int]) -> Balance:
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
        sequential = sum(x.forward_seconds + x.backward_seconds for x in self.layers)
        balance.bubble = 1 - sum(balance.seconds) / (len(lengths) * total) if total else 0.0
        balance.speed_up = sequential / total if total else 1.0
        return balance

    def _clocks(self, seconds: list[float]) -> float:
        """Add up the clocks of one direction; each takes as long as its slowest cell."""
        m, n = self.m, len(seconds)
        return sum(max(seconds[max(0, k - m + 1):k + 1]) / m for k in range(m + n - 1))

    def why_not(self, edges: Sequence[int], limits: Sequence[int | None],
                furthest: Sequence[Sequence[int]]) -> str:
        """Say which layers do not fit, or that all of them together do not."""
        number = len(edges) - 1
        largest = math.inf if None in limits else max(limit or 0 for limit in limits)
        for k in range(number):
            need = min(self.bytes(edges[a], edges[k + 1]) for a in range(k + 1))
            if need > largest:
                return (f'{self._names(edges[k], edges[k + 1])} alone needs {format_bytes(need)}, '
                        f'but the largest memory limit is {format_bytes(largest)}; raise chunks, '
                        'split the layer, or take a larger device')
        activations = math.ceil(self.activations[-1] / self.share)
        total = self.resident[-1] + activations + self.inputs[0] + 2 * self.inputs[-1]
        all_of_them = f'all {len(self.layers)} layers together need {format_bytes(total)} or more'
        if None not in limits and total > sum(limit or 0 for limit in limits):
            room = format_bytes(sum(limit or 0 for limit in limits))
            return (f'{all_of_them}, but the memory limits add up to {room}; take more or larger '
                    'devices, or raise chunks')
        return (f'{self._stuck(edges, limits, furthest)}; {all_of_them}. Raise chunks, or take '
                'larger devices')

    def _stuck(self, edges: Sequence[int], limits: Sequence[int | None],
               furthest: Sequence[Sequence[int]]) -> str:
        """Say at which partition each balance that keeps the limits so far comes to an end."""
        number = len(edges) - 1
        rows = reachable([0] * len(edges), furthest, 0)  # with no bound on the time
        j = next(j for j, ends in enumerate(rows[1:]) if not ends)
        last = j == len(limits) - 1
        needs = [(self.bytes(edges[a], edges[number if last else a + 1]), a)
                 for a in rows[j] if a < number]
        if not needs:
            return f'no layer is left for partition {j}'
        need, a = min(needs)
        names = self._names(edges[a], edges[number if last else a + 1])
        return (f'no balance keeps the memory limit of partition {j}, '
                f'{format_bytes(limits[j] or 0)}: at least {names} would be there and need '
                f'{format_bytes(need)}')

    def _names(self, a: int, b: int) -> str:
        first, last = self.layers[a].name, self.layers[b - 1].name
        return f"layer '{first}'" if b == a + 1 else f"the block of layers '{first}' to '{last}'"


def even_cuts(costs: Sequence[float], edges: Sequence[int], partitions: int) -> list[int]:
    """Cut costs at some edges only; give the number of layers of each partition."""
    blocks = solve(group(costs, edges), partitions)
    return ungroup([len(block) for block in blocks], edges)


def group(costs: Sequence[float], edges: Sequence[int]) -> list[float]:
    """Add up the costs between edges."""
    return [sum(costs[a:b]) for a, b in zip(edges, edges[1:])]


def ungroup(lengths: Sequence[int], edges: Sequence[int]) -> list[int]:
    """Give numbers of layers for numbers of groups between edges."""
    cuts = [edges[k] for k in accumulate([0, *lengths])]
    return [b - a for a, b in zip(cuts, cuts[1:])]
