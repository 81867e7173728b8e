"""Tensor parallelism: modules that are split over ranks, by their names."""
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

__all__ = ['check_plan', 'layout_of', 'split_apart', 'split_layer', 'tie_again']


def check_plan(plan: Mapping[str, Any], module: nn.Module, size: int) -> None:
    """Check that each line of a plan matches a module, and that a tensor axis has a plan.

    Raises:
        ValueError: A line matches no module, or there is no plan for several ranks.
    """
    names = [name for name, _ in module.named_modules() if name]
    for pattern in plan:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f'tensor_plan names {pattern!r}, but no module is called that; '
                             f'names like it: {get_close_matches(pattern, names, 5, 0.3)}')
    if size > 1 and not plan:
        raise ValueError(f'the mesh has {size} ranks along its tensor axis, but tensor_plan says '
                         "of no layer how it is split: tensor_plan={'*.linear': ColwiseParallel()}"
                         ' of torch.distributed.tensor.parallel')


def split_layer(name: str, layer: nn.Module, plan: Mapping[str, Any], mesh: DeviceMesh | None
                ) -> None:
    """Split a layer of a model as a plan says.

    Args:
        name: The name of the layer in the model.
        layer: The layer.
        plan: Styles by the names of modules in the model.
        mesh: The ranks to split it over; ``None`` if there are no others.
    """
    if mesh is not None:
        for path, module in [*layer.named_modules(prefix=name)]:
            for pattern, style in plan.items():
                if fnmatchcase(path, pattern):
                    parallelize_module(module, mesh, style)
                    break


def layout_of(x: object) -> str:
    """Return a description of how a parameter is split."""
    return str(x.placements) if isinstance(x, DTensor) else 'whole'


def split_apart(layouts: Mapping[str, str]) -> ValueError:
    """Return the error for one parameter that is split in several ways, by its names."""
    return ValueError(f'one parameter has several names, and tensor_plan splits it in other ways '
                      f'there: {dict(layouts)}; let all of them be split alike')


def tie_again(shared: Sequence[Sequence[tuple[str, nn.Module, str]]]) -> None:
    """Tie a parameter again that was split in each of its places.

    Raises:
        ValueError: It was split in different ways.
    """
    for places in shared:
        tensors = [getattr(module, name) for _, module, name in places]
        layouts = {full: layout_of(x) for (full, _, _), x in zip(places, tensors)}
        if len({*layouts.values()}) > 1:
            raise split_apart(layouts)
        for _, module, name in places[1:]:
            setattr(module, name, tensors[0])
