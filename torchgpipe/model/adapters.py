"""Adapters of PEFT: names, initial values on the meta device, files, and merged weights.

PEFT puts its layers around layers of a model, so the model's tensors get other names::

    model        body.up.weight
    adapted      base_model.model.body.up.base_layer.weight          of the model
                 base_model.model.body.up.lora_A.default.weight      of the adapter
                 base_model.model.body.up.lora_B.default.weight
                 base_model.model.head.original_module.weight        of the model
                 base_model.model.head.modules_to_save.default.weight   a trained copy of it
"""

import re
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchgpipe.engine.partition import tensors_of
from torchgpipe.sequential.parts import class_of

#: The files of an adapter.
ADAPTER_FILES = re.compile(r'adapter_model\.safetensors|adapter_config\.json')

#: The child of a layer of PEFT that is the model's own.
_BASES = ('base_layer', 'original_module')

#: The child that has trained copies of the model's module.
_COPIES = 'modules_to_save'


def is_adapter_layer(module: nn.Module) -> bool:
    """Return whether a module is a layer of PEFT around a layer of the model.

    The same holds for the :class:`Part` of such a layer in a converted model.
    """
    classes = []
    for name, kind in (
        ('peft.tuners.tuners_utils', 'BaseTunerLayer'),
        ('peft.utils.other', 'AuxiliaryTrainingWrapper'),
    ):
        # Some versions of PEFT do not have the second one.
        adapter_class = getattr(sys.modules.get(name), kind, None)
        if adapter_class is not None:
            classes.append(adapter_class)
    return issubclass(class_of(module), tuple(classes))


def adapter_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of PEFT in a model, by name."""
    return {name: module for name, module in model.named_modules() if is_adapter_layer(module)}


def base_names(model: nn.Module, base: nn.Module) -> dict[str, str]:
    """Return the names of a base model's tensors, by their names in the adapted model.

    A trained copy of a module has the module's names.
    """
    prefix = next(name for name, module in model.named_modules() if module is base)
    return dict(_base_names(base, prefix, ''))


def _base_names(module: nn.Module, path: str, base: str) -> Iterator[tuple[str, str]]:
    """Yield the names of tensors in a module, and their names in the base model."""
    is_wrapped = is_adapter_layer(module)
    if not is_wrapped:
        for key, _ in tensors_of(module):
            yield _join(path, key), _join(base, key)
    for key, child in module.named_children():
        if not is_wrapped:
            yield from _base_names(child, _join(path, key), _join(base, key))
        elif key in _BASES:
            yield from _base_names(child, _join(path, key), base)
        elif key == _COPIES:
            for name, copied in child.named_children():
                yield from _base_names(copied, _join(path, f'{key}.{name}'), base)


def is_copy(name: str) -> bool:
    """Return whether a tensor belongs to a trained copy of a module."""
    return f'.{_COPIES}.' in name


def _join(path: str, key: str) -> str:
    return f'{path}.{key}'.lstrip('.')


# Initial values.


def part_of_adapter(modules: Mapping[str, nn.Module], path: str) -> bool:
    """Return whether the module with a name is in an adapter, and not in the base model."""
    atoms = path.split('.')
    for k, atom in enumerate(atoms):
        if atom not in _BASES and is_adapter_layer(modules['.'.join(atoms[:k])]):
            return True
    return False


def reset_adapters(model: Any, module: Any) -> None:
    """Give the adapters in a layer of PEFT their initial values.

    Args:
        model: The model with adapters, which has their configurations.
        module: The layer.

    Raises:
        ValueError: They are not adapters of LoRA.
    """
    if _COPIES in module._modules:
        return  # The weights of the module are loaded into its copies.
    reset = getattr(module, 'reset_lora_parameters', None)
    if reset is None:
        raise ValueError(
            f'an adapter of {type(module).__name__} gets no initial values on the meta '
            "device; LoraConfig's do. Make the model on the CPU, or pass weights with values "
            'of the adapter'
        )
    for name, config in model.peft_config.items():
        reset(name, config.init_lora_weights)


# Merged weights.


def merge(
    layers: Mapping[str, nn.Module], names: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the base model's tensors with adapters merged into them, by the base model's names.

    Args:
        layers: The layers of PEFT, by name.
        names: The names of the base model's tensors: see :func:`base_names`.
        tensors: Whole tensors of a part of the model, by their names in the adapted model. Tensors
            on the meta device only get their names.

    Raises:
        ValueError: Only some of an adapter's tensors are there, or PEFT cannot merge it.
    """
    results = {}
    for name, tensor in tensors.items():
        # The copies of a module have its names. The active one takes its place below.
        if name in names:
            results[names[name]] = tensor
    for path, layer in layers.items():
        inside = {}
        for name, tensor in tensors.items():
            if name.startswith(f'{path}.'):
                inside[name.removeprefix(f'{path}.')] = tensor
        if not inside:
            continue
        _check_complete(path, layer, inside)
        if any(tensor.is_meta for tensor in inside.values()):
            continue
        for key, tensor in _merged_layer(path, layer, inside).items():
            results[names[f'{path}.{key}']] = tensor
    return results


def _check_complete(path: str, layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Check that all tensors of a layer of PEFT are in one layer of the pipeline."""
    absent = layer.state_dict().keys() - tensors.keys()
    if absent:
        raise ValueError(
            f"'{path}' cannot be merged, because '{min(absent)}' is in another layer: convert the "
            "model with grain='block'"
        )


def _merged_layer(path: str, module: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the merged tensors of a layer of PEFT, by its names for the base layer's."""
    results = {}
    if _COPIES in module._modules:
        # PEFT uses one of the copies.
        active = f'{_COPIES}.{module.active_adapters[0]}.'
        for key, tensor in tensors.items():
            if key.startswith(active):
                results[f'original_module.{key.removeprefix(active)}'] = tensor
        return results

    layer = deepcopy(module)
    parameters = dict(layer.named_parameters())
    values = {}
    for key, tensor in tensors.items():
        values[key] = tensor.clone()
        if key in parameters:
            values[key] = nn.Parameter(values[key], requires_grad=False)
    layer.load_state_dict(values, assign=True)
    try:
        layer.merge()
    except Exception as error:
        raise ValueError(f"PEFT cannot merge the adapters of '{path}': {error}") from error
    state = layer.get_base_layer().state_dict(prefix='base_layer.')
    for key, tensor in state.items():
        results[key] = tensor.detach()
    return results


# Files.


def write_adapter(model: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the files of the active adapter, as ``PeftModel.save_pretrained`` does.

    Args:
        model: The adapted model, without values.
        tensors: The whole tensors of its adapters, by their names in the model.
    """
    save_file = import_module('safetensors.torch').save_file
    peft = import_module('peft')
    name = model.active_adapter
    state = peft.get_peft_model_state_dict(
        model, state_dict=dict(tensors), adapter_name=name, save_embedding_layers=False
    )
    values = {key: tensor.contiguous() for key, tensor in sorted(state.items())}
    save_file(values, folder / 'adapter_model.safetensors', metadata={'format': 'pt'})
    config = deepcopy(model.peft_config[name])
    config.inference_mode = True
    config.save_pretrained(folder)
