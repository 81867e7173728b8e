"""Load the layers of a model from weights: whole tensors, or a rank's parts of them.

For layers on the meta device, a loader resolves all names and checks all shapes before it reads
the first value. So weights of another model raise the same error on all ranks of a mesh, and
change nothing::

    weights                 names of the model       layers             tensors
    a.weight    shape       rename, share ties       0: a.weight        whole: read all
    b.weight    shape   ──▶ convert, rehearse    ──▶ 1: b.weight    ──▶ split: read this rank's
    …                       on the meta device       …                  range of each dimension
"""

from collections.abc import Iterable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.base.errors import add_note
from torchgpipe.engine.partition import named_slots
from torchgpipe.model.pretrained import original_of
from torchgpipe.model.slots import FirstSlots, allocate, put, slots_in
from torchgpipe.model.weights import Ranges, WeightEntry, Weights, entries_of, open_weights
from torchgpipe.sequential.parts import NamedLayer, to_own_names

#: How many names an error has at most.
_MOST = 5


class Loader:
    """The entries of weights for the layers of a model.

    Args:
        weights: The weights.
        module: The whole model, also if only some of its layers will be loaded.

    Attributes:
        names: The names of all entries, in order.

    Raises:
        ValueError: The weights have other names or shapes than the model.
    """

    def __init__(self, weights: Weights, module: nn.Sequential) -> None:
        entries = entries_of(open_weights(weights))
        self.names = sorted(entries)
        original = original_of(module)
        #: Names of the original that need no entry.
        self._optional: set[str] = set()
        if original is not None:
            entries = original.resolve(entries, is_file=isinstance(weights, (str, PathLike)))
            self._optional = original.optional_names(entries)
            if isinstance(weights, (str, PathLike)):
                original.take_generation_config(Path(weights))
        #: By layer, the entries of buffers that are in no state dict, by the layer's names.
        self._buffers: dict[str, dict[str, WeightEntry]] = {}
        #: By layer, the entries of its state dict.
        self._entries: dict[str, dict[str, WeightEntry]] = {}
        #: By rehearsed layer, the names in it that get their values from entries.
        self._expected: dict[str, set[str]] = {}
        #: By ``id``, the tensors that have their values. The tensor is kept, so that no other
        #: tensor gets its ``id``.
        self._loaded: dict[int, Tensor] = {}
        self._first_slots: FirstSlots = {}
        #: Names of layers with values, which are not rehearsed, over all calls of `load`: another
        #: layer may load a tensor that is missing in the first one.
        self._missing: list[tuple[str, Any]] = []
        self._unexpected: list[str] = []

        for name, layer in module._modules.items():
            self._buffers[name] = _take_buffers(entries, name, layer)
        to_own_names(entries, '', module._modules)
        #: By layer, the entries of tied tensors that have another one under another name.
        self._doubles = _share_entries(entries, module)
        foreign = []
        for key, entry in entries.items():
            name, _, rest = key.partition('.')
            if name in module._modules:
                self._entries.setdefault(name, {})[rest] = entry
            else:
                foreign.append(key)

        self._rehearse(module, foreign)

    def _rehearse(self, module: nn.Sequential, foreign: list[str]) -> None:
        """Load layers on the meta device from tensors without values.

        Their own functions and hooks for loading see the names and shapes of the weights.

        Args:
            foreign: The names of entries that belong to no layer.
        """
        missing: list[tuple[str, Any]] = []
        unexpected: list[str] = []
        loaded = set()
        for name, layer in module._modules.items():
            assert layer is not None
            state = layer.state_dict(keep_vars=True)
            if not all(value.is_meta for value in state.values() if isinstance(value, Tensor)):
                continue  # Its own values would be overwritten.
            absent, additional = self._rehearse_layer(name, layer, state)
            unexpected += additional
            self._expected[name] = state.keys() - absent
            for key, value in state.items():
                if key in self._expected[name]:
                    loaded.add(id(value))
                elif not (isinstance(layer, NamedLayer) and key in self._optional):
                    missing.append((f'{name}.{key}', value))
        absent_names = []
        for name, value in missing:
            if id(value) not in loaded:
                absent_names.append(name)
        unexpected += foreign
        if absent_names or unexpected:
            raise _other_names(absent_names, unexpected)

    def _rehearse_layer(
        self, name: str, layer: nn.Module, state: Mapping[str, Any]
    ) -> tuple[set[str], list[str]]:
        """Return the names in a layer that get no value, and the full names of other entries."""
        entries = self._entries.get(name, {})
        placeholders = {}
        for key, entry in entries.items():
            placeholders[key] = _placeholder(entry, state.get(key))
        try:
            # A layer may add tensors of its own, such as a count that old weights lack.
            with torch.device('meta'):
                result = layer.load_state_dict(placeholders, strict=False)
        except RuntimeError as error:
            _check_shapes(name, entries, state)
            add_note(error, f"in layer '{name}'")
            raise
        return {*result.missing_keys}, [f'{name}.{key}' for key in result.unexpected_keys]

    def targets(self, name: str, layer: nn.Module) -> list[Any]:
        """Return the tensors of a layer that the weights have. They may be on the meta device."""
        state = layer.state_dict(keep_vars=True)
        expected = self._expected.get(name, state.keys())
        tensors = [layer.get_buffer(key) for key in self._buffers[name]]
        tensors += [value for key, value in state.items() if key in expected]
        return tensors

    def load(self, layers: Iterable[tuple[str, nn.Module, torch.device]]) -> None:
        """Read the values of layers, each onto its device.

        Tensors on the meta device get memory, of this rank's part if they are split.

        Raises:
            ValueError: A layer has other names or shapes than the weights.
        """
        for name, layer, device in layers:
            for slot in [*slots_in(layer)]:
                if slot.tensor.is_meta:
                    put(slot, partial(allocate, slot.tensor, device), self._first_slots)
            try:
                self._load(name, layer)
            except (RuntimeError, ValueError) as error:
                add_note(error, f"in layer '{name}'")
                raise
        missing = [name for name, value in self._missing if id(value) not in self._loaded]
        if missing or self._unexpected:
            raise _other_names(missing, self._unexpected)

    def _load(self, name: str, layer: nn.Module) -> None:
        for double in self._doubles.get(name, ()):
            _check_equal(*double)
        state = layer.state_dict(keep_vars=True)
        values = {}
        for key, entry in self._entries.get(name, {}).items():
            target = state.get(key)
            if id(target) not in self._loaded:
                values[key] = _read(key, entry, target)
        result = layer.load_state_dict(values, strict=False)
        values.clear()
        for key, entry in self._buffers[name].items():
            _fill(key, layer.get_buffer(key), entry.read())

        for key, value in state.items():
            if key in result.missing_keys:
                if name not in self._expected:
                    self._missing.append((f'{name}.{key}', value))
            elif isinstance(value, Tensor):
                self._loaded[id(value)] = value
        self._unexpected += [f'{name}.{key}' for key in result.unexpected_keys]


def _take_buffers(
    entries: dict[str, WeightEntry], name: str, layer: nn.Module
) -> dict[str, WeightEntry]:
    """Remove and return the entries of a layer's buffers that are in no state dict."""
    state = layer.state_dict()
    buffers = {}
    for key, _ in layer.named_buffers(remove_duplicate=False):
        if key in state:
            continue
        names = [f'{name}.{key}']
        if isinstance(layer, NamedLayer):
            names.append(key)
        for full in names:
            if full in entries:
                buffers[key] = entries.pop(full)
    return buffers


#: The name of a tied tensor, its entry, and another name and entry of it.
_Double = tuple[str, WeightEntry, str, WeightEntry]


def _share_entries(entries: dict[str, WeightEntry], module: nn.Module) -> dict[str, list[_Double]]:
    """Give all names of a tensor one entry, because weights need only one of them.

    Returns:
        By layer, the entries of the weights for one tensor, which have to be equal.
    """
    names_of: dict[int, list[str]] = {}
    for full, _, tensor in named_slots(module):
        names_of.setdefault(id(tensor), []).append(full)
    doubles: dict[str, list[_Double]] = {}
    for names in names_of.values():
        present = [full for full in names if full in entries]
        if not present:
            continue
        first = present[0]
        for full in names:
            entry = entries.setdefault(full, entries[first])
            if entry is not entries[first]:
                layer = first.partition('.')[0]
                doubles.setdefault(layer, []).append((first, entries[first], full, entry))
                entries[full] = entries[first]
    return doubles


def _check_equal(name: str, entry: WeightEntry, other_name: str, other: WeightEntry) -> None:
    """Check that two entries for one tensor have the same values.

    Raises:
        ValueError: They have other values.
    """
    value = entry.read()
    if isinstance(value, Tensor) and not torch.equal(value, other.read()):
        raise ValueError(
            f"'{name}' and '{other_name}' are one tensor in the module, but two with other values "
            'in the weights: make the module without the tie, or pass weights with one of them'
        )


def _placeholder(entry: WeightEntry, target: Any) -> Any:
    """Return a value without data in place of an entry: its shape if it is known."""
    if entry.shape is None:
        return target if isinstance(target, Tensor) else entry.read()
    dtype = target.dtype if isinstance(target, Tensor) else None
    return torch.empty(entry.shape, dtype=dtype, device='meta')


def _read(key: str, entry: WeightEntry, target: Any) -> Any:
    """Return the value of an entry for a state dict.

    The part of a split tensor is read into its place. Then the value is the tensor itself:
    ``load_state_dict`` finds its name, and copies it onto itself.
    """
    # A DTensor, whose class is not imported in one process.
    if not hasattr(target, '__create_chunk_list__'):
        return entry.read()
    if entry.shape is not None and entry.shape != tuple(target.shape):
        raise _shape_error(key, entry.shape, tuple(target.shape))
    part = target.to_local()
    if part.numel():
        with torch.no_grad():
            part.copy_(entry.read(_local_ranges(target)))
    return target


def _local_ranges(tensor: Any) -> Ranges:
    """Return the ranges of this rank's part of a DTensor."""
    (chunk,) = tensor.__create_chunk_list__()  # Each rank has one part.
    ranges = []
    for offset, size in zip(chunk.offsets, chunk.sizes):
        ranges.append(slice(offset, offset + size))
    return tuple(ranges)


def _fill(key: str, buffer: Tensor, value: Tensor) -> None:
    if (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
        raise ValueError(
            f"'{key}' of the weights is {value.dtype} of shape {tuple(value.shape)}, "
            f'but the buffer {buffer.dtype} of shape {tuple(buffer.shape)}; it is in '
            'no state dict, so leave it out, or pass it in this dtype and shape'
        )
    buffer.copy_(value)


def _other_names(missing: list[str], unexpected: list[str]) -> ValueError:
    return ValueError(
        f'the weights are not those of the module: missing {_some(missing)}, '
        f'unexpected {_some(unexpected)}. Their names are those of '
        'module.state_dict(); pass a mapping that has them'
    )


def _some(names: list[str]) -> str:
    """Return the first names of a list, and the number of the rest."""
    if len(names) <= _MOST:
        return str(names)
    return f'{names[:_MOST]} and {len(names) - _MOST} more'


def _check_shapes(name: str, entries: Mapping[str, WeightEntry], state: Mapping[str, Any]) -> None:
    """Check that entries have the shapes of their tensors."""
    for key, entry in entries.items():
        target = state.get(key)
        if entry.shape is None or not isinstance(target, Tensor):
            continue
        if entry.shape != tuple(target.shape):
            raise _shape_error(f'{name}.{key}', entry.shape, tuple(target.shape))


def _shape_error(key: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"the weights are of a module of other sizes: '{key}' has shape {shape} in them, and "
        f'{expected} in the module; make the module as the one that was saved'
    )
