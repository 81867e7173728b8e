"""Cuts of a graph into layers, at blocks or between them, and the path of values.

:func:`blocks_among` finds the calls of blocks::

    stages.0.blocks.0 ─▶ stages.0.blocks.1 ─▶ stages.1.blocks.0     three blocks
    ╰──────────── stages.0 ──────────────╯    ╰── stages.1 ───╯     no blocks: these are in them

    experts.0(x) + experts.1(x)                                     no blocks: side by side

A class is a class of blocks under two conditions. A list, a dict or a sequential module has
modules of the class with two weights of two dimensions or more. The result of a call of one such
module goes to a later one. All modules of the class in such a container count, unless they contain
blocks.

:func:`cut_graph` makes one cut between two calls with weights, where the least data crosses::

    conv1, bn, relu, pool │ conv2, bn, relu, add │ norm, linear, gelu │ linear, add
                          ▲                      ▲
          after the pool fewer elements go on    before the norm x alone goes on, and then
                                                 both x and norm(x)

A call with weights is a call of a leaf that the user named, or of a layer or function with a
weight of two dimensions or more. All other steps are cheap, and join the call before or after
them. Only tensors and plain values may cross a cut. If possible, there is no cut between a tensor
and a step that changes it in place.

This is the grain of layers. With the grain of blocks, cuts are only made between blocks. A cut may
also follow the first steps of a block, if these change its input in place. With the grain of
operations, there are also cuts between any two steps that return tensors, but not before a change
in place.

:func:`routes` forwards a value to the next layer, or lets it skip layers that do not use it::

    layer      0            1            2            3
    a          made ──skip───────────▶ used ─forward▶ used       on to the next that uses it
    b                     made ─forward▶ used
    n          made ─forward▶ · ─forward▶ ·  ─forward▶ used      a number costs nothing

So no value crosses a boundary twice, and no device holds a tensor that it does not use. A
``torch.device``, on which a layer makes a tensor, is not passed on. The layer uses the device of
its input instead.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn import functional as F

from torchgpipe.base.structure import size_of
from torchgpipe.sequential.leaf_modules import LeafModules

_CONTAINERS = nn.ModuleDict, nn.ModuleList, nn.Sequential


class Call(NamedTuple):
    """The call of a module that a recording has looked into."""

    module: nn.Module
    #: The positions of its steps in the graph.
    steps: range


def blocks_among(calls: Sequence[Call], root: nn.Module, graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the steps of each call of a block."""
    container_of = {
        module: each
        for each in root.modules()
        if isinstance(each, _CONTAINERS)
        for module in each.children()
    }
    inner = []
    for call in calls:
        if call.module in container_of:
            matrices = [x for x in call.module.parameters() if x.dim() > 1]
            if len(matrices) > 1:
                inner.append(call)
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
    for call in inner:  # Inner calls end before outer ones.
        has_inner_block = any(block.steps.start >= call.steps.start for block in blocks)
        if type(call.module) in classes and not has_inner_block:
            blocks.append(call)
    steps_of_blocks = []
    for block in blocks:
        steps_of_blocks.append([nodes[k] for k in block.steps])
    return steps_of_blocks


def _calls_behind(calls: Sequence[Call], nodes: Sequence[fx.Node]) -> list[int]:
    """Return for each node, as bits, the calls whose steps it depends on."""
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


#: The grains of cuts, from coarse to fine.
GRAINS = 'block', 'layer', 'operation'

_WITH_WEIGHTS = frozenset(
    (
        F.bilinear,
        F.conv1d,
        F.conv2d,
        F.conv3d,
        F.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        F.embedding,
        F.embedding_bag,
        F.linear,
        F.multi_head_attention_forward,
        operator.matmul,
        torch.addmm,
        torch.baddbmm,
        torch.bmm,
        torch.einsum,
        torch.matmul,
        torch.mm,
        'addmm',
        'baddbmm',
        'bmm',
        'matmul',
        'mm',
    )
)


def _ordered(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes that compute something, in an order in which they can run.

    Nodes that only return properties of a tensor, such as its shape, come as early as possible.
    Then the shape is passed on to its user, and not the tensor. Properties of a parameter keep
    their place, because the parameter is mostly used there as well.
    """
    steps: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ('placeholder', 'get_attr', 'output'):
            continue
        position = len(steps)
        if (
            node.meta['kind'] == 'plain'
            and node.users
            and not node.meta['data']
            and all(each.op != 'get_attr' for each in node.all_input_nodes)
        ):
            position = _earliest(node, steps)
        steps.insert(position, node)
    return steps


def _earliest(node: fx.Node, steps: Sequence[fx.Node]) -> int:
    """Return the position after the steps that compute or change a node's arguments."""
    needed = set(node.all_input_nodes)
    for position in range(len(steps), 0, -1):
        step = steps[position - 1]
        if step in needed or not needed.isdisjoint(step.meta['writes']):
            return position
    return 0


def cut_graph(
    graph: fx.Graph,
    root: nn.Module,
    leaves: LeafModules,
    grain: str,
    blocks: Iterable[Iterable[fx.Node]],
) -> list[list[fx.Node]]:
    """Return the steps of each layer that a graph is cut into."""
    steps = _ordered(graph)
    across = _Across(graph, steps, root, blocks if grain == 'block' else ())
    with_weights = [k for k, step in enumerate(steps) if _has_weights(step, root, leaves)]
    found = {0, *_between(with_weights, across.may_cut, across)}
    if grain == 'operation':
        tensors = [k for k, step in enumerate(steps) if step.meta['kind'] == 'tensor']
        found.update(_between(tensors, across.may_always_cut, across))
    cuts = sorted(found)
    return [steps[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(steps)])]


def _between(
    calls: Sequence[int], may_cut: Callable[[int], bool], across: '_Across'
) -> Iterator[int]:
    """Yield the best place between any two calls, unless all places are within a block."""
    for before, after in pairwise(calls):
        found = [*filter(may_cut, range(before + 1, after + 1))]
        if not all(map(across.is_in_block, found)):
            yield min(found, key=lambda k: (*across.cost(k), -k))


def _has_weights(step: fx.Node, root: nn.Module, leaves: LeafModules) -> bool:
    if step.op == 'call_module':
        module = root.get_submodule(str(step.target))
        return leaves.named(module) or any(x.dim() > 1 for x in module.parameters())
    return step.target in _WITH_WEIGHTS and any(
        not each.meta['input'] and each.meta['kind'] == 'tensor' for each in step.all_input_nodes
    )


class _Across:
    """The values that cross each place before a step of a graph, and after the last step."""

    def __init__(
        self,
        graph: fx.Graph,
        steps: Sequence[fx.Node],
        root: nn.Module,
        blocks: Iterable[Iterable[fx.Node]],
    ) -> None:
        self._bytes, self._objects, self._tensors, self._changes, self._blocks = (
            [0] * (len(steps) + 1) for _ in range(5)
        )
        index = {step: k for k, step in enumerate(steps)}
        for node in graph.nodes:
            if node.op not in ('get_attr', 'output'):
                self._count(node, index, len(steps))
        self._count_weights(steps, root)
        for block in blocks:
            own = {step for step in block if step in index}
            within = [index[step] for step in own if step.meta['kind'] != 'plain']
            first = min(within, default=0)
            last = max(within, default=0)
            while first and steps[first - 1] in own:  # steps that return its input's shape
                first -= 1
            for k in range(first + 1, last + 1):
                self._blocks[k] += 1

    def _count(self, node: fx.Node, index: dict[fx.Node, int], end: int) -> None:
        begin = index.get(node, -1) + 1
        last = max((index.get(user, end) for user in node.users), default=-1)
        kind = node.meta['kind']
        for k in range(begin, last + 1):
            self._bytes[k] += node.meta['bytes']
            self._objects[k] += kind == 'object'
            self._tensors[k] += kind == 'tensor'
        for changed in node.meta['writes']:
            for alias in _aliases(changed, index, begin - 1):
                for k in range(index.get(alias, -1) + 1, begin):
                    self._changes[k] += 1

    def _count_weights(self, steps: Sequence[fx.Node], root: nn.Module) -> None:
        """Count parameters and buffers that steps on both sides use: both layers have them."""
        counted: dict[str, int] = {}
        for k, step in enumerate(steps):
            for name, size in _weights(step, root):
                for between in range(counted.get(name, k) + 1, k + 1):
                    self._bytes[between] += size
                counted[name] = k

    def may_cut(self, k: int) -> bool:
        """Return whether only tensors and plain values cross, with at least one tensor."""
        return not self._objects[k] and self._tensors[k] > 0

    def may_always_cut(self, k: int) -> bool:
        """Return whether a cut is possible, and no crossing tensor is changed in place later."""
        return self.may_cut(k) and not self._changes[k]

    def is_in_block(self, k: int) -> bool:
        """Return whether both sides are in one block."""
        return self._blocks[k] > 0

    def cost(self, k: int) -> tuple[Any, ...]:
        """Return a cost to compare cuts by."""
        return self._changes[k] > 0, self.is_in_block(k), self._bytes[k]


def _weights(step: fx.Node, root: nn.Module) -> Iterator[tuple[str, int]]:
    for each in step.all_input_nodes:
        if each.op == 'get_attr':
            yield str(each.target), each.meta['bytes']
    if step.op == 'call_module':
        for name, x in root.get_submodule(str(step.target)).named_parameters():
            yield f'{step.target}.{name}', size_of(x)


def _aliases(changed: fx.Node, index: dict[fx.Node, int], position: int) -> list[fx.Node]:
    """Return a node that a step changes, and nodes with the same memory that are used later."""
    memory = changed.meta['memory']
    aliases = [changed]
    for node, place in index.items():
        if node.meta['memory'] == memory is not None and place < position:
            last_use = max((index.get(user, position + 1) for user in node.users), default=-1)
            if last_use > position:
                aliases.append(node)
    return aliases


@dataclass
class Route:
    """The inputs and outputs of one layer; skips come with their names."""

    received: list[fx.Node] = field(default_factory=list)
    popped: list[tuple[str, fx.Node]] = field(default_factory=list)
    forwarded: list[fx.Node] = field(default_factory=list)
    stashed: list[tuple[str, fx.Node]] = field(default_factory=list)


def by_use(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of a graph, arguments before users, in an order that only uses decide.

    A forward may loop over a set, whose order differs between processes. Then the recorded orders
    differ as well, but not the order in which the output uses the values::

        recorded on one rank       a  b  output(f(b, a))
        recorded on another one    b  a  output(f(b, a))        by use, on both: b  a  f  output
    """
    ends = [node for node in graph.nodes if not node.users]
    ends.sort(key=lambda node: node.op != 'output')
    order: dict[fx.Node, None] = {}
    for end in ends:
        waiting = [(end, iter(end.all_input_nodes))]
        while waiting:
            node, inputs = waiting[-1]
            first = next((x for x in inputs if x not in order), None)
            if first is None:
                order.setdefault(node)
                waiting.pop()
            else:
                waiting.append((first, iter(first.all_input_nodes)))
    return [*order]


def routes(graph: fx.Graph, layers: Sequence[Sequence[fx.Node]]) -> list[Route]:
    """Return the route of each layer that a graph is cut into.

    Each layer but the last forwards at least one tensor, as a pipeline requires. Values are in
    the order of :func:`by_use`, so that ranks that converted the model agree on it.
    """
    layer_of = {node: k for k, layer in enumerate(layers) for node in layer}
    last = len(layers) - 1
    stops: dict[fx.Node, set[int]] = {}
    for node in by_use(graph):
        if node.op in ('get_attr', 'output') or node.meta['device']:
            continue
        first = layer_of.get(node, 0)
        used = {layer_of.get(user, last) for user in node.users} - {first}
        if used:
            plain = node.meta['kind'] == 'plain'
            stops[node] = {first, *(range(first, max(used) + 1) if plain else used)}
    for k in range(last):
        _forward_a_tensor(k, stops)
    return _routes(stops, len(layers))


def _forward_a_tensor(k: int, stops: dict[fx.Node, set[int]]) -> None:
    """Make the smallest tensor that crosses a boundary stop on both sides, if none does yet."""
    passing = [
        node
        for node, layers in stops.items()
        if node.meta['kind'] == 'tensor' and min(layers) <= k < max(layers)
    ]
    if not any({k, k + 1} <= stops[node] for node in passing):
        # Of equal sizes the last one by use, which is most often an input on its way.
        stops[min(reversed(passing), key=lambda node: int(node.meta['bytes']))] |= {k, k + 1}


def _routes(stops: dict[fx.Node, set[int]], number: int) -> list[Route]:
    found = [Route() for _ in range(number)]
    for node, layers in stops.items():
        path = sorted(layers)
        for here, there in pairwise(path):
            if there == here + 1:
                found[here].forwarded.append(node)
                found[there].received.append(node)
            else:
                name = f'{node.name} to {there}'
                found[here].stashed.append((name, node))
                found[there].popped.append((name, node))
    return found
