"""Observers: notified of cells, actions and copies while they run."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from torchgpipe.base.structure import Value
from torchgpipe.engine.streams import AbstractStream
from torchgpipe.schedule.schedule import Action


class Observer(Protocol):
    """An observer of cells, actions and copies. It is called in the threads that run them."""

    def cell(
        self,
        i: int,
        m: int,
        j: int,
        value: Value,
        skips: Sequence[Tensor | None],
    ) -> Callable[[Value], None]:
        """Record the start of a cell's layers in any pass; return a function for their output."""

    def act(
        self,
        run: Callable[[Action], None],
        action: Action,
    ) -> None:
        """Run an action of a step by a schedule."""

    def copy(
        self,
        source: AbstractStream,
        target: AbstractStream,
    ) -> Callable[[], None]:
        """Record the start of a copy, and return a function to call when it is queued."""


#: The observers of copies, in all pipelines. A copy is made by an autograd function, which does
#: not belong to a pipeline.
observers: list[Observer] = []
