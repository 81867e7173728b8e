"""A model whose forward runs in its pipeline, while its other methods stay unchanged.

::

    model       names, state_dict, save_pretrained, config        forward
                        │                                            │
                the same parameters and buffers                      ▼
                        │                                         pipeline
    pipeline    0.words.weight  3.blocks.1.bias  7.head.weight
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import nn

from torchgpipe.base.devices import memory_of
from torchgpipe.base.errors import add_note
from torchgpipe.base.structure import flatten_nested
from torchgpipe.engine.partition import holder_of, named_slots
from torchgpipe.sequential.parts import NamedLayer

#: The attribute of a model with its pipeline. It is in no state dict, and copies have a copy.
_PIPELINE = '_run_by_pipeline'


@contextmanager
def run_by(pipeline: Any, model: nn.Module) -> Iterator[None]:
    """Replace the forward of a model by its pipeline: see ``GPipe.in_place_of``."""
    if 'forward' in model.__dict__:
        raise ValueError(
            f'this {type(model).__name__} has another forward than its class: '
            'that of a pipeline, or what prepare() of a tool made of it; prepare it '
            'within in_place_of(model)'
        )
    layers = {
        number: '' if isinstance(layer, NamedLayer) else number
        for number, layer in pipeline.named_children()
    }
    _share(pipeline, model, layers)
    given = {
        'forward': _forward_of(model),
        'hf_device_map': _device_map(pipeline),
        _PIPELINE: (pipeline, layers, _parts(pipeline, model, layers)),
    }
    before = {name: model.__dict__[name] for name in given if name in model.__dict__}
    model.__dict__.update(given)
    try:
        yield
    finally:
        for name in given:
            model.__dict__.pop(name, None)
        model.__dict__.update(before)


def _forward_of(model: nn.Module) -> Any:
    """Return a method with the signature of the model's forward, which tools inspect."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        pipeline, layers, parts = self.__dict__[_PIPELINE]
        _check_shared(pipeline, self, layers)
        for part, whole in parts:
            part.training = whole.training
        try:
            output = pipeline(*args, **kwargs)
        except ValueError as error:
            add_note(
                error,
                'this model is run by a pipeline: what calls it in another way than '
                "the sample, as generate() does, comes after 'with "
                "pipeline.in_place_of(model)'",
            )
            raise
        home = memory_of(pipeline.devices[0])
        if memory_of(pipeline.devices[-1]) == home:
            return output
        tensors, structure = flatten_nested(output)
        return structure([x if x.dim() else x.to(home) for x in tensors])

    # Not by functools.wraps: Accelerate follows `__wrapped__` to the function below autocast.
    forward.__dict__['__signature__'] = inspect.signature(type(model).forward)
    return MethodType(forward, model)


def _device_map(pipeline: Any) -> dict[str, Any]:
    """Return a device map, which keeps Accelerate and Transformers from moving the model.

    It keeps them from replicating the model as well.
    """
    devices = [
        device for number, device in zip(pipeline.balance, pipeline.devices) for _ in range(number)
    ]
    return dict(zip(pipeline._modules, devices))


def _parts(
    pipeline: Any, model: nn.Module, layers: dict[str, str]
) -> list[tuple[nn.Module, nn.Module]]:
    """Return the modules of a pipeline that the model does not have.

    Each comes with the module of the model whose training mode it follows.
    """
    wholes = dict(model.named_modules(remove_duplicate=False))
    found = [(each, model) for each in (pipeline, pipeline.partitions, *pipeline.partitions)]
    for number, prefix in layers.items():
        for name, part in pipeline._modules[number].named_modules(prefix=prefix):
            whole = wholes.get(name, model)
            if whole is not part:
                found.append((part, whole))
    return found


def _share(pipeline: Any, model: nn.Module, layers: dict[str, str]) -> None:
    """Replace the parameters and buffers of a model by the pipeline's.

    Most are the same objects. The exceptions are moved buffers, parameters that cannot be moved in
    place, and tensors of a model on the meta device.
    """
    own = _own(pipeline, layers)
    slots = [*named_slots(model)]
    foreign = [
        name
        for name, _, x in slots
        if name not in own
        or own[name] is not x
        and (
            (own[name].shape, own[name].dtype) != (x.shape, x.dtype)
            or own[name].device == x.device
        )
    ]
    known = {id(own[name]) for name, _, _ in slots if name in own}
    foreign += [name for name, x in own.items() if id(x) not in known]
    if foreign:
        raise ValueError(
            'a pipeline takes the place of the model that it was made from, as it '
            f'was then, but only one of both has {foreign[:5]}, {len(foreign)} in '
            'all: convert this model as it is now'
        )
    for name, slot, _ in slots:
        holder_of(slot)[slot[1]] = own[name]


def _check_shared(pipeline: Any, model: nn.Module, layers: dict[str, str]) -> None:
    """Check that no tensor of the model was replaced, added or removed since then."""
    own = _own(pipeline, layers)
    slots = {name: x for name, _, x in named_slots(model)}
    known = {*map(id, slots.values())}
    other = [name for name, x in slots.items() if own.get(name) is not x]
    other += [name for name, x in own.items() if id(x) not in known]
    if other:
        raise RuntimeError(
            'this model is run by a pipeline, and only one of both has '
            f'{other[:5]}, {len(other)} in all: they were replaced, added or '
            'removed within in_place_of(model). Change the model before that, and '
            'convert it then'
        )


def _own(pipeline: Any, layers: dict[str, str]) -> dict[str, Any]:
    return {
        name: x
        for number, prefix in layers.items()
        for name, _, x in named_slots(pipeline._modules[number], prefix)
    }
