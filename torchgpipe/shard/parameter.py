"""Parameters of which each rank has a part: plain ones, which know what they are a part of.

What they know stands in attributes of the parameter. A copy, another device or a checkpoint may
put another parameter in its place, so the module that has it tags it again.
"""
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.shard import sizes
from torchgpipe.shard.collectives import from_first
from torchgpipe.shard.tags import is_tagged, register_parallel_attribute, storage_dim, to_storage
from torchgpipe.shard.world import current, needed_by
from torchgpipe.shard.wrapped import check_wrapped

__all__ = ['Layout', 'ParallelModule', 'dtensor', 'global_shape', 'knows_shape', 'part_shape']

_GLOBAL_SHAPE = '_global_shape'


@dataclass(frozen=True)
class Layout:
    """What a parameter is a part of: a tensor of this shape, split by this parallel dimension."""

    shape: tuple[int, ...]
    dim: int | None = None
    order: int = 0

    @property
    def storage(self) -> int | None:
        """The dimension in memory that is split, None if each rank has it all."""
        return to_storage(self.dim, self.order)

    def local_shape(self) -> list[int]:
        """Return the shape of this rank's part."""
        return _part_of(self.shape, self.storage)

    def tag(self, parameter: Tensor) -> None:
        """Let a parameter know."""
        register_parallel_attribute(parameter, self.dim, self.order)
        setattr(parameter, _GLOBAL_SHAPE, torch.Size(self.shape))

    def check(self, name: str, parameter: Tensor) -> None:
        """See that a parameter may stand for this one.

        Raises:
            ValueError: It has another shape, or is a part of something else.
        """
        if list(parameter.shape) != self.local_shape():
            raise ValueError(
                f'{name} has the shape {tuple(parameter.shape)}; the part of rank '
                f'{current().tensor_rank} of {current().tensor_size} has '
                f'{tuple(self.local_shape())}, of {tuple(self.shape)} as a whole')
        if is_tagged(parameter) and storage_dim(parameter) != self.storage:
            raise ValueError(
                f'{name} is split along dimension {self.storage} in memory, and this parameter '
                f'along {storage_dim(parameter)}: it can not stand for it')


class ParallelModule(nn.Module):
    """A module that has a part of some parameters, as those of this package.

    Derive from it to write a layer of your own::

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

    #: For pipelines: see :mod:`torchgpipe.context`.
    communicates = True

    def __init__(self) -> None:
        super().__init__()
        self._layouts: dict[str, Layout] = {}

    def register_part(self, name: str, shape: tuple[int, ...], dim: int | None, order: int = 0,
                      device: Any = None, dtype: torch.dtype | None = None) -> None:
        """Add a parameter of which each rank has a part; its values are yet to be set.

        Args:
            name: Its name.
            shape: The shape of the whole.
            dim: The parallel dimension: see :func:`ts.register_parallel_attribute`.
            order: 0 for a weight of shape (out, in), or a bias; 1 for one of shape (number,
                features).
            device: Where it shall be.
            dtype: The type of its numbers.
        """
        self._layouts[name] = layout = Layout(shape, dim, order)
        self.register_parameter(name, nn.Parameter(
            torch.empty(layout.local_shape(), device=device, dtype=dtype)))

    def put_part(self, name: str, whole: Tensor, layout: Layout) -> None:
        """Add a parameter with this rank's part of what the first rank of all has as a whole."""
        self._layouts[name] = layout
        self.register_parameter(name, nn.Parameter(_part_of_first(whole, layout),
                                                   whole.requires_grad))

    def stand_for(self, plain: nn.Module, layouts: dict[str, Layout]) -> None:
        """Become what a plain module is: with its options, its mode and its hooks.

        Raises:
            ValueError: It lacks a parameter, which something seems to compute.
        """
        self.__dict__.update(plain.__getstate__())
        self._parameters, self._layouts = {}, {}
        for name, parameter in plain._parameters.items():
            if parameter is None or name not in layouts:
                self.register_parameter(name, parameter)
            else:
                self.put_part(name, parameter, layouts[name])
        missing = layouts.keys() - self._parameters.keys()
        if missing:
            raise ValueError(f'{plain} has no parameter {missing.pop()}: something computes it, '
                             'such as weight_norm. Convert before that is put on')

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter, or put another one in the place of one.

        Raises:
            ValueError: It does not have the shape of this rank's part.
        """
        layout = self._layouts.get(name)
        if layout is not None and param is not None:
            layout.check(name, param)
        super().register_parameter(name, param)
        self._tag()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it, unless its shards were taken for something else."""
        check_wrapped()
        self._check_parts()
        return super().__call__(*args, **kwargs)

    def _check_parts(self) -> None:
        """See that nobody makes something of the parts who does not know that they are parts.

        Raises:
            ValueError: Somebody computes one, or has put another parameter in its place.
        """
        for name in self._layouts:
            what = f'the {name} of {type(self).__name__}'
            if name not in self._parameters:
                raise ValueError(
                    f'{what} is computed, as by weight_norm, a parametrization or pruning, and '
                    'these take it for a whole: norms and sums would be those of the part that '
                    'this rank has. Write a layer of your own, derived from ts.nn.ParallelModule')
            parameter = self._parameters[name]
            if isinstance(parameter, nn.Parameter) and not is_tagged(parameter):
                raise ValueError(
                    f'{what} is another parameter than the layer was given, put there as '
                    'fully_shard does, which takes parts for copies of one tensor. Use '
                    'DistributedDataParallel or ZeroRedundancyOptimizer over '
                    f'ts.distributed.get_data_group(); or set it by layer.{name} = parameter')

    def _tag(self) -> None:
        for name, layout in self._layouts.items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                layout.tag(parameter)

    # What else puts other parameters in their place: another device or type, a copy or what comes
    # out of a pickle, and loading where set_swap_module_params_on_conversion was called.

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
            found = getattr(state_dict.get(prefix + name), 'shape', None)
            if found == layout.shape and [*found] != layout.local_shape():
                errors.append(f"{prefix}{name} is whole, and the layer takes this rank's part: "
                              'load ts.relocate_state_dict(model, state_dict)')


def _part_of_first(whole: Tensor, layout: Layout) -> Tensor:
    """Return this rank's part of what the first rank of all has; one part at a time is sent."""
    dim = layout.storage
    world = needed_by(dim)
    if whole.is_meta:
        return torch.empty(layout.local_shape(), dtype=whole.dtype, device='meta')
    if world is None:
        return whole.detach().clone()
    pieces = (whole,) if dim is None else sizes.slice(whole, world.tensor_size, dim)
    for rank, piece in enumerate(pieces):
        sent = piece.to(world.mesh.device_type).clone(
            memory_format=torch.contiguous_format)
        from_first(sent, world)
        if dim is None or rank == world.tensor_rank:
            mine = sent.to(whole.device)
    return mine


def knows_shape(parameter: Tensor) -> bool:
    """Return whether somebody has said of what a parameter is a part."""
    return hasattr(parameter, _GLOBAL_SHAPE)


def global_shape(parameter: Tensor) -> torch.Size:
    """Return the shape of what a parameter is a part of.

    Raises:
        ValueError: It is a part of something, and nobody has said of what.
    """
    if knows_shape(parameter):
        shape: torch.Size = getattr(parameter, _GLOBAL_SHAPE)
        return shape
    if storage_dim(parameter) is not None:
        raise ValueError(
            f'a parameter of shape {tuple(parameter.shape)} is tagged as a part, and nothing says '
            'of what: let its module derive from ts.nn.ParallelModule, and add it by '
            'register_part(name, shape, dim)')
    return parameter.shape


def part_shape(parameter: Tensor) -> torch.Size:
    """Return the shape that this rank's part of a parameter has, whatever stands in it.

    Raises:
        ValueError: It is a part of something, and nobody has said of what.
    """
    return torch.Size(_part_of(global_shape(parameter), storage_dim(parameter)))


def _part_of(shape: Sequence[int], dim: int | None) -> list[int]:
    part = list(shape)
    if dim is not None:
        world = current()
        part[dim] = sizes.part(part[dim], world.tensor_size, world.tensor_rank)[1]
    return part


def dtensor(parameter: Tensor, local: Tensor | None = None) -> Any:
    """Return a parameter's view as a DTensor: the whole, with its shape and its placement.

    Args:
        parameter: A parameter of a sharded layer, or any other, of which each rank has all.
        local: What is viewed in its stead and has its form, such as its gradient.

    Returns:
        A DTensor over the mesh of :func:`ts.distributed.get_mesh`, which shares the memory of this
        rank's part, and has no graph.
    """
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard  # takes long

    shape, dim = global_shape(parameter), storage_dim(parameter)
    placement: Placement = Replicate() if dim is None else Shard(dim)
    stride = tuple(prod(shape[i + 1:]) for i in range(len(shape)))
    return DTensor.from_local(
        (parameter if local is None else local).detach(), current().mesh,
        [Replicate(), placement], run_check=False, shape=shape, stride=stride)
