"""Choose the results that checkpointing keeps, within the memory that a plan leaves.

A kept result saves the time of its operation in each recomputation, and takes memory for each
micro-batch in flight. Per device, :func:`knapsack` chooses operations of layers::

    limit   ┌──────────────────────────────┐
            │ room ──▶ kept results        │   products of layer 3, normalizations of layer 4, …
    peak    ├──────────────────────────────┤
            │ inputs, one micro-batch's    │
            │ activations, parameters      │
            └──────────────────────────────┘

If there is room for all activations, the stages of a device are not checkpointed.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import NamedTuple

from torchgpipe.plan.costs import Costs, LayerProfile, operations_to_keep

#: The number of units into which the room is divided.
UNITS = 128


def knapsack(sizes: Sequence[float], values: Sequence[float], room: float) -> list[int]:
    """Return the indices of items that fit together, with the largest sum of values.

    By dynamic programming over units of the room, to which sizes are rounded up.

    >>> knapsack([3, 4, 5], [4.0, 5.0, 8.0], room=8)
    [0, 2]
    >>> knapsack([3, 4, 5], [4.0, 5.0, 8.0], room=2)
    []
    """
    if room <= 0:
        return []
    # By units in use, the largest value and the items, as bits.
    best = [(0.0, 0)] * (UNITS + 1)
    for k, (size, value) in enumerate(zip(sizes, values)):
        units = max(0, -int(-size * UNITS // room))
        for used in range(UNITS, units - 1, -1):
            before, items = best[used - units]
            if before + value > best[used][0]:
                best[used] = before + value, items | 1 << k
    _, items = best[UNITS]
    chosen = []
    for k in range(len(sizes)):
        if items >> k & 1:
            chosen.append(k)
    return chosen


class Selected(NamedTuple):
    """The results that checkpointing keeps in a plan."""

    #: By stage, the mode of checkpointing.
    modes: tuple[str, ...]
    #: By name of a layer, the operations whose results are kept.
    keep: dict[str, tuple[str, ...]]


class _Item(NamedTuple):
    """An operation of a layer, of which a device may keep the results."""

    layer: str
    operation: str
    #: Additional bytes at the peak.
    bytes: float
    #: Seconds of a recomputation.
    seconds: float


def select(
    layers: Sequence[LayerProfile],
    balance: Sequence[int],
    costs: Costs,
    checkpoint: str,
    m: int,
    in_flight: Mapping[int, int],
    places: Sequence[int],
    room: Sequence[float],
) -> Selected:
    """Choose the results that checkpointing keeps.

    Args:
        costs: The costs of the stages, without kept results.
        checkpoint: The mode of checkpointing of all stages.
        m: The number of micro-batches.
        in_flight: By stage, the most micro-batches between forward and backward.
        places: By stage, its device.
        room: By device, the bytes that are free at its peak.
    """
    modes = [checkpoint] * len(balance)
    keep: dict[str, tuple[str, ...]] = {}
    ends = [*accumulate(balance)]
    for device, free in enumerate(room):
        stages = []
        for stage, place in enumerate(places):
            if place == device:
                stages.append(stage)
        activations = 0.0
        items: list[_Item] = []
        for stage in stages:
            # The micro-batch in backward has its activations in any case.
            activations += costs.stages[stage].activation_bytes * (in_flight[stage] - 1)
            for layer in layers[ends[stage] - balance[stage] : ends[stage]]:
                items += _items(layer, layer is layers[-1], m, in_flight[stage])

        if activations <= free:
            for stage in stages:
                modes[stage] = 'never'
            continue
        sizes = [*map(attrgetter('bytes'), items)]
        values = [*map(attrgetter('seconds'), items)]
        for k in knapsack(sizes, values, free):
            keep[items[k].layer] = (*keep.get(items[k].layer, ()), items[k].operation)
    return Selected(tuple(modes), keep)


def _items(layer: LayerProfile, is_last: bool, m: int, in_flight: int) -> list[_Item]:
    """Return the operations of a layer that take time."""
    items = []
    for operation in operations_to_keep(layer, is_last):
        if operation.seconds > 0:
            size = (operation.bytes * in_flight - operation.saved_bytes) / m
            items.append(_Item(layer.name, operation.name, size, operation.seconds / m))
    return items
