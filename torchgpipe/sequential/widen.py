"""Guards that a single sample may pass: branches that change the program but not its results.

::

    if len(x) != len(rows):               8 and 1: the way of the sample
        rows = rows.expand(len(x), -1)    1 and 1: the other way; to expand would change nothing

The graph of the sample is computed for one sample of it. If a guard does not pass, the forward is
recorded for that one as well. If both graphs are the same, but for steps of the first one that
give what they get, they are one program as long as these do: the guards become one of that.
"""
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx

from torchgpipe.sequential.effects import same_random_numbers
from torchgpipe.sequential.errors import ConversionError, NeedsLeaf
from torchgpipe.sequential.nodes import (Constant, calls_in, compute, guard, guard_ways, is_same,
                                         same_constants)
from torchgpipe.sequential.steps import StepTracer

__all__ = ['asks_for_all', 'widen']


def widen(tracer: StepTracer, one: Sequence[Tensor], record: Callable[[], StepTracer]) -> None:
    """Let one sample pass the guards of a graph, if what it computes is right for that.

    Args:
        tracer: What has recorded the graph.
        one: The inputs for one sample.
        record: Records the forward for that.
    """
    if not any(node.target is guard for node in tracer.graph.nodes):
        return
    try:
        found = _computed(tracer, one)
    except Exception:  # It does not take one sample, as a batch normalization does not.
        return
    failing = [node for node in tracer.graph.nodes if node.target is guard
               and found[node.args[0]] != node.args[1]]
    if not failing:
        return
    try:
        other = record()
    except (ConversionError, NeedsLeaf):
        return
    ways = _Ways(tracer, other, found)
    if ways.are_one() and [*ways.others] == failing:
        _guard_both(tracer.graph, ways)


def asks_for_all(tracer: StepTracer, other: StepTracer) -> bool:
    """Return whether a graph is as another one, and guards at least what that does."""
    return _Ways(tracer, other, {}).are_one()


def _computed(tracer: StepTracer, inputs: Sequence[Tensor]) -> dict[Any, Any]:
    """Return what each node of a graph gives for some inputs, past all guards."""
    found: dict[Any, Any] = {}
    left = iter(inputs)

    with torch.no_grad(), same_random_numbers():
        for node in tracer.graph.nodes:
            target = str(node.target)
            if node.op == 'placeholder':
                found[node] = next(left)
            elif node.op == 'get_attr':
                found[node] = (tracer.constants[target] if target in tracer.constants
                               else attrgetter(target)(tracer.root))
            elif node.op != 'output' and node.target is not guard:
                found[node] = compute(tracer.root, node, *_arguments(node, found.get))
    return found


def _arguments(node: fx.Node, value_of: Callable[[fx.Node], Any]) -> Any:
    """Return the arguments of a node, with something for each node and object in them."""
    def value(x: Any) -> Any:
        return value_of(x) if isinstance(x, fx.Node) else x.value if type(x) is Constant else x

    return fx.node.map_aggregate((node.args, node.kwargs), value)


class _Ways:
    """Two graphs of one forward, node by node.

    Args:
        one, other: What has recorded them.
        found: What each node of the first one gives with the inputs of the other.

    Attributes:
        others: What guards of the first one expect in the other.
        same: Steps of the first one alone, which give what they get.
    """

    def __init__(self, one: StepTracer, other: StepTracer, found: dict[Any, Any]) -> None:
        self.others: dict[fx.Node, Any] = {}
        self.same: list[fx.Node] = []
        self._one, self._other, self._found = one, other, found
        inputs = ([x for x in each.graph.nodes if x.op == 'placeholder'] for each in (one, other))
        self._twins: dict[Any, fx.Node] = dict(zip(*inputs))
        named = {str(b.target): b for b in other.graph.nodes if b.op == 'get_attr'}
        constants = {name: value for name, value in other.constants.items() if name in named}
        for a in one.graph.nodes:
            if a.op == 'get_attr':
                name: str | None = str(a.target)
                if name in one.constants:
                    name = next((other for other, value in constants.items()
                                 if same_constants(one.constants[name], value)), None)
                elif name in constants:
                    name = None
                if name in named:
                    self._twins[a] = named[name]

    def are_one(self) -> bool:
        """Return whether all nodes are the same, but for those that give what they get."""
        ahead, behind = [x for x in calls_in(self._other.graph) if x.op != 'placeholder'], []
        for node in calls_in(self._one.graph):
            if node.op == 'placeholder':
                continue
            if ahead and self._match(node, ahead[0]):
                behind.append(ahead.pop(0))
                self._twins[node] = behind[-1]
            elif node.op == 'output' or not self._may_be_left_out(node, behind):
                return False
        return True  # Each ends with its output.

    def _match(self, a: fx.Node, b: fx.Node) -> bool:
        if a.op != b.op or a.target != b.target:
            return False
        if a.target is not guard:
            return bool(_arguments(a, self._twins.get) == _arguments(b, lambda x: x))
        if self._twins.get(a.args[0]) is not b.args[0]:
            return False
        if a.args[1] != b.args[1]:
            self.others[a] = b.args[1]
        return True

    def _may_be_left_out(self, node: fx.Node, behind: Sequence[fx.Node]) -> bool:
        before: Any = node.args[0] if node.args else None
        # A layer may do more than what it gives.
        if before in self._twins and node.op != 'call_module' and not node.meta['writes']:
            if is_same(self._found.get(before), self._found.get(node)):
                self._twins[node] = self._twins[before]
                self.same.append(node)
                return True
        if node.meta['kind'] != 'plain':
            return node.target is guard
        for twin in behind:  # It may have been asked for before.
            if self._match(node, twin):
                self._twins[node] = twin
        return True


def _guard_both(graph: fx.Graph, ways: _Ways) -> None:
    """Put one guard in the place of those that one of two ways does not pass."""
    sames = []
    for node in ways.same:
        with graph.inserting_after(node):
            sames.append(graph.call_function(is_same, (node.args[0], node)))
        sames[-1].meta = {**node.meta, 'kind': 'plain', 'bytes': 0, 'memory': None, 'writes': []}
    guards = [*ways.others]
    order = {node: k for k, node in enumerate(graph.nodes)}
    with graph.inserting_after(max([*guards, *sames], key=order.__getitem__)):
        both = graph.call_function(guard_ways, (
            [each.args[0] for each in guards], [each.args[1] for each in guards],
            [*ways.others.values()], sames, [each.args[2:] for each in guards]))
    both.meta = dict(guards[0].meta)
    for each in guards:
        graph.erase_node(each)
