"""Type aliases that several modules share."""
from collections.abc import Callable

from torch import Tensor

Tensors = tuple[Tensor, ...]
TensorOrTensors = Tensor | Tensors

#: What a cell runs: a partition, or any callable from value to value.
Function = Callable[[TensorOrTensors], TensorOrTensors]
