"""Models of Transformers: the names and layout of their tensors in files, in both directions.

A file may have other names than the module, or several tensors for one of its parameters. Loading
and saving follow the conversions that ``from_pretrained`` and ``save_pretrained`` use::

    file                                        module
    embed_out.weight                       ◀──▶ lm_head.weight
    experts.0.up.weight, experts.1.up…     ◀──▶ experts.up, of all experts

The sequential module of a model keeps the :class:`Original`: a copy of the model on the meta
device, with its configuration and its names, but without values.
"""

import re
import sys
from collections.abc import Mapping
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.engine.partition import named_slots
from torchgpipe.model.adapters import (
    adapter_layers,
    base_names,
    exported_names,
    file_names,
    merge,
    write_adapter,
)
from torchgpipe.model.weights import Ranges, StoredTensor, WeightEntry

#: Tables that old files have for each block, and Transformers ignores.
_ROTARY = r'rotary_emb\.inv_freq$'


def original_of(module: nn.Module) -> 'Original | None':
    """Return the Transformers model that a module was made from, if it was: see `Converted`."""
    model = module.__dict__.get('_original')
    pretrained = pretrained_class()
    if pretrained is None or model is None:
        return None
    for part in model.modules():
        if isinstance(part, pretrained):
            return Original(model, part)
    return None


class Original:
    """A model of Transformers on the meta device, without values.

    Attributes:
        adapted: The model, with adapters around some of its layers if it has any.
        base: The model of Transformers in it.
        adapters: The layers of PEFT in the model, by name.
    """

    def __init__(self, adapted: nn.Module, base: nn.Module) -> None:
        self.adapted: Any = adapted
        self.base: Any = base
        self.adapters = adapter_layers(adapted)
        #: The names of tensors in the base model, by their names in the adapted one.
        self._base_names = base_names(adapted, base)
        self._exported_names = exported_names(self.adapters, self._base_names)

    @property
    def adapter_names(self) -> set[str]:
        """The names of the tensors that adapters add to the model."""
        return {*self.adapted.state_dict()} - self._base_names.keys()

    def saved_names(self) -> set[str]:
        """Return the names of the tensors in the file of the active adapter."""
        return {*file_names(self.adapted).values()}

    def optional_names(self, entries: Mapping[str, WeightEntry]) -> set[str]:
        """Return the names of the tensors that weights may leave out: the model makes them.

        Args:
            entries: The entries of the weights. If they have values of adapters, they have all.
        """
        optional = self.adapter_names
        if not optional.isdisjoint(entries):
            optional = set()
        patterns = self.base._keys_to_ignore_on_load_missing or ()
        not_saved = self.base._keys_to_ignore_on_save or ()
        for name, base in self._base_names.items():
            if base in not_saved or any(re.search(pattern, base) for pattern in patterns):
                optional.add(name)
        return optional

    def take_generation_config(self, folder: Path) -> None:
        """Take the file that says how the model generates, if the model only has defaults."""
        config: Any = getattr(self.base, 'generation_config', None)
        has_defaults = config is not None and config._from_model_config
        if has_defaults and (folder / 'generation_config.json').is_file():
            self.base.generation_config = type(config).from_pretrained(folder)

    def resolve(self, entries: Mapping[str, WeightEntry], is_file: bool) -> dict[str, WeightEntry]:
        """Return the entries of weights by the names of the model, in the layout of its tensors.

        Names that the model does not have stay as they are. The model keeps the conversions that
        were needed, because saving reverts them.

        Args:
            is_file: Whether the weights are a file. Of a file, buffers that the model computes
                itself are left out. In a mapping, they are values that the user wants.

        Raises:
            ValueError: The tensors of a parameter do not fit together.
        """
        adapted_state = self.adapted.state_dict()
        of_adapter = {}
        if self.has_active_adapter:
            of_adapter = file_names(self.adapted)
        state = {}
        for name, tensor in adapted_state.items():
            if name in self._base_names:
                state[self._base_names[name]] = tensor
        renaming = _Renaming(self.base, state)
        results: dict[str, WeightEntry] = {}
        sources: dict[str, list[_Source]] = {}
        for key in sorted(entries, key=renaming.order):
            entry = entries[key]
            name, pattern = renaming.model_name(key)
            if key in adapted_state:  # the name in the adapted model
                results[key] = entry
            elif key in of_adapter:  # the name in the file of the adapter
                results[of_adapter[key]] = entry
            elif name in state and pattern is not None:  # one of several tensors, or another form
                sources.setdefault(name, []).append(_Source(key, pattern, entry))
            elif name in state:  # renamed only, if at all
                results[name] = entry
            elif not (renaming.is_ignored(key) and (is_file or isinstance(entry, StoredTensor))):
                results[key] = entry
        for name, parts in sources.items():
            conversion = _Conversion(self.base, renaming.converter(parts[0].pattern), name, parts)
            for target in conversion.shapes:
                results[target] = _ConvertedTensor(conversion, target)
        renaming.keep_used()
        return self._by_adapted_names(results)

    def _by_adapted_names(self, entries: dict[str, WeightEntry]) -> dict[str, WeightEntry]:
        """Return entries by the names that the model has with its adapters."""
        results = dict(entries)
        for name, base in self._base_names.items():
            if name != base and base in entries:
                results.setdefault(name, entries[base])
                results.pop(base, None)
        return results

    def set_conversions(self) -> None:
        """Set the conversions that saving reverts, if no file has told them."""
        loading = _loading()
        if loading is None or getattr(self.base, '_weight_conversions', None) is not None:
            return
        conversions = []
        for conversion in _conversions_of(self.base, add_legacy=False):
            # As in `revert_weight_conversion`: no file tells whether it had the prefix.
            if not isinstance(conversion, loading.PrefixChange):
                conversions.append(conversion)
        self.base._weight_conversions = conversions

    @property
    def mixes_tensors(self) -> bool:
        """Whether a tensor in a file may be made from several tensors of a layer."""
        loading = _loading()
        if self.adapters or loading is None:
            return bool(self.adapters)
        for conversion in self.base._weight_conversions:
            if isinstance(conversion, loading.WeightConverter):
                return True
        return False

    def file_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by their names in a file, in its layout, with adapters merged into them.

        Args:
            tensors: Tensors of a layer by the names of the model, without values or with. They are
                all tensors of the layer if :attr:`mixes_tensors`.
        """
        ignored = self.base._keys_to_ignore_on_save or ()
        saved = {}
        for name, tensor in merge(self.adapters, self._exported_names, tensors).items():
            if name not in ignored:
                saved[name] = tensor
        loading = _loading()
        if loading is None:
            return saved
        results: dict[str, Tensor] = loading.revert_weight_conversion(self.base, saved)
        return results

    @property
    def has_active_adapter(self) -> bool:
        """Whether the model has one active adapter, which can be saved."""
        name = getattr(self.adapted, 'active_adapter', None)
        return bool(self.adapters) and isinstance(name, str)

    def check_adapter(self) -> None:
        """Check that the model has one active adapter.

        Raises:
            ValueError: It does not.
        """
        if not self.has_active_adapter:
            raise ValueError(
                'the model has no adapters of get_peft_model(model, LoraConfig(…)), of which one '
                'is active: call it before to_sequential. save_pretrained(folder) saves the model'
            )

    def save_adapter(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """Write the files of the active adapter into a folder."""
        write_adapter(self.adapted, tensors, folder)

    def preferred_names(self) -> dict[str, str]:
        """Return for each name of a tensor the name under which Transformers saves it."""
        names_of: dict[int, list[str]] = {}
        for name, _, tensor in named_slots(self.adapted):
            names_of.setdefault(id(tensor), []).append(name)
        tied: Any = getattr(self.base, 'all_tied_weights_keys', None) or ()
        preferred = {}
        for names in names_of.values():
            saved = names[0]
            for name in reversed(names):
                if self._base_names.get(name) not in tied:
                    saved = name
            preferred.update(dict.fromkeys(names, saved))
        return preferred

    def save_config(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Write the configuration of the model, and how it generates.

        Args:
            dtype: The dtype of its first tensor of floating-point numbers, if it has one.
        """
        config = deepcopy(self.base.config)
        if dtype is not None:
            config.dtype = str(dtype).removeprefix('torch.')
        config.architectures = [type(self.base).__name__]
        config.save_pretrained(folder)
        if self.base.can_generate():
            self.base.generation_config.save_pretrained(folder)


def _loading() -> Any:
    """Return the module that converts tensors of files, which Transformers has since version 5."""
    try:
        return import_module('transformers.core_model_loading')
    except ImportError:
        return None


def _conversions_of(model: Any, **options: Any) -> list[Any]:
    """Return the conversions that Transformers has for the tensors of a model."""
    mapping = import_module('transformers.conversion_mapping')
    conversions: list[Any] = mapping.get_model_conversion_mapping(model, **options)
    return conversions


class _Renaming:
    """The names of tensors in files, and the names that a model has for them."""

    def __init__(self, model: Any, state: Mapping[str, Any]) -> None:
        self._model = model
        self._state = state
        self._loading = _loading()
        self._conversions: list[Any] = []
        if self._loading is not None:
            self._conversions = _conversions_of(model)
        self._renamings: list[Any] = []
        #: By pattern of names in files, the conversion of these tensors.
        self._converters: dict[str, Any] = {}
        for conversion in self._conversions:
            if isinstance(conversion, self._loading.WeightConverter):
                self._converters.update(dict.fromkeys(conversion.source_patterns, conversion))
            else:
                self._renamings.append(conversion)
        self._buffers = {name for name, _ in model.named_buffers()} - state.keys()

    def order(self, key: str) -> Any:
        """Return the place of a name: the second expert precedes the tenth one."""
        return key if self._loading is None else self._loading.dot_natural_key(key)

    def model_name(self, key: str) -> tuple[str, str | None]:
        """Return the model's name for a tensor of a file, and the pattern of its conversion."""
        number, _, rest = key.partition('.')
        if self._loading is None or number.isdigit() and rest in self._state:
            return key, None  # A name of `to_sequential`, such as 3.weight, needs no renaming.
        name, pattern = self._rename(
            key, self._renamings, [*dict.fromkeys(self._converters.values())]
        )
        if name in self._state or key not in self._state:
            return name, pattern
        # A renaming has changed a name that is right. Only its prefix may differ.
        return self._rename(key, [], [])

    def _rename(
        self, key: str, renamings: list[Any], converters: list[Any]
    ) -> tuple[str, str | None]:
        prefix = self._model.base_model_prefix
        name, pattern = self._loading.rename_source_key(
            key, renamings, converters, prefix, self._state
        )
        return name, pattern

    def converter(self, pattern: str) -> Any:
        """Return the conversion of names with a pattern."""
        return self._converters[pattern]

    def is_ignored(self, key: str) -> bool:
        """Return whether the model computes this tensor, or leaves it out."""
        patterns = [_ROTARY, *(self._model._keys_to_ignore_on_load_unexpected or ())]
        return key in self._buffers or any(re.search(pattern, key) for pattern in patterns)

    def keep_used(self) -> None:
        """Let the model keep the conversions that its file needed, which saving reverts."""
        if self._loading is None:
            return
        used = [conversion for conversion in self._conversions if conversion.was_used()]
        if used:
            self._model._weight_conversions = used


class _Source:
    """One of the tensors in a file from which a parameter is made."""

    def __init__(self, key: str, pattern: str, entry: WeightEntry) -> None:
        self.key = key
        self.pattern = pattern
        self.entry = entry


class _Conversion:
    """Parameters that are made from other tensors in a file.

    Attributes:
        shapes: The shapes of the parameters, by name.
    """

    def __init__(self, model: Any, converter: Any, name: str, sources: list[_Source]) -> None:
        self._model = model
        self._converter = converter
        self._name = name
        self._sources = sources
        placeholders = []
        for source in sources:
            shape = source.entry.shape
            if shape is None:
                shape = tuple(source.entry.read().shape)
            placeholders.append(torch.empty(shape, device='meta'))
        self.shapes = {key: tuple(x.shape) for key, x in self._convert(placeholders).items()}

    def read(self) -> dict[str, Tensor]:
        """Return the parameters."""
        return self._convert([source.entry.read() for source in self._sources])

    def _convert(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        converter = deepcopy(self._converter)
        for source, tensor in zip(self._sources, tensors):
            converter.add_tensor(self._name, source.key, source.pattern, tensor)
        tensors.clear()
        try:
            values = converter.convert(self._name, model=self._model, config=self._model.config)
        except Exception as error:
            raise ValueError(
                f"'{self._name}' cannot be made from {len(self._sources)} tensors of the weights, "
                f"such as '{self._sources[0].key}': {error}"
            ) from error
        results = {}
        for key, value in values.items():
            results[key] = value[0] if isinstance(value, list) else value
        return results


class _ConvertedTensor:
    """A parameter that is made from other tensors in a file when it is read."""

    def __init__(self, conversion: _Conversion, name: str) -> None:
        self._conversion = conversion
        self._name = name
        self.shape = conversion.shapes[name]

    def read(self, ranges: Ranges | None = None) -> Tensor:
        # All of its tensors are read for a part, because a conversion may mix them.
        value = self._conversion.read()[self._name]
        return value if ranges is None else value[ranges]


def pretrained_class() -> Any:
    """Return the class of Transformers' models; ``None`` if Transformers is not imported."""
    return getattr(sys.modules.get('transformers.modeling_utils'), 'PreTrainedModel', None)
