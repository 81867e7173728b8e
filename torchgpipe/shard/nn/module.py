"""Modules with sharded parameters, conversion of plain layers, and layers that read or write tags.

A copy, another device or a checkpoint may replace a shard by another parameter. So the module
that has it tags it again.
"""

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchgpipe.shard.collectives import draws, from_first
from torchgpipe.shard.ddp import check_wrapped
from torchgpipe.shard.parameter import (
    Layout,
    check_dim,
    get_parallel_dim,
    is_tagged,
    register_parallel_dim,
    slice,
)
from torchgpipe.shard.world import needed_by


class ParallelModule(nn.Module):
    """A module that has a shard of some parameters, such as the layers of this package.

    Derive from it to write your own layer::

        class Scale(ts.nn.ParallelModule):
            def __init__(self, features):
                super().__init__()
                # The last dimension of activations is split, and so is this.
                self.register_part('weight', (features,), dim=1)
                ts.nn.init.shard_init_helper_(torch.nn.init.ones_, self.weight)

            def forward(self, x):
                y = x * self.weight
                ts.register_parallel_dim(y, -1)
                return y
    """

    #: For pipelines: see :mod:`torchgpipe.base.context`.
    communicates = True

    def __init__(self) -> None:
        super().__init__()
        self._layouts: dict[str, Layout] = {}

    def register_part(
        self,
        name: str,
        shape: tuple[int, ...],
        dim: int | None,
        order: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Add a parameter of which each rank has a shard, without initial values.

        Args:
            name: Its name.
            shape: The shape of the full tensor.
            dim: The parallel dimension: see :func:`ts.register_parallel_attribute`.
            order: 0 for a weight of shape (out, in), or a bias; 1 for one of shape (number,
                features).
            device: Its device.
            dtype: Its type.
        """
        self._layouts[name] = layout = Layout(shape, dim, order)
        self.register_parameter(
            name, nn.Parameter(torch.empty(layout.local_shape(), device=device, dtype=dtype))
        )

    def _put_shard(self, name: str, full: Tensor, layout: Layout) -> None:
        """Add a parameter with this rank's shard of the first rank's full tensor."""
        self._layouts[name] = layout
        self.register_parameter(
            name, nn.Parameter(_shard_of_first(full, layout), full.requires_grad)
        )

    def _layouts_of(self, plain: Any, dim: int | None) -> dict[str, Layout]:
        """Return how the parameters of a plain layer are split, for :func:`convert`."""
        raise NotImplementedError

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add or replace a parameter.

        Raises:
            ValueError: It does not have the shape of this rank's shard.
        """
        layout = self._layouts.get(name)
        if layout is not None and param is not None:
            layout.check(name, param)
        super().register_parameter(name, param)
        self._tag()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, after a check that its shards are treated as shards."""
        check_wrapped()
        self._check_shards()
        return super().__call__(*args, **kwargs)

    def _check_shards(self) -> None:
        """Raise if a shard is computed, or was replaced by another parameter."""
        for name in self._layouts:
            what = f'the {name} of {type(self).__name__}'
            if name not in self._parameters:
                raise ValueError(
                    f'{what} is computed, as by weight_norm, a parametrization or pruning, and '
                    'these take it for a full tensor: norms and sums would be those of the shard '
                    'that this rank has. Write a layer of your own, derived from '
                    'ts.nn.ParallelModule'
                )
            parameter = self._parameters[name]
            if isinstance(parameter, nn.Parameter) and not is_tagged(parameter):
                raise ValueError(
                    f'{what} is another parameter than the layer was given, put there as '
                    'fully_shard does, which takes shards for copies of one tensor. Use '
                    'DistributedDataParallel or ZeroRedundancyOptimizer over '
                    f'ts.distributed.get_data_group(); or set it by layer.{name} = parameter'
                )

    def _tag(self) -> None:
        for name, layout in self._layouts.items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                layout.tag(parameter)

    # Further events replace parameters: another device or type, a copy, unpickling, and loading
    # after set_swap_module_params_on_conversion was called.

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._tag()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._tag()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._tag()
        errors: list[str] = args[-1]
        for name, layout in self._layouts.items():
            shape = getattr(state_dict.get(prefix + name), 'shape', None)
            if shape == layout.shape and [*shape] != layout.local_shape():
                errors.append(
                    f"{prefix}{name} is full, and the layer takes this rank's shard: "
                    'load ts.relocate_state_dict(model, state_dict)'
                )


def _shard_of_first(full: Tensor, layout: Layout) -> Tensor:
    """Return this rank's shard of the first rank's full tensor; one shard at a time is sent."""
    dim = layout.storage
    world = needed_by(dim)
    if full.is_meta:
        return torch.empty(layout.local_shape(), dtype=full.dtype, device='meta')
    if world is None:
        return full.detach().clone()
    pieces = (full,) if dim is None else slice(full, world.tensor_size, dim)
    for rank, piece in enumerate(pieces):
        sent = piece.to(world.mesh.device_type).clone(memory_format=torch.contiguous_format)
        from_first(sent, world)
        if dim is None or rank == world.tensor_rank:
            mine = sent.to(full.device)
    return mine


# --- conversion
# ----------------------------------------------------------------------------------


def convert(
    module: nn.Module, kind: type[nn.Module], new: type[ParallelModule], dim: int | None
) -> nn.Module:
    """Replace all layers of a kind within a module, or the module if it is one itself.

    A layer in several places stays one layer; a parameter of several layers raises an error.
    """
    check_dim(dim)
    plain = [layer for layer in module.modules() if type(layer) is kind]
    _refuse_shared(module, plain)
    converted = {layer: _like(layer, new, dim) for layer in plain}
    if module in converted:
        return converted[module]
    for parent in module.modules():
        for name, child in parent._modules.items():
            if child in converted:
                parent.register_module(name, converted[child])
    return module


def _refuse_shared(module: nn.Module, plain: list[nn.Module]) -> None:
    uses: Counter[nn.Parameter | None] = Counter()
    for layer in module.modules():
        uses.update(layer._parameters.values())
    for layer in plain:
        for name, parameter in layer.named_parameters(recurse=False):
            if uses[parameter] > 1:
                raise ValueError(
                    f'another layer has the {name} of {layer}, too, and would not have it '
                    'after conversion. Give each a copy, convert, and let both have one parameter '
                    'again, as in head.weight = embedding.weight, if both are split along the '
                    'same dimension in memory'
                )


def _like(plain: nn.Module, kind: type[ParallelModule], dim: int | None) -> ParallelModule:
    """Return the sharded layer for a plain one, with its options, its mode and its hooks."""
    new = kind.__new__(kind)
    new.__dict__.update(plain.__getstate__(), dim=dim)
    new._parameters = {}
    new._layouts = {}
    layouts = new._layouts_of(plain, dim)
    for name, parameter in plain._parameters.items():
        if parameter is None or name not in layouts:
            new.register_parameter(name, parameter)
        else:
            new._put_shard(name, parameter, layouts[name])
    missing = layouts.keys() - new._parameters.keys()
    if missing:
        raise ValueError(
            f'{plain} has no parameter {missing.pop()}: something computes it, '
            'such as weight_norm. Convert before that is put on'
        )
    return new


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
            tagged_values = [self(value) for value in input]
            if hasattr(input, '_fields'):
                return type(input)(*tagged_values)
            return tuple(tagged_values)
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

    def __init__(
        self, p: float = 0.5, inplace: bool = False, dim: int | str | None = 'tag'
    ) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f'p is a probability, from 0 to 1, not {p}')
        self.p = p
        self.inplace = inplace
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
                'give the layer dim'
            )
        return get_parallel_dim(input)

    def extra_repr(self) -> str:
        """Return its options."""
        return f'p={self.p}, inplace={self.inplace}, dim={self.dim}'
