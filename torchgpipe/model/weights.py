"""Weights: the tensors of a state dict by name, each read on request."""

import json
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

#: Tensors by their names, or the file that has them.
Weights = Mapping[str, Any] | str | os.PathLike[str]


def open_weights(weights: Weights) -> Mapping[str, Any]:
    """Return tensors by their names, without reading them yet.

    Args:
        weights: A mapping, which is returned as it is, or a path. A file of ``torch.save`` is
            mapped into memory. A file ``….safetensors``, or the index
            ``….safetensors.index.json`` of several such files, needs the package `safetensors
            <https://huggingface.co/docs/safetensors>`_. A folder has one of these, as
            ``save_pretrained`` of Transformers writes it.

    Raises:
        TypeError: The argument is neither a mapping nor a path, or the file holds no mapping.
        FileNotFoundError: The folder has no weights.
        ValueError: The folder has several files of weights and no index.
    """
    if isinstance(weights, Mapping):
        return weights
    if not isinstance(weights, (str, os.PathLike)):
        raise TypeError(
            'weights are a mapping from names to tensors, or the path of a file, not '
            f'{type(weights).__name__}'
        )
    path = Path(weights)
    if path.is_dir():
        path = _in_folder(path)
    if path.suffix == '.safetensors':
        return _SafeTensors.of_file(path)
    if path.name.endswith('.safetensors.index.json'):
        files = json.loads(path.read_text())['weight_map']
        return _SafeTensors({name: path.with_name(file) for name, file in files.items()})
    found = torch.load(path, map_location='cpu', mmap=True, weights_only=True)
    if not isinstance(found, Mapping):
        raise TypeError(
            f"'{path}' holds no state dict, but {type(found).__name__}; save "
            'model.state_dict(), or pass a mapping from names to tensors'
        )
    return found


def _in_folder(folder: Path) -> Path:
    """Return the file of a folder that has the weights, or the index of several files."""
    for pattern in ('*.safetensors.index.json', '*.safetensors', 'pytorch_model*.bin', '*.pt'):
        found = sorted(folder.glob(pattern))
        if len(found) > 1:
            raise ValueError(
                f'{folder} has {len(found)} files {pattern}, such as '
                f'{found[0].name}, and no index of them; pass the path of one'
            )
        if found:
            return found[0]
    raise FileNotFoundError(
        f'{folder} has no weights: no index ….safetensors.index.json, and no '
        'file ….safetensors, pytorch_model.bin or ….pt'
    )


class _SafeTensors(Mapping[str, Any]):
    """Tensors in files of safetensors, with the file of each name."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    @staticmethod
    def of_file(path: Path) -> '_SafeTensors':
        with _open(path) as file:
            return _SafeTensors(dict.fromkeys(file.keys(), path))

    def __getitem__(self, name: str) -> Any:
        # The file is opened for one tensor at a time, so that memory of the others is freed.
        with _open(self._files[name]) as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _open(path: Path) -> Any:
    try:
        package = import_module('safetensors')
    except ImportError as error:
        raise ImportError(
            f"to read '{path}' takes the package safetensors: pip install safetensors"
        ) from error
    return package.safe_open(path, framework='pt')
