"""How values go from layer to layer: by hand to the next one, or straight to a later one.

::

    layer      0            1            2            3
    a          made ──skip───────────▶ used ──hand──▶ used       on to the next that uses it
    b                     made ──hand──▶ used
    n          made ──hand──▶ ·  ──hand──▶ ·  ──hand──▶ used     a number goes by hand, at no cost

So no value crosses a boundary twice, and a tensor is on no device that has no use for it. A device
itself, of which a layer makes a tensor, goes nowhere: it is that of what the layer is handed.
"""
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

__all__ = ['Route', 'routes']


@dataclass
class Route:
    """What one layer gets and gives.

    Attributes:
        handed: What the layer before hands over.
        popped: What it takes from skips, with their names.
        hands: What it hands to the next one.
        stashed: What it puts into skips, with their names.
    """

    handed: list[fx.Node] = field(default_factory=list)
    popped: list[tuple[str, fx.Node]] = field(default_factory=list)
    hands: list[fx.Node] = field(default_factory=list)
    stashed: list[tuple[str, fx.Node]] = field(default_factory=list)


def routes(graph: fx.Graph, layers: Sequence[Sequence[fx.Node]]) -> list[Route]:
    """Give the routes of the values of a graph, which is cut into layers.

    Each layer but the last hands over a tensor at least, as a pipeline asks for.
    """
    place = {node: k for k, layer in enumerate(layers) for node in layer}
    last = len(layers) - 1
    stops: dict[fx.Node, set[int]] = {}
    for node in graph.nodes:
        if node.op in ('get_attr', 'output') or node.meta['device']:
            continue
        first = place.get(node, 0)
        used = {place.get(user, last) for user in node.users} - {first}
        if used:
            plain = node.meta['kind'] == 'plain'
            stops[node] = {first, *(range(first, max(used) + 1) if plain else used)}
    for k in range(last):
        _hand_over_a_tensor(k, stops)
    return _routes(stops, len(layers))


def _hand_over_a_tensor(k: int, stops: dict[fx.Node, set[int]]) -> None:
    """Let the smallest tensor that passes a boundary stop on both sides of it, if none does."""
    passing = [node for node, layers in stops.items()
               if node.meta['kind'] == 'tensor' and min(layers) <= k < max(layers)]
    if not any({k, k + 1} <= stops[node] for node in passing):
        stops[min(passing, key=lambda node: int(node.meta['bytes']))] |= {k, k + 1}


def _routes(stops: dict[fx.Node, set[int]], number: int) -> list[Route]:
    found = [Route() for _ in range(number)]
    for node, layers in stops.items():
        path = sorted(layers)
        for here, there in zip(path, path[1:]):
            if there == here + 1:
                found[here].hands.append(node)
                found[there].handed.append(node)
            else:
                name = f'{node.name} to {there}'
                found[here].stashed.append((name, node))
                found[there].popped.append((name, node))
    return found
