"""Modes: grad mode and the like, which a forward may not change, and the training mode.

A program that goes by the training mode is recorded in both. If the recordings differ, what took
the mode last, before they do, is to blame.
"""
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

__all__ = ['ModeTaken', 'first_difference', 'modes_now', 'steps_of']


class ModeTaken(NamedTuple):
    """A place where a program goes by the training mode.

    Attributes:
        place: How many steps were there.
        module: The innermost submodule, in a list; none for the model itself.
        line: The line.
    """

    place: int
    module: list[nn.Module]
    line: str


def modes_now() -> tuple[Any, ...]:
    """Give the modes that a part of a forward may be in, and a layer would not be."""
    kinds = {'cpu', *([str(torch.accelerator.current_accelerator())]
                      if torch.accelerator.is_available() else [])}
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds))


def first_difference(graph: fx.Graph, constants: dict[str, Any], other: fx.Graph,
                     others: dict[str, Any]) -> int | None:
    """Give the number of steps before the first one that differs in two recordings, if one does.

    Args:
        graph: A recording.
        constants: What it refers to by name.
        other: Another one.
        others: What that refers to.
    """
    steps, other_steps = steps_of(graph), steps_of(other)
    for k, (a, b) in enumerate(zip(steps, other_steps)):
        if a.format_node() != b.format_node() or not all(map(
                _same, _constants_of(a, constants), _constants_of(b, others))):
            return k
    return None  # Each ends with its output, so neither goes on where the other one ends.


def steps_of(graph: fx.Graph) -> list[fx.Node]:
    """Give the nodes but for those that read an attribute, perhaps for nothing."""
    return [node for node in graph.nodes if node.op != 'get_attr']


def _constants_of(node: fx.Node, constants: dict[str, Any]) -> list[Any]:
    return [constants[str(a)] for a in (node.target, *node.args) if str(a) in constants]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = [(x.shape, x.dtype, x.device) for x in (one, other)]
        return alike[0] == alike[1] and (one.is_meta or torch.equal(one, other))
    return bool(one == other)
