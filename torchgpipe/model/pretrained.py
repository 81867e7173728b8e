"""Models of Transformers: the names and forms of their tensors in files, in both directions.

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
    is_copy,
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
        whole: The model, with adapters if it has some.
        model: The model as Transformers knows it.
        adapters: The layers of adapters around layers of the model, by name.
    """

    def __init__(self, whole: nn.Module, model: nn.Module) -> None:
        self.whole: Any = whole
        self.model: Any = model
        self.adapters = adapter_layers(whole)
        #: The names in Transformers of the model's tensors, by their names here.
        self._names = base_names(whole, model)

    @property
    def adapter_names(self) -> set[str]:
        """The names of the tensors that adapters add to the model."""
        return {*self.whole.state_dict()} - self._names.keys()

    @property
    def trained_names(self) -> set[str]:
        """The names of the tensors of adapters, and of trained copies of modules."""
        copies = {name for name in self._names if is_copy(name)}
        return self.adapter_names | copies

    def save_adapter(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """Write the files of the active adapter into a folder."""
        write_adapter(self.whole, tensors, folder)

    def entries(self, entries: Mapping[str, WeightEntry]) -> dict[str, WeightEntry]:
        """Return the entries of weights by the names of the model, in the forms of its tensors.

        Names that the model does not have stay as they are. Values of buffers that the model
        computes itself, which old files have, are left out.

        Raises:
            ValueError: The tensors of a parameter do not fit together.
        """
        whole_state = self.whole.state_dict()
        state = {}
        for name, tensor in whole_state.items():
            if name in self._names:
                state[self._names[name]] = tensor
        names = _Renaming(self.model, state)
        results: dict[str, WeightEntry] = {}
        sources: dict[str, list[_Source]] = {}
        for key in sorted(entries, key=names.order):
            entry = entries[key]
            name, pattern = names.of(key)
            if key in whole_state:
                results[key] = entry
            elif name in state and pattern is not None:
                sources.setdefault(name, []).append(_Source(key, pattern, entry))
            elif name in state:
                results[name] = entry
            elif not (isinstance(entry, StoredTensor) and names.is_ignored(key)):
                results[key] = entry
        for name, parts in sources.items():
            conversion = _Conversion(self.model, names.converter(parts[0].pattern), name, parts)
            for target in conversion.shapes:
                results[target] = _ConvertedTensor(conversion, target)
        names.keep_used()
        return self._by_names_of_whole(results)

    def _by_names_of_whole(self, entries: dict[str, WeightEntry]) -> dict[str, WeightEntry]:
        """Return entries by the names that the model has with its adapters."""
        results = dict(entries)
        for name, base in self._names.items():
            if name != base and base in entries:
                results.setdefault(name, entries[base])
                results.pop(base, None)
        return results

    def prepare_files(self) -> bool:
        """Return whether tensors in files are made from several tensors of the model.

        Later calls of :meth:`file_tensors` revert the conversions that are set here.
        """
        loading = _loading()
        if loading is None:
            return bool(self.adapters)
        conversions = getattr(self.model, '_weight_conversions', None)
        if conversions is None:
            conversions = []
            for conversion in _conversions_of(self.model, add_legacy=False):
                # As in `revert_weight_conversion`: no file tells whether it had the prefix.
                if not isinstance(conversion, loading.PrefixChange):
                    conversions.append(conversion)
            self.model._weight_conversions = conversions
        kinds = [isinstance(conversion, loading.WeightConverter) for conversion in conversions]
        return bool(self.adapters) or any(kinds)

    def file_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by their names in a file, in its form, with adapters merged into them.

        Args:
            tensors: The tensors of a layer by the names of the model, without values or with.
        """
        ignored = self.model._keys_to_ignore_on_save or ()
        saved = {}
        for name, tensor in merge(self.adapters, self._names, tensors).items():
            if name not in ignored:
                saved[name] = tensor
        loading = _loading()
        if loading is None:
            return saved
        results: dict[str, Tensor] = loading.revert_weight_conversion(self.model, saved)
        return results

    def preferred_names(self) -> dict[str, str]:
        """Return for each name of a tied tensor the one that Transformers keeps in files."""
        names_of: dict[int, list[str]] = {}
        for name, _, tensor in named_slots(self.whole):
            names_of.setdefault(id(tensor), []).append(name)
        tied: Any = getattr(self.model, 'all_tied_weights_keys', None) or ()
        preferred = {}
        for names in names_of.values():
            kept = [name for name in names if self._names.get(name) not in tied] or names
            preferred.update(dict.fromkeys(names, kept[0]))
        return preferred

    def save_config(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the configuration of the model, and how it generates."""
        config = deepcopy(self.model.config)
        config.dtype = str(dtype).removeprefix('torch.')
        config.architectures = [type(self.model).__name__]
        config.save_pretrained(folder)
        if self.model.can_generate():
            self.model.generation_config.save_pretrained(folder)


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

    def of(self, key: str) -> tuple[str, str | None]:
        """Return the model's name for a tensor of a file, and the pattern of its conversion."""
        number, _, rest = key.partition('.')
        if self._loading is None or number.isdigit() and rest in self._state:
            return key, None
        converters = [*dict.fromkeys(self._converters.values())]
        prefix = self._model.base_model_prefix
        for renamings, others in ((self._renamings, converters), ([], [])):
            name, pattern = self._loading.rename_source_key(
                key, renamings, others, prefix, self._state
            )
            if name in self._state or key not in self._state:
                return name, pattern
        return key, None

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
