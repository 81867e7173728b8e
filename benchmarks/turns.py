"""Turns: which partition a thread works for at the moment.

::

    forward      enter ──▶ layers ──▶ leave              whose turn it was before, goes on
    backward     recomputation: enter ──▶ leave
                 a gradient reaches the output ──▶ the partition's turn, until another one's
"""
import threading
from typing import Any, List, Optional, Sequence

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = ['Turns']


class Turns:
    """Follow the work of partitions through forward, recomputation and backward.

    Args:
        partitions: In their order.
    """

    def __init__(self, partitions: Sequence[nn.Module]) -> None:
        self._local = threading.local()
        self._handles: List[Any] = []
        for j, partition in enumerate(partitions):
            self._handles += [
                partition.register_forward_pre_hook(lambda *_, j=j: self._enter(j)),
                partition.register_forward_hook(
                    lambda _, args, output, j=j: self._leave(j, output))]

    @property
    def owner(self) -> Optional[int]:
        """Whose turn it is in this thread, if anyone's."""
        return getattr(self._local, 'owner', None)

    def give(self, j: Optional[int]) -> None:
        """Make it the turn of a partition in this thread, or nobody's."""
        self._local.owner = j

    def receive(self, j: int, grad: Tensor) -> None:
        """Take note that the gradient of a partition's output has reached it."""

    def close(self) -> None:
        """Stop following."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, j: int) -> None:
        self._local.__dict__.setdefault('stack', []).append(self.owner)
        self.give(j)

    def _leave(self, j: int, output: Any) -> None:
        self.give(self._local.stack.pop())
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda grad: self._turn(j, grad))

    def _turn(self, j: int, grad: Tensor) -> None:
        self.give(j)
        self.receive(j, grad)
