"""Where a graph is cut into layers: once between two calls with weights, where least goes across.

::

    conv1, bn, relu, pool │ conv2, bn, relu, add │ norm, linear, gelu │ linear, add
                          ▲                      ▲
          after the pool fewer elements go on    before the norm x alone goes on, and then
                                                 both x and norm(x)

A call with weights is that of a leaf which the user named, of a layer with a weight of two
dimensions or more, or of a function with such a weight. All else is cheap, and goes with the call
before it or after it. A cut is not made where what goes across is no tensor and no plain value,
and if possible not between a tensor and what changes it in place.
"""
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from torchgpipe.engine.memory import size_of
from torchgpipe.sequential.leaves import Leaves

__all__ = ['cut', 'steps_of']

_WITH_WEIGHTS = frozenset((
    F.bilinear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d,
    F.conv_transpose3d, F.embedding, F.embedding_bag, F.linear, F.multi_head_attention_forward,
    operator.matmul, torch.addmm, torch.baddbmm, torch.bmm, torch.einsum, torch.matmul, torch.mm,
    'addmm', 'baddbmm', 'bmm', 'matmul', 'mm'))


def steps_of(graph: fx.Graph) -> list[fx.Node]:
    """Give the nodes that compute something, in an order in which they can run.

    What only tells the shape and the like of a tensor comes as soon as it can, so that the shape
    goes to where it is used, and not the tensor. That of a parameter stays where it is asked for,
    where the parameter mostly is, too.
    """
    steps: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ('placeholder', 'get_attr', 'output'):
            continue
        place = len(steps)
        if (node.meta['kind'] == 'plain' and node.users and not node.meta['data']
                and all(each.op != 'get_attr' for each in node.all_input_nodes)):
            place = _earliest(node, steps)
        steps.insert(place, node)
    return steps


def _earliest(node: fx.Node, steps: Sequence[fx.Node]) -> int:
    """Give the place behind what gives a node's arguments, and behind what changes these."""
    needed = set(node.all_input_nodes)
    for place in range(len(steps), 0, -1):
        step = steps[place - 1]
        if step in needed or not needed.isdisjoint(step.meta['writes']):
            return place
    return 0


def cut(graph: fx.Graph, root: nn.Module, leaves: Leaves) -> list[list[fx.Node]]:
    """Cut the nodes of a graph into those of layers."""
    steps = steps_of(graph)
    across = _Across(graph, steps, root)
    calls = [k for k, step in enumerate(steps) if _has_weights(step, root, leaves)]
    places = [0]
    for before, after in zip(calls, calls[1:]):
        found = [place for place in range(before + 1, after + 1) if across.may_cut(place)]
        if found:
            places.append(min(found, key=lambda place: (*across.cost(place), -place)))
    return [steps[begin:end] for begin, end in zip(places, [*places[1:], len(steps)])]


def _has_weights(step: fx.Node, root: nn.Module, leaves: Leaves) -> bool:
    if step.op == 'call_module':
        module = root.get_submodule(str(step.target))
        return leaves.named(module) or any(x.dim() > 1 for x in module.parameters())
    return step.target in _WITH_WEIGHTS and any(
        not each.meta['input'] and each.meta['kind'] == 'tensor' for each in step.all_input_nodes)


class _Across:
    """What goes across each place between two steps.

    Args:
        graph: The graph.
        steps: Its steps.
        root: The model.
    """

    def __init__(self, graph: fx.Graph, steps: Sequence[fx.Node], root: nn.Module) -> None:
        number = len(steps) + 1
        self._bytes = [0] * number
        self._objects = [0] * number
        self._tensors = [0] * number
        self._changes = [0] * number
        index = {step: k for k, step in enumerate(steps)}
        for node in graph.nodes:
            if node.op not in ('get_attr', 'output'):
                self._count(node, index, len(steps))
        self._count_weights(steps, root)

    def _count(self, node: fx.Node, index: dict[fx.Node, int], end: int) -> None:
        begin = index.get(node, -1) + 1
        last = max((index.get(user, end) for user in node.users), default=-1)
        kind = node.meta['kind']
        for place in range(begin, last + 1):
            self._bytes[place] += node.meta['bytes']
            self._objects[place] += kind == 'object'
            self._tensors[place] += kind == 'tensor'
        for changed in node.meta['writes']:
            for alias in _aliases(changed, index, begin - 1):
                for place in range(index.get(alias, -1) + 1, begin):
                    self._changes[place] += 1

    def _count_weights(self, steps: Sequence[fx.Node], root: nn.Module) -> None:
        """Count parameters and buffers that steps on both sides use: both layers have them."""
        counted: dict[str, int] = {}
        for k, step in enumerate(steps):
            for name, size in _weights(step, root):
                for place in range(counted.get(name, k) + 1, k + 1):
                    self._bytes[place] += size
                counted[name] = k

    def may_cut(self, place: int) -> bool:
        """Tell whether only tensors and plain values go across, and a tensor at least."""
        return not self._objects[place] and self._tensors[place] > 0

    def cost(self, place: int) -> tuple[Any, ...]:
        """Give what makes one place better than another."""
        return self._changes[place] > 0, self._bytes[place]


def _weights(step: fx.Node, root: nn.Module) -> Iterator[tuple[str, int]]:
    for each in step.all_input_nodes:
        if each.op == 'get_attr':
            yield str(each.target), each.meta['bytes']
    if step.op == 'call_module':
        for name, x in root.get_submodule(str(step.target)).named_parameters():
            yield f'{step.target}.{name}', size_of(x)


def _aliases(changed: fx.Node, index: dict[fx.Node, int], place: int) -> list[fx.Node]:
    """Give a node that a step changes, and those in whose memory it is that are used later."""
    memory = changed.meta['memory']
    return [changed, *(node for node in index if node.meta['memory'] == memory is not None
                       and index[node] < place
                       and any(index.get(user, place + 1) > place for user in node.users))]
