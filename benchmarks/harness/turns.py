"""Turns: which partition a thread works for at the moment.

::

    forward      enter ──▶ layers ──▶ leave      whose turn it was before, goes on
    backward     recomputation: enter ──▶ leave
                 a node of a partition's graph: its turn, until a node of another one

Each worker numbers its own nodes. One thread runs the nodes of all partitions on the CPU, by these
numbers; so partitions may alternate in backward at any node.
"""

import threading
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from torchgpipe import is_recomputing
from torchgpipe.base.context import context
from torchgpipe.timeline.recorder import nodes_between, producers


class Turns:
    """Follow the work of partitions through forward, recomputation and backward.

    Args:
        partitions: In their order.
    """

    def __init__(self, partitions: Sequence[nn.Module]) -> None:
        self._local = threading.local()
        self._handles: list[Any] = []
        for j, partition in enumerate(partitions):
            self._handles += [
                partition.register_forward_pre_hook(lambda _, args, j=j: self._enter(j, args)),
                partition.register_forward_hook(
                    lambda _, args, output, j=j: self._leave(j, output)
                ),
            ]

    @property
    def owner(self) -> int | None:
        """The partition whose turn it is in this thread, or None."""
        return getattr(self._local, 'owner', None)

    def give(self, j: int | None) -> None:
        """Make it the turn of a partition in this thread, or of none."""
        self._local.owner = j

    def receive(self, j: int, grads: Sequence[Tensor]) -> None:
        """Take note that gradients have come to a node of a partition."""

    def close(self) -> None:
        """Stop following."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, j: int, args: Any) -> None:
        skips = [] if context.skips is None else [*context.skips.tensors.values()]
        self._local.__dict__.setdefault('stack', []).append(
            (self.owner, producers(_tensors((args, skips))))
        )
        self.give(j)

    def _leave(self, j: int, output: Any) -> None:
        owner, before = self._local.stack.pop()
        self.give(owner)
        if not is_recomputing():
            for node in nodes_between(before, producers(_tensors(output))):
                node.register_prehook(lambda grads: self._turn(j, grads))

    def _turn(self, j: int, grads: Sequence[Tensor]) -> None:
        if self.owner != j:
            self.give(j)
            self.receive(j, [grad for grad in grads if grad is not None])


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
