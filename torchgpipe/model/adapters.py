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

import torch
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


def exported_names(layers: Mapping[str, nn.Module], names: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the tensors that are exported as the base model's.

    The active one of a module's trained copies takes the place of the module.

    Args:
        layers: The layers of PEFT, by name.
        names: The names of the base model's tensors: see :func:`base_names`.
    """
    exported = dict(names)
    for path, layer in layers.items():
        if _COPIES not in layer._modules:
            continue
        kept = 'original_module'
        active: Any = layer.active_adapters
        for adapter in active:
            if adapter in layer.get_submodule(_COPIES)._modules:
                kept = f'{_COPIES}.{adapter}'
        for name in names:
            if name.startswith(f'{path}.') and not name.startswith(f'{path}.{kept}.'):
                exported.pop(name, None)
    return exported


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
        try:
            reset(name, config.init_lora_weights)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f'adapter {name!r} of {type(module).__name__} gets no initial values on the meta '
                f'device: {error}. Make the model on the CPU, or pass weights with values of the '
                'adapter'
            ) from error


# Merged weights.


def merge(
    layers: Mapping[str, nn.Module], names: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the base model's tensors with adapters merged into them, by the base model's names.

    Args:
        layers: The layers of PEFT, by name.
        names: The names of the base model's tensors: see :func:`exported_names`.
        tensors: Whole tensors of a part of the model, by their names in the adapted model. Tensors
            on the meta device only get their names.

    Raises:
        ValueError: Only some of an adapter's tensors are there, or PEFT cannot merge it.
    """
    results = {}
    for name, tensor in tensors.items():
        if name in names:
            results[names[name]] = tensor
    for path, layer in layers.items():
        merged = _merged_names(layer)
        inside = {}
        for name, tensor in tensors.items():
            key = name.removeprefix(f'{path}.')
            if key != name and key in merged:
                inside[key] = tensor
        if not inside:
            continue
        _check_complete(path, merged - inside.keys())
        if any(tensor.is_meta for tensor in inside.values()):
            continue
        for key, tensor in _merged_layer(path, layer, inside).items():
            results[names[f'{path}.{key}']] = tensor
    return results


def _merged_names(layer: nn.Module) -> set[str]:
    """Return the names of the tensors in a layer of PEFT that are merged, of active adapters."""
    names: set[str] = set()
    if _COPIES in layer._modules:
        return names
    inactive: set[str] = set()
    for child in layer.children():
        if isinstance(child, (nn.ModuleDict, nn.ParameterDict)):
            inactive.update(child.keys())
    active: Any = layer.active_adapters
    inactive.difference_update(active)
    for key in layer.state_dict():
        if inactive.isdisjoint(key.split('.')):
            names.add(key)
    return names


def _check_complete(path: str, absent: set[str]) -> None:
    """Check that all tensors of a layer of PEFT are in one layer of the pipeline."""
    if absent:
        raise ValueError(
            f"'{path}' cannot be merged, because '{min(absent)}' is in another layer: call "
            "save_adapter(folder), and merge_and_unload() of PEFT's model of that folder; "
            "to_sequential with grain='block' keeps linear layers together"
        )


def _merged_layer(path: str, module: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the merged tensors of a layer of PEFT, by its names for the base layer's."""
    results = {}
    layer = deepcopy(module)
    parameters = dict(layer.named_parameters())
    values = {}
    for key, tensor in tensors.items():
        values[key] = tensor.clone()  # The merge changes it.
        if key in parameters:
            values[key] = nn.Parameter(values[key], requires_grad=False)
    layer.load_state_dict(values, strict=False, assign=True)  # without inactive adapters
    for key, buffer in layer.named_buffers():
        # Only buffers in no state dict: PEFT would merge without values.
        if buffer.is_meta and key not in module.state_dict():
            raise ValueError(
                f"'{path}' cannot be merged, because '{key}' of a {type(module).__name__} is in "
                "no state dict: call save_adapter(folder), and merge_and_unload() of PEFT's model "
                'of that folder'
            )
    try:
        layer.merge()
    except Exception as error:
        raise ValueError(f"PEFT cannot merge the adapters of '{path}': {error}") from error
    state = layer.get_base_layer().state_dict(prefix='base_layer.')
    for key, tensor in state.items():
        results[key] = tensor.detach()
    return results


# Files.


def file_names(model: Any) -> dict[str, str]:
    """Return a model's names of the tensors in the active adapter's file, by their names there."""
    state = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in state.items()}
    results = {}
    for key, tensor in _adapter_state(model, state).items():
        results[key] = names[id(tensor)]
    return results


def _adapter_state(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the active adapter, by their names in its file."""
    peft = import_module('peft')
    state: dict[str, Tensor] = peft.get_peft_model_state_dict(
        model,
        state_dict=dict(tensors),
        adapter_name=model.active_adapter,
        save_embedding_layers=False,
    )
    return state


def write_adapter(model: Any, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write the files of the active adapter, as ``PeftModel.save_pretrained`` does.

    Args:
        model: The adapted model, without values.
        tensors: The whole tensors of its adapters, by their names in the model.
    """
    save_file = import_module('safetensors.torch').save_file
    values = {}
    for key, tensor in sorted(_adapter_state(model, tensors).items()):
        # PEFT may share a tensor between two names, which a file cannot.
        values[key] = tensor.clone(memory_format=torch.contiguous_format)
    save_file(values, folder / 'adapter_model.safetensors', metadata={'format': 'pt'})
    config = deepcopy(model.peft_config[model.active_adapter])
    config.inference_mode = True
    classes = None
    if config.task_type is None:
        kind = type(model.get_base_model())
        classes = {'base_model_class': kind.__name__, 'parent_library': kind.__module__}
    config.save_pretrained(folder, auto_mapping_dict=classes)
