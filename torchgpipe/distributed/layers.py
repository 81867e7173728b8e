"""The layers of one rank: created on it alone, and split over ranks by names.

::

    stages       0         1         2         3          on ranks 0, 1, 0, 1 of the pipeline
    layers       0 1       2 3       4         5
    rank 0       0 1                 4                    one by one: layer i from (seed, i),
    rank 1                 2 3                 5          then cut into shards, then the next one
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torchgpipe.distributed.embeddings import look_up_locally
from torchgpipe.distributed.ties import split_apart
from torchgpipe.engine.partition import named_slots
from torchgpipe.model.adapters import is_adapter_layer
from torchgpipe.model.loader import Loader
from torchgpipe.model.materialize import materialize, seeded
from torchgpipe.sequential.parts import class_of
from torchgpipe.shard.parameter import sharded_parameters


@dataclass(frozen=True)
class Values:
    """The initial values of a model.

    Args:
        seed: The seed. Layer ``i`` draws from ``(seed, i)``.
        loader: Loads them later, if there are weights.
        init: Called with each module after it has its first values.
    """

    seed: int = 0
    loader: Loader | None = None
    init: Callable[[nn.Module], Any] | None = None


def check_plan(plan: Mapping[str, Any], module: nn.Module, size: int) -> None:
    """Check that each line of a plan matches a module, and that a tensor axis has a plan.

    Raises:
        ValueError: A line matches no module, or there is no plan for several ranks.
    """
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    for pattern in plan:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(
                f'tensor_plan names {pattern!r}, but no module is called that; '
                f'names like it: {get_close_matches(pattern, names, 5, 0.3)}'
            )
    if size > 1 and not plan:
        raise ValueError(
            f'the mesh has {size} ranks along its tensor axis, but tensor_plan says '
            "of no layer how it is split: tensor_plan={'*.linear': ColwiseParallel()}"
            ' of torch.distributed.tensor.parallel'
        )


def check_whole(module: nn.Module) -> None:
    """Check that a model has no layers of :mod:`torchgpipe.shard`, which have shards already.

    Raises:
        ValueError: A parameter is a shard: ranks would copy the first rank's, and save it as the
            whole parameter.
    """
    shards = sharded_parameters(module)
    if shards:
        name = next(iter(shards))
        owner = module.get_submodule(name.rpartition('.')[0])
        raise ValueError(
            f"'{name}' is a shard, of a {type(owner).__name__}, but a DistributedGPipe splits "
            'whole layers itself: give it nn.Linear or nn.Embedding in that place, and a style in '
            'tensor_plan: ColwiseParallel() for dim=1, RowwiseParallel() for dim=0. A model with '
            'layers of torchgpipe.shard runs in a GPipe on each rank'
        )


def split_layer(
    name: str,
    layer: nn.Module,
    plan: Mapping[str, Any],
    mesh: DeviceMesh | None,
    split: dict[nn.Module, tuple[str, str]],
) -> None:
    """Split a layer of a model as a plan says.

    Args:
        mesh: The ranks to split it over; ``None`` if there are no others.
        split: The name and the style by which each module was split. A module in several layers
            is split once.

    Raises:
        ValueError: A module has several names, and the plan has another style for each.
    """
    if mesh is None:
        return
    for path, module in [*layer.named_modules(prefix=name)]:
        style = style_of(path, plan)
        text = _text_of(style)
        if module not in split:
            split[module] = path, text
            if style is not None:
                _parallelize(module, mesh, style)
        elif split[module][1] != text:
            raise split_apart(dict([split[module], (path, text)]))


def _parallelize(module: nn.Module, mesh: DeviceMesh, style: Any) -> None:
    """Split a module by a style; frozen parameters stay frozen."""
    frozen = []
    for name, x in module.named_parameters():
        if not x.requires_grad:
            frozen.append(name)
    for part in _parts_to_split(module, style):
        parallelize_module(part, mesh, copy(style))  # It is changed.
    # `SequenceParallel` replaces parameters by others that require a gradient.
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    look_up_locally(module)


def _parts_to_split(module: nn.Module, style: Any) -> list[nn.Module]:
    """Return the modules to split: the module, or the layers in a layer of an adapter.

    An adapter is a product of two matrices, of which one is split as the weight is::

        style       weight            adapter
        columns     ▌▌ ▌▌ outputs     A whole, B split     the input is whole on all ranks
        rows        ▀▀ ▄▄ inputs      A split, B whole     the output is whole on all ranks

    Raises:
        ValueError: It is split in another way, in which PEFT's layers would have wrong gradients.
    """
    if not is_adapter_layer(module):
        return [module]
    whole = (Replicate(),)
    adapters: Any = None
    if type(style) is ColwiseParallel and style.input_layouts == whole:
        adapters = getattr(module, 'lora_B', None)
    elif type(style) is RowwiseParallel and style.output_layouts == whole:
        adapters = getattr(module, 'lora_A', None)
    if adapters is None:
        raise ValueError(
            f'tensor_plan splits a {class_of(module).__name__} with an adapter by '
            f'{type(style).__name__}, but LoRA on linear layers is split by ColwiseParallel() '
            'with a whole input, or by RowwiseParallel() with a whole output'
        )
    return [module.get_submodule('base_layer'), *adapters.children()]


def _text_of(style: Any) -> str:
    """Return a text that is the same for equal styles, which PyTorch does not compare."""
    if style is None:
        return 'whole'
    return f'{type(style).__name__} {vars(style)}'


def style_of(path: str, plan: Mapping[str, Any]) -> Any:
    """Return the style of a module in a plan, or ``None``."""
    for pattern, style in plan.items():
        if fnmatchcase(path, pattern):
            return style
    return None


def skeleton_of(model: Any) -> nn.Sequential:
    """Return a model as a module; layers made by functions are on the meta device.

    Raises:
        TypeError: It is neither a module nor a list of functions.
    """
    if isinstance(model, nn.Module):
        return model  # type: ignore[return-value]
    functions = list(model) if isinstance(model, (list, tuple)) else []
    wrong = [item for item in functions if isinstance(item, nn.Module) or not callable(item)]
    if not functions or wrong:
        item = f' with a {type(wrong[0]).__name__} in it' if wrong else ''
        raise TypeError(
            'a model is an nn.Sequential, best on the meta device, or a list of '
            'functions of which each makes a layer, but this is a '
            f'{type(model).__name__}{item}'
        )
    with torch.device('meta'):
        layers = [function() for function in functions]
    for k, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TypeError(
                f'function {k} of the model gave a {type(layer).__name__}, but each '
                'has to make a layer, an nn.Module'
            )
    return nn.Sequential(*layers)


def fill(
    model: Any,
    skeleton: nn.Sequential,
    names: Sequence[str],
    device: torch.device,
    values: Values,
    finish: Callable[[str, nn.Module], None],
) -> 'OrderedDict[str, nn.Module]':
    """Return some layers of a model with their initial values.

    Args:
        finish: Called with each layer and its name before the next layer gets values.
    """
    indices = {name: i for i, name in enumerate(skeleton._modules)}

    @contextmanager
    def around(name: str, layer: nn.Module) -> Iterator[None]:
        with seeded(values.seed, indices[name]):
            yield
        # Tensors that will be loaded are still on the meta device.
        layer._apply(lambda x: x if x.is_meta else x.to(device))
        finish(name, layer)

    def materialize_layers(layers: 'OrderedDict[str, nn.Module]') -> None:
        devices = [device] * len(layers)
        materialize(nn.Sequential(layers), devices, values.loader, around, values.init)

    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if isinstance(model, nn.Module):
        # A tensor that an earlier layer shares gets its values there, so that layer is also made.
        for name in sorted({*_sources(skeleton, names), *names}, key=indices.__getitem__):
            layers[name] = skeleton.get_submodule(name)
        materialize_layers(layers)
        return OrderedDict((name, layers[name]) for name in names)
    for name in names:
        with seeded(values.seed, indices[name]):
            layers[name] = model[indices[name]]()
        materialize_layers(OrderedDict([(name, layers[name])]))
    return layers


def _sources(skeleton: nn.Sequential, names: Iterable[str]) -> list[str]:
    """Return the first layer with each meta tensor of some layers."""
    first: dict[int, str] = {}
    for name, layer in skeleton.named_children():
        for _, _, x in named_slots(layer):
            first.setdefault(id(x), name)
    sources = []
    for name in names:
        for _, _, x in named_slots(skeleton.get_submodule(name)):
            if x.is_meta:
                sources.append(first[id(x)])
    return sources
