"""Linear layers whose weight is split over the parallel group."""
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.shard.nn.functional import linear
from torchgpipe.shard.nn.init import shard_init_helper_
from torchgpipe.shard.nn.module import ParallelModule, convert
from torchgpipe.shard.parameter import Layout, check_dim

__all__ = ['ParallelLinear']


class ParallelLinear(ParallelModule):
    """``nn.Linear``, split over the ranks of the parallel group.

    ========  ======================  ====================  ======================
    ``dim``   weight of this rank     input                 output
    ========  ======================  ====================  ======================
    None      all                     full                  full
    1 or -1   (outputs / n, inputs)   full                  a shard, tagged -1
    0         (outputs, inputs / n)   full, or a shard      full
    ========  ======================  ====================  ======================

    The bias is split where the outputs are. Sizes need not be divisible.

    Args:
        in_features: The number of inputs, of the full tensor.
        out_features: The number of outputs, of the full tensor.
        bias: Whether there is a bias.
        dim: The parallel dimension: 1 or -1 splits the outputs, 0 the inputs, None nothing.
        device: The device of the weight; on the meta device it takes no memory.
        dtype: The type of the weight.

    Raises:
        ValueError: ``dim`` has another value.
        RuntimeError: There are no parallel groups.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True,
                 dim: int | None = None, *, device: Any = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.dim = check_dim(dim)
        self.register_part('weight', (out_features, in_features), dim, 0, device, dtype)
        if bias:
            self.register_part('bias', (out_features,), _dim_of_bias(dim), 0, device, dtype)
        else:
            self.register_parameter('bias', None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set initial values: this rank's shard of the values of ``nn.Linear``."""
        shard_init_helper_(nn.init.kaiming_uniform_, self.weight, a=sqrt(5))
        if self.bias is not None:
            bound = 1 / sqrt(self.in_features) if self.in_features else 0
            shard_init_helper_(nn.init.uniform_, self.bias, a=-bound, b=bound)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer: see :func:`ts.nn.functional.parallel_linear`."""
        return linear(input, self.weight, self.bias, self.dim, self.in_features, self)

    def extra_repr(self) -> str:
        """Return its sizes."""
        return (f'in_features={self.in_features}, out_features={self.out_features}, '
                f'bias={self.bias is not None}, dim={self.dim}')

    @classmethod
    def convert_parallel_linear(cls, module: nn.Module, dim: int | None = None) -> nn.Module:
        """Replace each ``nn.Linear`` in a module, or the module itself, by a sharded layer.

        They have the same values, type, device, mode, hooks and options. All ranks get
        the values of the first one.

        Args:
            module: It stays as it is if it is an ``nn.Linear`` itself; otherwise its layers are
                replaced. Layers of classes derived from ``nn.Linear`` are left alone.
            dim: The parallel dimension.

        Returns:
            The sharded layer, or the module.

        Raises:
            ValueError: ``dim`` is not a parallel dimension, or a weight also belongs to another
                layer.
        """
        return convert(module, nn.Linear, cls, dim)

    def _layouts_of(self, plain: Any, dim: int | None) -> dict[str, Layout]:
        shape = plain.out_features, plain.in_features
        return {'weight': Layout(shape, dim), 'bias': Layout(shape[:1], _dim_of_bias(dim))}


def _dim_of_bias(dim: int | None) -> int | None:
    """Return the parallel dimension of a bias: it is split where the outputs are."""
    return None if dim == 0 else dim
