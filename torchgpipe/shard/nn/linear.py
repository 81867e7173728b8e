"""Linear layers and embeddings, whose weight is split over the parallel group."""

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.shard.nn.functional import embedding, linear
from torchgpipe.shard.nn.init import shard_init_helper_
from torchgpipe.shard.nn.module import ParallelModule, convert
from torchgpipe.shard.parameter import Layout, check_dim, find


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

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dim: int | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
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
        return (
            f'in_features={self.in_features}, out_features={self.out_features}, '
            f'bias={self.bias is not None}, dim={self.dim}'
        )

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


class ParallelEmbedding(ParallelModule):
    """``nn.Embedding``, split over the ranks of the parallel group. Its output is full.

    Args:
        num_embeddings: The number of rows of the full table.
        embedding_dim: The number of its columns.
        padding_idx: A row that starts at zero, and gets no gradient.
        max_norm: Rows that are looked up are scaled, in place, to at most this norm.
        norm_type: The p of that norm.
        scale_grad_by_freq: Whether a row's gradient is divided by how often it was looked up.
        sparse: Whether the gradient of the weight is a sparse tensor.
        _weight: The initial full table.
        dim: The parallel dimension: 0 splits the rows, 1 or -1 the columns, None nothing.
        device: The device of the weight; on the meta device it takes no memory.
        dtype: The type of the weight.

    Raises:
        ValueError: ``dim`` has another value, ``padding_idx`` is not in the table, or the weight
            has another shape.
        RuntimeError: There are no parallel groups.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        dim: int | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = _checked(padding_idx, num_embeddings)
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse
        self.dim = check_dim(dim)
        shape = num_embeddings, embedding_dim
        if _weight is None:
            self.register_part('weight', shape, dim, 1, device, dtype)
            self.reset_parameters()
        elif tuple(_weight.shape) == shape:
            self._put_shard('weight', nn.Parameter(_weight), Layout(shape, dim, 1))
        else:
            raise ValueError(
                f'_weight is the full table, of shape {shape}, and not of {tuple(_weight.shape)}'
            )

    def reset_parameters(self) -> None:
        """Set initial values: this rank's shard of the values of ``nn.Embedding``."""
        shard_init_helper_(nn.init.normal_, self.weight)
        row = self.padding_idx
        if row is not None and self.dim == 0:
            row = find(row, self.num_embeddings)
        if row is not None:
            with torch.no_grad():
                self.weight[row] = 0

    def forward(self, input: Tensor) -> Tensor:
        """Look up: see :func:`ts.nn.functional.parallel_embedding`."""
        layout = self._layouts['weight']
        return embedding(
            input,
            self.weight,
            layout.shape,
            layout.storage,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )

    def extra_repr(self) -> str:
        """Return its sizes, and its options if they differ from the defaults."""
        usual = {
            'padding_idx': None,
            'max_norm': None,
            'norm_type': 2.0,
            'scale_grad_by_freq': False,
            'sparse': False,
        }
        options = [
            f'{name}={getattr(self, name)}'
            for name, value in usual.items()
            if getattr(self, name) != value
        ]
        return ', '.join(
            [str(self.num_embeddings), str(self.embedding_dim), *options, f'dim={self.dim}']
        )

    @classmethod
    def convert_parallel_embedding(cls, module: nn.Module, dim: int | None = None) -> nn.Module:
        """Replace each ``nn.Embedding`` in a module, or the module itself, by a sharded table.

        They have the same values, type, device, mode, hooks and options. All ranks get
        the values of the first one.

        Args:
            module: It stays as it is if it is an ``nn.Embedding`` itself; otherwise its layers are
                replaced. Layers of classes derived from ``nn.Embedding`` are left alone.
            dim: The parallel dimension.

        Returns:
            The sharded table, or the module.

        Raises:
            ValueError: ``dim`` is not a parallel dimension, or a weight also belongs to another
                layer.
        """
        return convert(module, nn.Embedding, cls, dim)

    def _layouts_of(self, plain: Any, dim: int | None) -> dict[str, Layout]:
        return {'weight': Layout((plain.num_embeddings, plain.embedding_dim), dim, 1)}


def _checked(padding_idx: int | None, number: int) -> int | None:
    """Return the number of the row for padding, counted from the first row."""
    if padding_idx is None:
        return None
    if not -number <= padding_idx < number:
        raise ValueError(
            f'padding_idx is the number of a row, less than {number}, not {padding_idx}'
        )
    return padding_idx % number
