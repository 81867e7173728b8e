"""Weights: the tensors of a state dict by name, each read on request, whole or in part."""

import json
import os
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

#: The path of a file or a folder.
StrPath = str | os.PathLike[str]

#: Tensors by their names, or the file that has them.
Weights = Mapping[str, Any] | StrPath

#: The ranges of a tensor's dimensions.
Ranges = tuple[slice, ...]

#: The end of the name of an index, which tells the file of each tensor.
INDEX = '.safetensors.index.json'
_TORCH_INDEX = '.bin.index.json'


class WeightEntry(Protocol):
    """A tensor of weights, before it is read."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Its shape; ``None`` if only reading tells it."""

    def read(self, ranges: Ranges | None = None) -> Any:
        """Return the tensor, or the part of it within some ranges."""


def open_weights(weights: Weights) -> Mapping[str, Any]:
    """Return tensors by their names, without reading them yet.

    Args:
        weights: A mapping, which is returned as it is, or a path. A file of ``torch.save`` is
            mapped into memory. A file ``….safetensors`` needs the package `safetensors
            <https://huggingface.co/docs/safetensors>`_. The index ``….index.json`` of several
            files is a path as well. A folder has one of these. Of several ones, the files of
            Transformers come first, and safetensors before ``pytorch_model.bin`` and ``….pt``.

    Raises:
        TypeError: The argument is neither a mapping nor a path, or the file holds no mapping.
        FileNotFoundError: The path does not exist, the folder has no weights, or a file that its
            index names is missing.
        ValueError: The folder has several files of weights and no index, or a file is damaged.
    """
    if isinstance(weights, Mapping):
        return weights
    if not isinstance(weights, (str, os.PathLike)):
        raise TypeError(
            'weights are a mapping from names to tensors, or the path of a file, not '
            f'{type(weights).__name__}'
        )
    path = Path(weights)
    if not path.exists():
        raise FileNotFoundError(
            f'{path} does not exist: weights are a file or a folder of this machine. For a model '
            'of the Hugging Face Hub, pass the folder that huggingface_hub.snapshot_download '
            'returns'
        )
    if path.is_dir():
        path = _in_folder(path)
    if path.suffix == '.safetensors':
        return _SafeTensors([path])
    if path.name.endswith(INDEX):
        return _SafeTensors.of_index(path)
    if not path.name.endswith(_TORCH_INDEX):
        return _load(path)
    state: dict[str, Any] = {}
    for file in sorted({*_files_of(path).values()}):
        state.update(_load(_indexed(path, file)))
    return state


def _load(path: Path) -> Mapping[str, Any]:
    """Return the state dict in a file of ``torch.save``."""
    try:
        state = torch.load(path, map_location='cpu', mmap=True, weights_only=True)
    except (RuntimeError, EOFError) as error:
        raise ValueError(
            f'{path} is damaged, or has the format of torch.save before PyTorch 1.6; load it and '
            f'save it again, or pass its state dict ({error})'
        ) from error
    if not isinstance(state, Mapping):
        raise TypeError(
            f"'{path}' holds no state dict, but {type(state).__name__}; save "
            'model.state_dict(), or pass a mapping from names to tensors'
        )
    return state


def _files_of(index: Path) -> dict[str, str]:
    """Return the file of each tensor by an index.

    Raises:
        ValueError: It is no index.
    """
    try:
        files: dict[str, str] = json.loads(index.read_text())['weight_map']
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f'{index} is damaged ({type(error).__name__}: {error}); save or download it again'
        ) from error
    return files


def _indexed(index: Path, file: str) -> Path:
    """Return the path of a file that an index names.

    Raises:
        FileNotFoundError: It is missing.
    """
    path = index.with_name(file)
    if not path.exists():
        raise FileNotFoundError(
            f'{path} is missing, but {index.name} names it: save or download the folder again'
        )
    return path


def _in_folder(folder: Path) -> Path:
    """Return the file of a folder that has the weights, or the index of several files."""
    # The first two are the names of Transformers, whose folder may also have adapters.
    for pattern in (
        'model.safetensors',
        f'model{INDEX}',
        f'*{INDEX}',
        '*.safetensors',
        f'pytorch_model{_TORCH_INDEX}',
        'pytorch_model*.bin',
        '*.pt',
    ):
        files = sorted(folder.glob(pattern))
        if len(files) > 1:
            raise ValueError(
                f'{folder} has {len(files)} files {pattern}, such as '
                f'{files[0].name}, and no index of them; pass the path of one'
            )
        if files:
            return files[0]
    raise FileNotFoundError(
        f'{folder} has no weights: no index ….safetensors.index.json, and no '
        'file ….safetensors, pytorch_model.bin or ….pt'
    )


def entries_of(weights: Mapping[str, Any]) -> dict[str, WeightEntry]:
    """Return the entries of weights by name. Only the shapes of tensors in files are read."""
    entries: dict[str, WeightEntry] = {}
    for name in weights:
        source = weights
        # A chain of mappings is open_weights(path) with some other tensors.
        while isinstance(source, ChainMap):
            source = next(part for part in source.maps if name in part)
        if isinstance(source, _SafeTensors):
            entries[name] = source.entries[name]
        else:
            entries[name] = _MappedValue(source, name)
    return entries


class _MappedValue:
    """A value of a mapping, which may read it on access."""

    def __init__(self, source: Mapping[str, Any], name: str) -> None:
        self._source = source
        self._name = name

    @property
    def shape(self) -> tuple[int, ...] | None:
        # Access to another mapping may read the value.
        if not isinstance(self._source, dict):
            return None
        value = self._source[self._name]
        return tuple(value.shape) if isinstance(value, Tensor) else None

    def read(self, ranges: Ranges | None = None) -> Any:
        value = self._source[self._name]
        return value if ranges is None else value[ranges]


class StoredTensor:
    """A tensor in a file of safetensors."""

    def __init__(self, path: Path, name: str, shape: tuple[int, ...]) -> None:
        self._path = path
        self._name = name
        self.shape = shape

    def read(self, ranges: Ranges | None = None) -> Tensor:
        # The file is opened for each tensor, so that memory of the others is freed.
        with _open(self._path) as file:
            if ranges is None:
                tensor: Tensor = file.get_tensor(self._name)
                return tensor
            part: Tensor = file.get_slice(self._name)[ranges]
            return part


class _SafeTensors(Mapping[str, Any]):
    """The tensors in files of safetensors.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: A file is damaged.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.entries: dict[str, StoredTensor] = {}
        for path in files:
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118
                    shape = tuple(file.get_slice(name).get_shape())
                    self.entries[name] = StoredTensor(path, name, shape)

    @staticmethod
    def of_index(index: Path) -> '_SafeTensors':
        files = _files_of(index)
        weights = _SafeTensors(_indexed(index, file) for file in sorted({*files.values()}))
        absent = [name for name in files if name not in weights.entries]
        if absent:
            raise ValueError(
                f"{index.with_name(files[absent[0]])} does not have '{absent[0]}', which "
                f'{index.name} says it has: save or download the folder again'
            )
        # A file may have further tensors, which another index names.
        weights.entries = {name: weights.entries[name] for name in files}
        return weights

    def __getitem__(self, name: str) -> Any:
        return self.entries[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _open(path: Path) -> Any:
    try:
        package = import_module('safetensors')
    except ImportError as error:
        raise ImportError(
            f"reading '{path}' requires the package safetensors: pip install safetensors"
        ) from error
    try:
        return package.safe_open(path, framework='pt')
    except package.SafetensorError as error:
        raise ValueError(f'{path} is damaged: {error}; save or download it again') from error
