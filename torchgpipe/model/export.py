"""Export: the tensors of a model by the names of its files, and files of safetensors of them.

A folder is written beside the final one, and takes its place at once::

    .model.saving/    model-00001-of-00002.safetensors    each file by one process,
                      model-00002-of-00002.safetensors    one layer after the other
                      model.safetensors.index.json        by the first process, in the end
                      config.json …
    model/            exchanged with .model.saving/, which is deleted then

Before the exchange, other files of the final folder, such as a tokenizer's, are linked into the
new one. An interrupted save leaves the earlier folder or the new one.
"""

import ctypes
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from errno import EINVAL, ENOSYS, EOPNOTSUPP
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.model.adapters import FILES as ADAPTER_FILES
from torchgpipe.model.pretrained import Original
from torchgpipe.model.weights import INDEX, StrPath
from torchgpipe.sequential.parts import NamedLayer

#: A number of bytes, or a text such as ``'5GB'``.
Size = int | str

#: The largest file by default: the one of ``save_pretrained`` of Transformers.
MAX_SHARD_SIZE = '50GB'

#: The names of dtypes in files of safetensors.
_DTYPES = {
    torch.bool: 'BOOL',
    torch.uint8: 'U8',
    torch.int8: 'I8',
    torch.int16: 'I16',
    torch.uint16: 'U16',
    torch.int32: 'I32',
    torch.uint32: 'U32',
    torch.int64: 'I64',
    torch.uint64: 'U64',
    torch.float8_e4m3fn: 'F8_E4M3',
    torch.float8_e5m2: 'F8_E5M2',
    torch.float16: 'F16',
    torch.bfloat16: 'BF16',
    torch.float32: 'F32',
    torch.float64: 'F64',
    torch.complex64: 'C64',
}

#: The files of Transformers that a new folder replaces.
_REPLACED = re.compile(
    r'model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|'
    r'pytorch_model(-\d+-of-\d+)?\.bin(\.index\.json)?|(generation_)?config\.json'
)

_UNITS = {'': 1, 'K': 10, 'M': 20, 'G': 30, 'T': 40}


class TensorForm(NamedTuple):
    """A tensor without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The number of bytes in a file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def parse_size(size: Size) -> int:
    """Return a number of bytes.

    >>> parse_size('5GB'), parse_size('512MiB'), parse_size(100)
    (5000000000, 536870912, 100)

    Raises:
        ValueError: It is neither a positive number nor such a text.
    """
    found = re.fullmatch(r'(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B', str(size), re.IGNORECASE)
    number = 0
    if isinstance(size, int):
        number = size
    elif found:
        factor = _UNITS[found[2].upper()]
        unit = 2**factor if found[3] else 1000 ** (factor // 10)
        number = int(float(found[1]) * unit)
    if number < 1:
        raise ValueError(
            f"max_shard_size is a number of bytes, or a text such as '5GB', but is {size!r}"
        )
    return number


class FileNames:
    """The names in files of a model's tensors.

    A tensor of several places is exported once, by the first of them.

    Args:
        original: The Transformers model that the layers were made from, if it is one.
        ties: The full names of each tensor that has several, in the order of layers.
    """

    def __init__(self, original: Original | None, ties: Iterable[Sequence[str]]) -> None:
        self._original = original
        #: By name of a tied tensor in the original, the one that Transformers keeps in files.
        self._preferred: dict[str, str] = {}
        self._mixes = False
        if original is not None:
            self._preferred = original.preferred_names()
            self._mixes = original.prepare_files()
        self._later = {full for tie in ties for full in tie[1:]}

    def tensors(
        self, name: str, layer: nn.Module, whole: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors of a layer by their names in files, in the forms of these.

        Each one is made when it is asked for, unless a form takes several tensors of the layer.

        Args:
            whole: Returns the whole tensor of a rank's part of it.

        Raises:
            ValueError: The layer has a state that is no tensor.
        """
        together = {}
        for key, value in layer.state_dict().items():
            full = f'{name}.{key}'
            if full in self._later:
                continue
            if not isinstance(value, Tensor):
                raise ValueError(
                    f"'{full}' is a {type(value).__name__}, but files of safetensors have tensors "
                    'only: save(folder) keeps the whole state'
                )
            file_name = full
            if isinstance(layer, NamedLayer):
                file_name = self._preferred.get(key, key)
            # A whole tensor is freed before the next one is made.
            if self._original is None:
                yield file_name, whole(value.detach())
            elif self._mixes:
                together[file_name] = whole(value.detach())
            else:
                yield from _taken(self._original.file_tensors({file_name: whole(value.detach())}))
        if self._original is not None and together:
            tensors = self._original.file_tensors(together)
            together.clear()
            yield from _taken(tensors)

    def forms(self, name: str, layer: nn.Module) -> list[TensorForm]:
        """Return the forms of the tensors of a layer, without communication."""
        forms = []
        for key, value in self.tensors(name, layer, _on_meta):
            forms.append(TensorForm(key, tuple(value.shape), value.dtype))
        return forms


class AdapterNames(FileNames):
    """The names of adapters in a model, which are the names in it.

    Attributes:
        adapted: The model with adapters.

    Raises:
        ValueError: The model has no adapters.
    """

    def __init__(self, original: Original | None) -> None:
        super().__init__(None, ())
        if original is None or not original.adapters:
            raise ValueError(
                'the model has no adapters: wrap it by get_peft_model(model, LoraConfig(…)) of '
                'PEFT before to_sequential. save_pretrained(folder) saves the model'
            )
        self.adapted = original
        self._trained = original.trained_names

    def tensors(
        self, name: str, layer: nn.Module, whole: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors of the adapters in a layer."""
        for key, value in layer.state_dict().items():
            if key in self._trained:
                yield key, whole(value.detach())


def _taken(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the items of a dict, which does not have them any more."""
    for name in [*tensors]:
        yield name, tensors.pop(name)


def _on_meta(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device='meta')


# Files.


class TensorFile:
    """A file of safetensors, to which tensors are written one after the other.

    Format: https://huggingface.co/docs/safetensors

    Args:
        path: The path of the file.
        forms: All of its tensors.

    Raises:
        ValueError: A tensor has a dtype that such files do not have.
    """

    def __init__(self, path: Path, forms: Sequence[TensorForm]) -> None:
        header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
        self._offsets = {}
        offset = 0
        # Larger elements first, so that each tensor is aligned to the size of its elements.
        for form in sorted(forms, key=lambda form: -form.dtype.itemsize):
            if form.dtype not in _DTYPES:
                raise ValueError(f"'{form.name}' is {form.dtype}, which safetensors does not have")
            header[form.name] = {
                'dtype': _DTYPES[form.dtype],
                'shape': form.shape,
                'data_offsets': (offset, offset + form.bytes),
            }
            self._offsets[form.name] = offset
            offset += form.bytes
        text = json.dumps(header).encode()
        text += b' ' * (-len(text) % 8)
        start = len(text).to_bytes(8, 'little') + text

        self._start = len(start)
        self._remaining = len(forms)
        self._stream: BinaryIO = path.open('wb')
        self._stream.write(start)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor; with the last one, the file is complete and on the disk."""
        data = tensor.contiguous().cpu().flatten().view(torch.uint8)
        self._stream.seek(self._start + self._offsets[name])
        self._stream.write(data.numpy().data)
        self._remaining -= 1
        if not self._remaining:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()

    def abort(self) -> None:
        """Close the file, complete or not."""
        with suppress(OSError):  # A full disk also refuses the rest of the buffer.
            self._stream.close()


class FilePlan(NamedTuple):
    """A file of safetensors: its name, the process that writes it, and its tensors."""

    name: str
    owner: int
    forms: list[TensorForm]


def plan_files(forms: Sequence[Sequence[TensorForm]], max_shard_size: Size) -> list[FilePlan]:
    """Return the files of a model, none of which has tensors of two owners.

    Args:
        forms: The tensors of each owner.
        max_shard_size: The most bytes of tensors in a file; one larger tensor is a file by itself.
    """
    limit = parse_size(max_shard_size)
    files: list[tuple[int, list[TensorForm]]] = []
    for owner, forms_of_owner in enumerate(forms):
        free = 0
        for form in forms_of_owner:
            if form.bytes > free:
                files.append((owner, []))
                free = limit
            files[-1][1].append(form)
            free -= form.bytes
    plans = []
    for number, (owner, forms_of_file) in enumerate(files, 1):
        name = 'model.safetensors'
        if len(files) > 1:
            name = f'model-{number:05}-of-{len(files):05}.safetensors'
        plans.append(FilePlan(name, owner, forms_of_file))
    return plans


# Folders.


class NewFolder:
    """A folder that is written beside the final one, and then takes its place.

    Args:
        folder: The final folder.
    """

    def __init__(self, folder: StrPath) -> None:
        self.folder = Path(os.path.realpath(folder))
        #: Where files are written.
        self.path = self.folder.with_name(f'.{self.folder.name}.saving')

    def begin(self) -> None:
        """Make the new folder.

        Raises:
            FileExistsError: The final one is a file, or has folders in it.
        """
        if self.folder.exists() and not self.folder.is_dir():
            raise FileExistsError(f'{self.folder} is a file: name a folder for the model')
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.is_dir():
                    raise FileExistsError(
                        f'a model takes the place of the whole folder {self.folder}, which has '
                        f'the folder {path.name} in it; name another folder'
                    )
        self.abort()
        self.path.mkdir(parents=True)

    def end(self, replaced: re.Pattern[str] = _REPLACED) -> None:
        """Let the new folder take the place of the final one, with its other files."""
        if not self.folder.exists():
            self.path.rename(self.folder)
            return
        for path in self.folder.iterdir():
            target = self.path / path.name
            if replaced.fullmatch(path.name) or target.exists():
                continue
            try:
                os.link(path, target)
            except OSError:  # This file system has no links.
                shutil.copy2(path, target)
        _exchange(self.path, self.folder)
        self.abort()

    def abort(self) -> None:
        """Delete the folder beside the final one."""
        if self.path.exists():
            shutil.rmtree(self.path)


def _exchange(new: Path, old: Path) -> None:
    """Exchange the names of two folders at once, where the system can do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), 'renameat2', None)
    if rename is not None:
        here = -100  # AT_FDCWD, which absolute paths ignore
        exchange = 2  # RENAME_EXCHANGE
        if not rename(here, os.fsencode(new), here, os.fsencode(old), exchange):
            return
        error = ctypes.get_errno()
        if error not in (EINVAL, ENOSYS, EOPNOTSUPP):
            raise OSError(error, os.strerror(error), str(old))
    # Between the two, the earlier folder has another name.
    aside = old.with_name(f'.{old.name}.before')
    old.rename(aside)
    new.rename(old)
    aside.rename(new)


def finish(new: NewFolder, files: Sequence[FilePlan], original: Original | None) -> None:
    """Write the index and the configuration, and let a new folder take its place."""
    sizes = {}
    names: dict[str, str] = {}
    dtypes = []
    for file in files:
        for form in file.forms:
            names[form.name] = file.name
            sizes[form.name] = form.bytes
            if form.dtype.is_floating_point:
                dtypes.append(form.dtype)
    if len(files) > 1:
        index = {'metadata': {'total_size': sum(sizes.values())}, 'weight_map': names}
        text = json.dumps(index, indent=2, sort_keys=True)
        (new.path / f'model{INDEX}').write_text(f'{text}\n')
    if original is not None:
        original.save_config(new.path, dtypes[0])
    new.end()


def save(
    layers: Mapping[str, nn.Module],
    names: FileNames,
    original: Original | None,
    folder: StrPath,
    max_shard_size: Size,
) -> None:
    """Save a model of one process."""
    forms = []
    for name, layer in layers.items():
        forms += names.forms(name, layer)
    files = plan_files([forms], max_shard_size)
    new = NewFolder(folder)
    new.begin()
    try:
        write_files(files, new.path, tensors_of(layers, names))
        finish(new, files, original)
    except BaseException:
        new.abort()
        raise


def save_adapter(
    names: AdapterNames, tensors: Iterable[tuple[str, Tensor]], folder: StrPath
) -> None:
    """Save the whole tensors of adapters."""
    new = NewFolder(folder)
    new.begin()
    try:
        names.adapted.save_adapter(dict(tensors), new.path)
        new.end(ADAPTER_FILES)
    except BaseException:
        new.abort()
        raise


def trim_memory() -> None:
    """Return freed memory of the host to the system, where the C library would keep it.

    Large tensors are made and freed, one after the other. Without this, the process would grow by
    several of them.
    """
    trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)
    if trim is not None:
        trim(0)


def tensors_of(layers: Mapping[str, nn.Module], names: FileNames) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of layers that are whole, by their names in files."""
    for name, layer in layers.items():
        yield from names.tensors(name, layer, Tensor.detach)


def write_files(
    files: Iterable[FilePlan], folder: Path, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write files. Each one is opened with its first tensor, and closed after its last one."""
    file_of = {form.name: file for file in files for form in file.forms}
    streams: dict[str, TensorFile] = {}
    try:
        for name, tensor in tensors:
            file = file_of.get(name)
            if file is None:
                continue
            if file.name not in streams:
                streams[file.name] = TensorFile(folder / file.name, file.forms)
            streams[file.name].write(name, tensor)
    finally:
        for stream in streams.values():
            stream.abort()
