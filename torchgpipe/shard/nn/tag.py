"""Layers that read or write the tag of an activation: full, or this rank's shard."""
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from torchgpipe.shard.draws import draws
from torchgpipe.shard.tags import check_dim, get_parallel_dim, is_tagged, register_parallel_dim

__all__ = ['ParallelDropout', 'RegisterParallelDim']


class RegisterParallelDim(nn.Identity):  # A layer of PyTorch's, which conversions leave whole.
    """Tag an activation as full, or as this rank's shard in its last dimension.

    Its output is the input, or the tuple of its inputs, in the same memory. Each tensor in it is a
    new object, with the tag.

    Args:
        dim: None for full activations, -1 or 1 for shards.

    Raises:
        ValueError: ``dim`` has another value.
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
        """Return the dimension."""
        return f'dim={self.dim}'


class ParallelDropout(nn.Module):
    """``nn.Dropout`` with one mask on all ranks for full activations, and one per rank for shards.

    Masks depend on ``torch.manual_seed``, also in a recomputation. If activations are full, and
    all ranks have the same seed, the mask is the same as in one process.

    Args:
        p: The probability of zero.
        inplace: Whether the input is changed in place.
        dim: None for full activations, -1 or 1 for this rank's shard; by default, the tag of the
            input. The output gets the same tag.

    Raises:
        ValueError: In training, the input has no tag, and ``dim`` was left out.
    """

    #: For pipelines: see :mod:`torchgpipe.base.context`.
    communicates = True

    def __init__(self, p: float = 0.5, inplace: bool = False,
                 dim: int | str | None = 'tag') -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f'p is a probability, from 0 to 1, not {p}')
        self.p, self.inplace = p, inplace
        self.dim = 'tag' if dim == 'tag' else check_dim(dim)

    def forward(self, input: Tensor) -> Tensor:
        """Set some elements to zero, in training."""
        if not self.training and self.dim == 'tag' and not is_tagged(input):
            return input
        dim = self._dim_of(input)
        if self.training and 0 < self.p < 1:
            with draws(dim, input.device):
                y = F.dropout(input, self.p, True, self.inplace)
        else:
            y = F.dropout(input, self.p, self.training, self.inplace).view_as(input)
        register_parallel_dim(y, dim)
        return y

    def _dim_of(self, input: Tensor) -> int | None:
        if not isinstance(self.dim, str):
            return self.dim
        if not is_tagged(input):
            raise ValueError(
                f"{self}: no tag says whether the input is full or this rank's shard. Put "
                'ts.nn.RegisterParallelDim(None) or (-1) after the operation that has lost it, or '
                'give the layer dim')
        return get_parallel_dim(input)

    def extra_repr(self) -> str:
        """Return its options."""
        return f'p={self.p}, inplace={self.inplace}, dim={self.dim}'
