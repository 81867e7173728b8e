"""Files of safetensors in tests: saved in several parts, and the bytes that are read of them."""

import json

import safetensors
from safetensors.torch import save_file


def save_sharded(state, folder, number):
    """Save tensors in a number of files with an index, as Transformers does."""
    names = [*state]
    files = {}
    for k in range(number):
        file = f'model-{k}.safetensors'
        part = {name: state[name].contiguous().clone() for name in names[k::number]}
        save_file(part, folder / file)
        files.update(dict.fromkeys(part, file))
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': files}))


class BytesRead:
    """Count the bytes of tensors and slices that are read within this context."""

    def __init__(self):
        self.number = 0

    def __enter__(self):
        self._open = safetensors.safe_open
        safetensors.safe_open = self._opened
        return self

    def __exit__(self, *_):
        safetensors.safe_open = self._open

    def _opened(self, *args, **kwargs):
        return _File(self, self._open(*args, **kwargs))

    def count(self, tensor):
        self.number += tensor.nbytes
        return tensor


class _File:
    def __init__(self, read, file):
        self._read = read
        self._file = file

    def __enter__(self):
        self._file.__enter__()
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def keys(self):
        return self._file.keys()

    def get_tensor(self, name):
        return self._read.count(self._file.get_tensor(name))

    def get_slice(self, name):
        return _Slice(self._read, self._file.get_slice(name))


class _Slice:
    def __init__(self, read, part):
        self._read = read
        self._part = part

    def get_shape(self):
        return self._part.get_shape()

    def __getitem__(self, ranges):
        return self._read.count(self._part[ranges])
