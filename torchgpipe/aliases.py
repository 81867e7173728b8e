"""Type aliases that several modules share."""
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Tensors = tuple[Tensor, ...]

#: A tensor, or any structure of tensors: see :mod:`torchgpipe.structure`.
Value = Any

#: What a cell runs: a partition, or any callable from value to value.
Function = Callable[[Value], Value]

#: The place of a parameter or a buffer: a module and a name.
Slot = tuple[nn.Module, str]
