"""The part of an autograd graph that belongs to one call of some layers."""
from collections.abc import Iterable
from typing import Any

from torch import Tensor

__all__ = ['last_nodes', 'nodes_between', 'producers']

#: Nodes that take a gradient out of a call: into a parameter, or into a portal.
EXITS = ('torch::autograd::AccumulateGrad', 'PortalOrangeBackward')


def producers(tensors: Iterable[Tensor]) -> set[Any]:
    """Give the nodes that tensors come from, and ``None`` for those that come from nowhere."""
    return {None, *(tensor.grad_fn for tensor in tensors)}


def nodes_between(input: Iterable[Tensor], output: Iterable[Tensor]) -> list[Any]:
    """Give the nodes that backward runs between output and input."""
    found, stack, seen = [], list(producers(output)), producers(input)
    while stack:
        node = stack.pop()
        if node not in seen and node.name() not in EXITS:
            seen.add(node)
            found.append(node)
            stack += [other for other, _ in node.next_functions]
    return found


def last_nodes(input: Iterable[Tensor], nodes: Iterable[Any]) -> list[Any]:
    """Choose the nodes that give the gradient of the input, or of parameters if it has none."""
    outside = producers(input) - {None}
    after = {node: {other for other, _ in node.next_functions if other is not None}
             for node in nodes}
    to_input = [node for node, others in after.items() if others & outside]
    return to_input or [node for node, others in after.items() if not others - outside or any(
        other.name() in EXITS for other in others)]
