"""A layer that tags activations, as operations lose their tags."""
from typing import Any

from torch import Tensor, nn

from torchgpipe.shard.tags import check_dim, register_parallel_dim

__all__ = ['RegisterParallelDim']


class RegisterParallelDim(nn.Identity):  # A layer of PyTorch's, which conversions leave whole.
    """Say of an activation whether it is whole, or its last dimension this rank's part.

    Its output is the input, or the tuple of its inputs, in the same memory; each tensor of it is a
    new one, with the tag.

    Args:
        dim: None for whole activations, -1 or 1 for parts.

    Raises:
        ValueError: ``dim`` is another one.
    """

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        self.dim = check_dim(dim)

    def forward(self, input: Any) -> Any:
        """Tag a tensor, or each tensor of a tuple."""
        if isinstance(input, tuple):
            each = [self(value) for value in input]
            return type(input)(*each) if hasattr(input, '_fields') else tuple(each)
        if not isinstance(input, Tensor):
            return input
        tagged = input.view_as(input)
        register_parallel_dim(tagged, self.dim)
        return tagged

    def extra_repr(self) -> str:
        """Say the dimension."""
        return f'dim={self.dim}'
