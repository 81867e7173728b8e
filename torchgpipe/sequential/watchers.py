"""Who is told of what a thread does, and for how long."""
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

__all__ = ['Follower', 'Seat', 'Watcher']


class Watcher(Protocol):
    """Who is told which modules a forward calls, and what it reads of them."""

    @property
    def watches(self) -> bool:
        """Whether the forward runs now, and not a leaf."""

    def called(self, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...],
               kwargs: dict[str, Any]) -> Any:
        """Call a module."""

    def read(self, module: nn.Module, name: str, found: Any) -> Any:
        """Give an attribute."""

    def listed(self, module: nn.Module, name: str, tensor: torch.Tensor) -> Any:
        """Give a parameter or a buffer."""


class Follower(Watcher, Protocol):
    """Who is told of what a forward does."""

    def written(self, module: nn.Module, name: str) -> None:
        """Say that an attribute is about to be set."""

    def made(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
             ) -> Any:
        """Call a function that makes a tensor, or describes a type of numbers."""

    def is_a(self, value: Any, classes: Any) -> bool:
        """Tell whether what a value stands for is an instance."""

    def entered(self) -> None:
        """Say that grad mode, inference mode or autocast is about to be set."""

    def drew(self) -> None:
        """Say that a random number of Python's is about to be drawn."""

    def applied(self, function: type) -> None:
        """Say that PyTorch is about to apply a function that has a backward of its own."""


TWatcher = TypeVar('TWatcher', bound=Watcher)


class Seat(Generic[TWatcher]):
    """A watcher's place in a thread, as long as it watches.

    Args:
        watcher: The watcher.
    """

    def __init__(self, watcher: TWatcher) -> None:
        self._watcher: TWatcher | None = watcher
        self._thread = threading.get_ident()

    def taken(self) -> TWatcher | None:
        """Give the watcher, to the thread that it watches while it does."""
        if self._watcher is None or self._thread != threading.get_ident():
            return None
        return self._watcher if self._watcher.watches else None

    def leave(self) -> None:
        """Let nobody find it here any more."""
        self._watcher = None
