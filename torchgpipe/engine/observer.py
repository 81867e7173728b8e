"""Observers of a running pipeline, such as a recorder: the events that they receive."""
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from torchgpipe.base.structure import Value
from torchgpipe.engine.stream import AbstractStream
from torchgpipe.schedule.action import Action

__all__ = ['Observer', 'observers']


class Observer(Protocol):
    """Whoever observes. It is called in the threads that do the work."""

    def cell(self, i: int, m: int, j: int, value: Value, skips: Sequence[Tensor | None]
             ) -> Callable[[Value], None]:
        """Take note that layers start, in a first pass or in a recomputation.

        Args:
            i: The micro-batch.
            m: How many there are.
            j: The partition.
            value: The input.
            skips: What comes in beside it.

        Returns:
            What to call with the output.
        """

    def act(self, run: Callable[[Action], None], action: Action) -> None:
        """Run an action of a step by a schedule."""

    def copy(self, source: AbstractStream, target: AbstractStream) -> Callable[[], None]:
        """Take note that a copy is about to be queued, and give what to call afterwards."""


#: Those who are told of copies, whichever pipeline these are for.
observers: list[Observer] = []
