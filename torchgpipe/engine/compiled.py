"""Compiled nodes of a graph: let them run in several threads at the same time.

Autograd has a thread for each accelerator, and gives all of them the same copy of the caller's
context variables. Compiled code enters it in backward, which two threads can not do at once:
"cannot enter context". A pipeline is what lets them try.
"""
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from torchgpipe.private import compiled_codes, is_compiled, is_compiled_module, own_context

__all__ = ['has_compiled', 'part_contexts']


def has_compiled(partition: nn.Module) -> bool:
    """Return whether a partition is compiled, or a layer in it."""
    return 'forward' in partition.__dict__ or any(
        map(is_compiled_module, partition.modules()))


def part_contexts(inputs: Iterable[Any], outputs: Iterable[Tensor]) -> None:
    """Let compiled nodes have a context each.

    Args:
        inputs: The nodes at which the part of the graph begins that is looked at.
        outputs: The tensors with which it ends.
    """
    if not compiled_codes():
        return
    seen = set(inputs)
    found: list[Any] = [y.grad_fn for y in outputs]
    while found:
        node = found.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if is_compiled(node):
            node.register_prehook(own_context)
        found += [next for next, _ in node.next_functions]
