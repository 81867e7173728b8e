"""Type aliases that several rooms share."""
from typing import Callable, Tuple, Union

from torch import Tensor

Tensors = Tuple[Tensor, ...]
TensorOrTensors = Union[Tensor, Tensors]

#: What a cell runs: a partition, or any callable from value to value.
Function = Callable[[TensorOrTensors], TensorOrTensors]
