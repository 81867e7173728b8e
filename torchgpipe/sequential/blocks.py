"""The calls of a model that are blocks: repeated in depth, such as the layers of a transformer.

::

    stages.0.blocks.0 ─▶ stages.0.blocks.1 ─▶ stages.1.blocks.0     three blocks
    ╰──────────── stages.0 ──────────────╯    ╰── stages.1 ───╯     no blocks: these are in them

    experts.0(x) + experts.1(x)                                     no blocks: side by side

A class is one of blocks if a list or a dict of modules, or a sequential one, has modules of it
with two weights of two dimensions or more; and if what one call of these gives goes to a later
one. All modules of that class in such a container count, unless blocks are in them.
"""
from collections.abc import Sequence
from typing import NamedTuple

from torch import fx, nn

__all__ = ['Call', 'blocks_among']

_CONTAINERS = nn.ModuleDict, nn.ModuleList, nn.Sequential


class Call(NamedTuple):
    """The call of a module that a recording has looked into."""

    module: nn.Module
    #: The positions of its steps in the graph.
    steps: range


def blocks_among(calls: Sequence[Call], root: nn.Module, graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the steps of each call that is one of a block.

    Args:
        calls: Those of a recording.
        root: The model.
        graph: What was recorded, as it was then.
    """
    container_of = {module: each for each in root.modules() if isinstance(each, _CONTAINERS)
                    for module in each.children()}
    inner = [each for each in calls if each.module in container_of
             and sum(x.dim() > 1 for x in each.module.parameters()) > 1]
    nodes = list(graph.nodes)
    behind = _calls_behind(inner, nodes)
    alike: dict[tuple[nn.Module, type], int] = {}
    classes = set()
    for k, (module, steps) in enumerate(inner):
        kind = container_of[module], type(module)
        if any(behind[step] & alike.get(kind, 0) for step in steps):
            classes.add(type(module))
        alike[kind] = alike.get(kind, 0) | 1 << k
    blocks: list[Call] = []
    for each in inner:  # Those within a call end before it does.
        if type(each.module) in classes and not any(
                other.steps.start >= each.steps.start for other in blocks):
            blocks.append(each)
    return [[nodes[k] for k in each.steps] for each in blocks]


def _calls_behind(calls: Sequence[Call], nodes: Sequence[fx.Node]) -> list[int]:
    """Return for each node the calls of whose steps it is made, as bits."""
    bits = dict.fromkeys(nodes, 0)
    for k, call in enumerate(calls):
        for step in call.steps:
            bits[nodes[step]] |= 1 << k
    found = []
    for node in nodes:
        for each in node.all_input_nodes:
            bits[node] |= bits[each]
        for changed in node.meta.get('writes', ()):
            bits[changed] |= bits[node]
        found.append(bits[node])
    return found
