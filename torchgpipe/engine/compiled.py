"""Compiled layers: let their code run in several threads at the same time.

Autograd has a thread for each accelerator, and gives all of them the same copy of the caller's
context variables. Compiled code enters it in backward, which two threads can not do at once:
"cannot enter context". A pipeline is what lets them try.
"""
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.private import compiled_codes, is_compiled, is_compiled_module, own_context

__all__ = ['check_compiler', 'has_compiled', 'part_contexts']


#: Whether the compiler takes calls of one thread for those of another.
_MIXES_THREADS_UP = torch.__version__ < '2.11'


def has_compiled(partition: nn.Module) -> bool:
    """Tell whether a partition is compiled, or a layer in it."""
    return 'forward' in partition.__dict__ or any(
        map(is_compiled_module, partition.modules()))


def check_compiler(partitions: Iterable[nn.Module]) -> None:
    """Refuse compiled layers of several threads where the compiler takes one for another.

    Raises:
        RuntimeError: There are some, and PyTorch is older than 2.11.
    """
    if _MIXES_THREADS_UP and any(map(has_compiled, partitions)):
        raise RuntimeError(
            'compiled layers on several devices need torch 2.11 or newer: the compiler of '
            f'{torch.__version__} can not be called by several threads. Put all partitions on '
            'one device, or do not compile them')


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
