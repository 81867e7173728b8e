"""Export: the tensors of a model by the names of its files, and files of safetensors of them.

A folder is written beside the final one, and takes its place::

    .model.saving/    model-00001-of-00002.safetensors    each file by one process,
                      model-00002-of-00002.safetensors    one layer after the other
                      model.safetensors.index.json        by the first process, in the end
                      config.json …
    model/            exchanged with .model.saving/, which is deleted then

Before the exchange, other files of the final folder, such as a tokenizer's, are linked into the
new one. An interrupted save leaves the earlier folder or the new one. Where the system cannot
exchange two names at once, the earlier folder may be left as ``.model.before/``; the next save
puts it back first.
"""

import ctypes
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from errno import EINVAL, ENOSYS, EOPNOTSUPP
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.model.adapters import ADAPTER_FILES
from torchgpipe.model.pretrained import Original
from torchgpipe.model.weights import INDEX, StrPath
from torchgpipe.sequential.parts import NamedLayer

#: A number of bytes, or a text such as ``'5GB'``.
Size = int | str

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

#: With merged adapters, the files of an adapter as well.
_REPLACED_BY_MERGED = re.compile(f'{_REPLACED.pattern}|{ADAPTER_FILES.pattern}')

#: Each is 1,000 or 1,024 of the one before.
_UNITS = ['', 'K', 'M', 'G', 'T']


class TensorSpec(NamedTuple):
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
    match = re.fullmatch(r'(\d+(?:\.\d+)?) ?(?:([KMGT])(i?))?B', str(size), re.IGNORECASE)
    number = 0
    if isinstance(size, int):
        number = size
    elif match:
        base = 1024 if match[3] else 1000
        power = _UNITS.index((match[2] or '').upper())
        number = int(float(match[1]) * base**power)
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
        #: By name of a tensor in the original, the name under which Transformers saves it.
        self._preferred: dict[str, str] = {}
        self._mixes_tensors = False
        if original is not None:
            original.set_conversions()
            self._preferred = original.preferred_names()
            self._mixes_tensors = original.mixes_tensors
        self._repeated = {full for tie in ties for full in tie[1:]}

    def tensors(
        self, name: str, layer: nn.Module, whole: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors of a layer by their names in files, in the layout of these.

        Each one is made when it is asked for, unless the layout mixes tensors of a layer.

        Args:
            whole: Returns the whole tensor of a rank's part of it.

        Raises:
            ValueError: The layer has a state that is no tensor.
        """
        together = {}
        for key, value in layer.state_dict().items():
            full = f'{name}.{key}'
            if full in self._repeated:
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
            elif self._mixes_tensors:
                together[file_name] = whole(value.detach())
            else:
                yield from _taken(self._original.file_tensors({file_name: whole(value.detach())}))
        if self._original is not None and together:
            tensors = self._original.file_tensors(together)
            together.clear()
            yield from _taken(tensors)

    def specs(self, name: str, layer: nn.Module) -> list[TensorSpec]:
        """Return the specs of the tensors of a layer, without communication."""
        specs = []
        for key, value in self.tensors(name, layer, _on_meta):
            specs.append(TensorSpec(key, tuple(value.shape), value.dtype))
        return specs


class AdapterNames(FileNames):
    """The names of adapters in a model, which are the names in it.

    Attributes:
        original: The model with adapters.

    Raises:
        ValueError: The model does not have an active adapter.
    """

    original: Original

    def __init__(self, original: Original | None) -> None:
        super().__init__(None, ())
        if original is None:
            raise ValueError(
                'the model has no adapters: it was not converted from a model of Transformers. '
                'save_pretrained(folder) saves its tensors'
            )
        original.check_adapter()
        self.original = original
        self._trained = original.saved_names()

    def tensors(
        self, name: str, layer: nn.Module, whole: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors of the adapters in a layer."""
        for key, value in layer.state_dict().items():
            if key in self._trained:
                yield key, whole(value.detach())


def _taken(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield and remove the items of a dict."""
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
        specs: All of its tensors.

    Raises:
        ValueError: A tensor has a dtype that such files do not have.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec]) -> None:
        header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
        self._offsets = {}
        offset = 0
        # Larger elements first, so that each tensor is aligned to the size of its elements.
        for spec in sorted(specs, key=lambda spec: -spec.dtype.itemsize):
            if spec.dtype not in _DTYPES:
                raise ValueError(f"'{spec.name}' is {spec.dtype}, which safetensors does not have")
            header[spec.name] = {
                'dtype': _DTYPES[spec.dtype],
                'shape': spec.shape,
                'data_offsets': (offset, offset + spec.bytes),
            }
            self._offsets[spec.name] = offset
            offset += spec.bytes
        text = json.dumps(header).encode()
        text += b' ' * (-len(text) % 8)
        start = len(text).to_bytes(8, 'little') + text

        self._start = len(start)
        self._absent = {spec.name: spec for spec in specs}
        self._stream: BinaryIO = path.open('wb')
        self._stream.write(start)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor; with the last one, the file is complete and on the disk.

        Raises:
            RuntimeError: It has another shape or dtype than planned.
        """
        spec = self._absent.pop(name)
        if (spec.shape, spec.dtype) != (tuple(tensor.shape), tensor.dtype):
            raise RuntimeError(
                f"'{name}' was {spec.dtype} of shape {spec.shape} when its file was planned, and "
                f'is {tensor.dtype} of shape {tuple(tensor.shape)} now'
            )
        data = tensor.contiguous().cpu().flatten().view(torch.uint8)
        self._stream.seek(self._start + self._offsets[name])
        self._stream.write(data.numpy().data)
        if not self._absent:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()

    def check(self) -> None:
        """Check that all tensors were written.

        Raises:
            RuntimeError: One was not.
        """
        if self._absent:
            raise RuntimeError(f"'{min(self._absent)}' was planned for a file, and not written")

    def abort(self) -> None:
        """Close the file, complete or not."""
        with suppress(OSError):  # A full disk also refuses the rest of the buffer.
            self._stream.close()


class FilePlan(NamedTuple):
    """A file of safetensors: its name, the process that writes it, and its tensors."""

    name: str
    owner: int
    specs: list[TensorSpec]


def check_names(specs: Iterable[TensorSpec]) -> None:
    """Check that no two tensors have one name.

    Raises:
        ValueError: Two have.
    """
    names = set()
    for spec in specs:
        if spec.name in names:
            raise ValueError(
                f"two layers have a tensor '{spec.name}' that is not shared, but a file has one; "
                "convert the model with grain='block', or use save(folder)"
            )
        names.add(spec.name)


def plan_files(specs: Sequence[Sequence[TensorSpec]], max_shard_size: Size) -> list[FilePlan]:
    """Return the files of a model, none of which has tensors of two owners.

    Args:
        specs: The tensors of each owner.
        max_shard_size: The most bytes of tensors in a file; one larger tensor is a file by itself.
    """
    limit = parse_size(max_shard_size)
    check_names(chain(*specs))
    files: list[tuple[int, list[TensorSpec]]] = []
    for owner, specs_of_owner in enumerate(specs):
        free = -1
        for spec in specs_of_owner:
            if spec.bytes > free:
                files.append((owner, []))
                free = limit
            files[-1][1].append(spec)
            free = max(0, free - spec.bytes)
    plans = []
    for number, (owner, specs_of_file) in enumerate(files, 1):
        name = 'model.safetensors'
        if len(files) > 1:
            name = f'model-{number:05}-of-{len(files):05}.safetensors'
        plans.append(FilePlan(name, owner, specs_of_file))
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
        self._before = self.folder.with_name(f'.{self.folder.name}.before')

    def begin(self) -> None:
        """Make the new folder, after an earlier save that was interrupted is cleared.

        Raises:
            FileExistsError: The final one is a file, or has folders in it.
        """
        if self._before.exists() and not self.folder.exists():
            self._before.rename(self.folder)
        reason = ''
        if self.folder == Path.cwd():
            reason = 'the working directory of this process'
        elif self.folder.is_mount():
            reason = 'a mount point'
        if reason:
            raise FileExistsError(
                f'a model takes the place of the whole folder {self.folder}, which is {reason}; '
                'name another folder, such as one within it'
            )
        if self.folder.exists() and not self.folder.is_dir():
            raise FileExistsError(f'{self.folder} is a file: name a folder for the model')
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                if path.is_dir():
                    raise FileExistsError(
                        f'a model takes the place of the whole folder {self.folder}, which has '
                        f'the folder {path.name} in it; name another folder'
                    )
        for path in (self.path, self._before):
            if path.exists():
                shutil.rmtree(path)
        self.path.mkdir(parents=True)

    def end(self, replaced: re.Pattern[str] = _REPLACED) -> None:
        """Let the new folder take the place of the final one, with its other files.

        Args:
            replaced: The names of files that are not kept.
        """
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
        if not _exchange(self.path, self.folder):
            self.folder.rename(self._before)
            self.path.rename(self.folder)
            self._before.rename(self.path)
        self.abort()

    def abort(self) -> None:
        """Delete the folder beside the final one; another rank may still write to it."""
        shutil.rmtree(self.path, ignore_errors=True)


def _exchange(new: Path, old: Path) -> bool:
    """Exchange the names of two folders at once; return whether the system can do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), 'renameat2', None)
    if rename is None:
        return False
    here = -100  # AT_FDCWD, which absolute paths ignore
    exchange = 2  # RENAME_EXCHANGE
    if rename(here, os.fsencode(new), here, os.fsencode(old), exchange):
        error = ctypes.get_errno()
        if error in (EINVAL, ENOSYS, EOPNOTSUPP):
            return False
        raise OSError(error, os.strerror(error), str(old))
    return True


@contextmanager
def new_folder(folder: StrPath) -> Iterator[NewFolder]:
    """Make a new folder for the context, which calls its ``end``; delete it after an error."""
    new = NewFolder(folder)
    new.begin()
    try:
        yield new
    except BaseException:
        new.abort()
        raise


def finish(new: NewFolder, files: Sequence[FilePlan], original: Original | None) -> None:
    """Write the index and the configuration, and let a new folder take its place."""
    total = 0
    names: dict[str, str] = {}
    dtype = None
    for file in files:
        for spec in file.specs:
            names[spec.name] = file.name
            total += spec.bytes
            # As Transformers does, take the first one.
            if dtype is None and spec.dtype.is_floating_point:
                dtype = spec.dtype
    if len(files) > 1:
        index = {'metadata': {'total_size': total}, 'weight_map': names}
        text = json.dumps(index, indent=2, sort_keys=True)
        (new.path / f'model{INDEX}').write_text(f'{text}\n')
    replaced = _REPLACED
    if original is not None:
        original.save_config(new.path, dtype)
        if original.adapters:
            # from_pretrained would add an adapter in the folder to the merged weights.
            replaced = _REPLACED_BY_MERGED
    new.end(replaced)


class OpenFiles:
    """The files of a folder that a process writes, each from its first tensor to its last one."""

    def __init__(self, files: Iterable[FilePlan], folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, TensorFile] = {}
        self._file_of: dict[str, FilePlan] = {}
        for file in files:
            for spec in file.specs:
                self._file_of[spec.name] = file

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a tensor, if it belongs to one of the files."""
        file = self._file_of.get(name)
        if file is None:
            return
        if file.name not in self._open:
            self._open[file.name] = TensorFile(self._folder / file.name, file.specs)
        self._open[file.name].write(name, tensor)

    def check(self) -> None:
        """Check that all files are complete."""
        for file in {file.name: file for file in self._file_of.values()}.values():
            if file.name not in self._open:
                raise RuntimeError(f'{file.name} was planned, and not written')
            self._open[file.name].check()

    def close(self) -> None:
        """Close all files, complete or not."""
        for file in self._open.values():
            file.abort()


def save(
    layers: Mapping[str, nn.Module],
    names: FileNames,
    original: Original | None,
    folder: StrPath,
    max_shard_size: Size,
) -> None:
    """Save a model of one process."""
    specs = []
    for name, layer in layers.items():
        specs += names.specs(name, layer)
    files = plan_files([specs], max_shard_size)
    with new_folder(folder) as new:
        opened = OpenFiles(files, new.path)
        try:
            for key, tensor in tensors_of(layers, names):
                opened.write(key, tensor)
            opened.check()
        finally:
            opened.close()
        finish(new, files, original)


def save_adapter(
    names: AdapterNames, tensors: Iterable[tuple[str, Tensor]], folder: StrPath
) -> None:
    """Save the whole tensors of adapters."""
    with new_folder(folder) as new:
        if new.folder.is_dir() and any(new.folder.glob('model*.safetensors')):
            raise FileExistsError(
                f'{new.folder} has a model, to which from_pretrained would add the adapter, '
                'merged or not; save the adapter to a folder of its own'
            )
        names.original.save_adapter(dict(tensors), new.path)
        new.end(ADAPTER_FILES)


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
