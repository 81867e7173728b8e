"""Checkpoint folders: a new one replaces the last one after all ranks have written their parts.

::

    model.saving/    each rank       .metadata.3.writing ──▶ its files ──▶ .metadata.3.written
                     first rank      all are written ──▶ .metadata, with sizes and sums
    model/           first rank      .metadata.replaced
                                     ──▶ model.before/, and model.saving/ ──▶ model/

Ranks plan a checkpoint together. After that they communicate through the folder only, so a
checkpoint ends also without process groups. An interrupted save leaves one of the last two
checkpoints intact.

[Note: Sums of a checkpoint] ``.metadata`` has the size and the CRC-32 of each file. Its own sum
follows the pickle in it, where PyTorch does not read.
"""

import os
import pickle
import shutil
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

#: Where a checkpoint is.
Folder = str | os.PathLike[str]

#: The name of the file that is written last.
_METADATA = '.metadata'

#: The mark before its sum, which has eight digits.
_SUM = b'\ncrc32 '

#: The states of a rank, as suffixes of a file.
_WRITING = 'writing'
_WRITTEN = 'written'
_FAILED = 'failed'

#: Marks a checkpoint that another one is replacing.
_REPLACED = f'{_METADATA}.replaced'

#: The period at which a rank looks at the states of others, in seconds.
_PERIOD = 0.02


@contextmanager
def as_errors(task: str) -> Iterator[None]:
    """Raise a RuntimeError for PyTorch's error on all ranks, which is not an ``Exception``.

    PyTorch's warning about a single process is ignored.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'torch.distributed is disabled')
        try:
            yield
        except CheckpointException as error:
            raised, _ = next(iter(error.failures.values()))
            raise RuntimeError(
                f'{task} failed on ranks {[*error.failures]}: {type(raised).__name__}: {raised}'
            ) from error


# --- reading
# ------------------------------------------------------------------------------------------------


def opened(folder: Folder, part: int = 0, of: int = 1) -> tuple[FileSystemReader, Metadata]:
    """Return a reader of the last complete checkpoint of a folder, and its metadata.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: It cannot be read; or a file is missing, or has another size or other bytes.
    """
    folder = _resolved(folder)
    before = _beside(folder, 'before')
    # Another checkpoint may have the name of the one that a save was replacing.
    candidates = [folder]
    if (before / _REPLACED).exists():
        candidates.append(before)
    for candidate in candidates:
        if (candidate / _METADATA).is_file():
            metadata = _metadata(candidate / _METADATA)
            _check_files(candidate, metadata, part, of)
            return FileSystemReader(candidate), metadata

    reason = 'is not there'
    if folder.is_dir():
        reason = f'has no {_METADATA}, which is written last'
    near = []
    for place in (folder, folder.parent):
        for file in place.glob(f'*/{_METADATA}'):
            if file.parent.suffix != '.saving':
                near.append(str(file.parent))
    if near:
        reason += f'; there are some at {", ".join(sorted(near)[:5])}'
    raise FileNotFoundError(f'{folder} is no checkpoint: it {reason}')


def _metadata(file: Path) -> Metadata:
    data = file.read_bytes()
    body, _, crc = data.rpartition(_SUM)
    try:
        metadata = pickle.loads(body or data)
        if not isinstance(metadata, Metadata):
            raise TypeError(f'it has a {type(metadata).__name__} in it')
        # PyTorch, and this library before 0.14, write no sum.
        if (body or hasattr(metadata, 'files')) and crc != b'%08x' % zlib.crc32(body):
            raise ValueError('it has other bytes than were written')
    except Exception as error:
        raise ValueError(
            f'{file} cannot be read, so that this is no checkpoint: '
            f'{type(error).__name__}: {error}'
        ) from error
    return metadata


def _check_files(where: Path, metadata: Metadata, part: int, of: int) -> None:
    """Check that files of a checkpoint are as they were written: [Note: Sums of a checkpoint]."""
    sizes: dict[str, int] = {}
    for data in (metadata.storage_data or {}).values():
        end = data.offset + data.length
        sizes[data.relative_path] = max(sizes.get(data.relative_path, 0), end)
    # Without sums, sizes are known at least.
    files: dict[str, tuple[int, int | None]] = {name: (size, None) for name, size in sizes.items()}
    files = getattr(metadata, 'files', files)
    for name in sorted(files)[part::of]:
        size, crc = files[name]
        file = where / name
        if not file.is_file():
            raise ValueError(f'the checkpoint is damaged: {file} is missing')
        bytes_there = file.stat().st_size
        if bytes_there < size or crc is not None and bytes_there > size:
            raise ValueError(
                f'the checkpoint is damaged: {file} has {bytes_there} bytes, '
                f'but {size} were written'
            )
        if crc is not None and _sum(file)[1] != crc:
            raise ValueError(
                f'the checkpoint is damaged: {file} has other bytes than were written'
            )


def _sum(file: Path) -> tuple[int, int]:
    """Return the size and the CRC-32 of a file."""
    size = crc = 0
    with file.open('rb') as stream:
        while data := stream.read(1 << 20):
            size += len(data)
            crc = zlib.crc32(data, crc)
    return size, crc


# --- writing
# ------------------------------------------------------------------------------------------------


class Writer(FileSystemWriter):
    """Write a checkpoint next to a folder, and replace the folder in the end.

    PyTorch calls `write_data` and `finish` while ranks plan the checkpoint together. These record
    the plan. `write` and `end` do the work, and need no process group.

    Args:
        patience: Returns how long to wait for another rank at most, in seconds.
    """

    def __init__(
        self, folder: Folder, rank: int = 0, ranks: int = 1, patience: Callable[[], float] = float
    ) -> None:
        self.folder = _resolved(folder)
        self._saving = _beside(self.folder, 'saving')
        super().__init__(self._saving)
        self._rank = rank
        self._ranks = range(ranks)
        self._patience = patience
        self._plan: Any = None
        self._whole: Metadata | None = None

    def make_way(self) -> None:
        """Prepare the folder that is written first, and check that the final one may be replaced.

        Raises:
            FileExistsError: The final folder has other things in it.
        """
        self._check_left(self._saving, [*self._saving.glob(f'{_METADATA}.*')])
        before = _beside(self.folder, 'before')
        self._check_left(before, (before / _REPLACED).exists())
        foreign = []
        if self.folder.exists():
            foreign = sorted(file.name for file in self.folder.iterdir() if not _is_ours(file))
        if foreign:
            raise FileExistsError(
                f'a checkpoint takes the place of the whole folder {self.folder}'
                f', but there is {", ".join(foreign[:5])} in it; name another '
                'folder'
            )
        if self._saving.exists():
            _delete(self._saving)
        self._saving.mkdir(parents=True)

    def _check_left(self, folder: Path, is_marked: object) -> None:
        """Check that a folder beside the checkpoint is one that an interrupted save has left.

        Raises:
            FileExistsError: It has other things in it, or is a checkpoint by itself.
        """
        if folder.exists() and not is_marked and any(folder.iterdir()):
            raise FileExistsError(
                f'a save to {self.folder} uses {folder}, but there is something else: move it, or '
                'name another folder'
            )

    def write_data(self, plan: Any, planner: Any) -> 'Future[list[Any]]':
        """Record the plan of this rank."""
        self._plan = plan, planner
        self._mark(self._rank, _WRITING).touch()
        nothing: Future[list[Any]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Record the plan of all ranks, on the first one.

        Raises:
            RuntimeError: Another rank writes to another folder.
        """
        self._whole = metadata
        missing = [rank for rank in self._ranks if not self._mark(rank, _WRITING).exists()]
        if missing:
            raise RuntimeError(
                f'rank {missing[0]} writes to another {self._saving}: all ranks '
                'need a folder on a file system that they share'
            )

    def plan(self, state: dict[str, Any], group: Any) -> None:
        """Plan a checkpoint with the other ranks of a group; ``None`` if there are none.

        Raises:
            RuntimeError: A rank failed, which is named.
        """
        with as_errors('saving a checkpoint'):
            save(state, storage_writer=self, process_group=group, no_dist=group is None)

    def turns(self) -> list[Callable[[], None]]:
        """Return the calls that write a planned checkpoint. All ranks end each of them together.

        The first rank gives the folder its new place before the others look for it.
        """
        ends: list[Callable[[], None]] = [_wait_for_first, self.end]
        return [self.write, *(ends if self._rank else reversed(ends))]

    def write(self) -> None:
        """Write the part of this rank.

        Raises:
            RuntimeError: It cannot be written.
        """
        try:
            results = super().write_data(*self._plan).wait()
            names = {written.storage_data.relative_path for written in results}
            sums = {name: _sum(self._saving / name) for name in names}
            _write(self._mark(self._rank, _WRITING), pickle.dumps((results, sums)))
            self._mark(self._rank, _WRITING).rename(self._mark(self._rank, _WRITTEN))
        except BaseException as error:
            failed = self._fail(_WRITING, error)
            if not isinstance(error, Exception):
                raise
            raise failed from error
        finally:
            self._plan = None

    def end(self) -> None:
        """Wait until all ranks have written their parts, and the folder has its new place.

        Raises:
            RuntimeError: A rank failed, or does not respond.
        """
        states = self._states()
        since = time.monotonic()
        while states is not None and (self._rank or len(states[_WRITTEN]) < len(self._ranks)):
            if states[_FAILED]:
                first = self._mark(states[_FAILED][0], _FAILED)
                raise _failed(states[_FAILED], first.read_text(errors='replace'))
            if time.monotonic() - since > self._patience():
                raise _failed(
                    states[_WRITING] or [0], 'nothing was heard of it; its process may have ended'
                )
            time.sleep(_PERIOD)
            states = self._states()
        if self._whole is not None:
            try:
                self._replace(self._whole)
            except Exception as error:
                raise self._fail(_WRITTEN, error) from error

    def _replace(self, metadata: Metadata) -> None:
        """Move the folder to its new place, on the first rank."""
        marks = [self._mark(rank, _WRITTEN) for rank in self._ranks]
        parts = [pickle.loads(mark.read_bytes()) for mark in marks]
        super().finish(metadata, [results for results, _ in parts])
        # PyTorch may have written a copy of the metadata that it was given.
        written: Any = pickle.loads((self._saving / _METADATA).read_bytes())
        written.files = {}
        for _, sums in parts:
            written.files.update(sums)
        body = pickle.dumps(written)
        _write(self._saving / _METADATA, body + _SUM + b'%08x' % zlib.crc32(body))
        before = _beside(self.folder, 'before')
        if self.folder.exists():
            if before.exists():
                _delete(before)
            (self.folder / _REPLACED).touch()
            self.folder.rename(before)
        self._saving.rename(self.folder)
        for mark in marks:
            (self.folder / mark.name).unlink()
        if before.exists():
            with suppress(OSError):
                _delete(before)

    def _states(self) -> dict[str, list[int]] | None:
        """Return the ranks in each state; ``None`` when the folder has its new place."""
        try:
            names = {*os.listdir(self._saving)}
        except FileNotFoundError:
            return None
        ranks = {}
        for state in (_WRITING, _WRITTEN, _FAILED):
            ranks[state] = [rank for rank in self._ranks if self._mark(rank, state).name in names]
        return ranks

    def _mark(self, rank: int, state: str) -> Path:
        return self._saving / f'{_METADATA}.{rank}.{state}'

    def _fail(self, state: str, error: BaseException) -> RuntimeError:
        """Replace this rank's state in the folder by an error, for the other ranks."""
        text = f'{type(error).__name__}: {error}'
        mark = self._mark(self._rank, state)
        with suppress(OSError):  # A full disk can still rename files.
            mark.write_text(text)
        with suppress(OSError):
            mark.rename(self._mark(self._rank, _FAILED))
        return _failed([self._rank], text)


class Saving:
    """A checkpoint that is written while training continues.

    Its thread keeps the process alive until all ranks have written it, or one has failed.

    Args:
        writer: Has the plan of this rank.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._error: BaseException | None = None
        self._written = threading.Event()
        self._is_raised = False
        self._thread = threading.Thread(target=self._run, name='torchgpipe saving')
        self._thread.start()

    def _run(self) -> None:
        try:
            try:
                self._writer.write()
            finally:
                self._written.set()
            self._writer.end()
        except BaseException as error:
            self._error = error

    def wait(self, all_ranks: bool) -> None:
        """Wait until this rank has written its part, or until all ranks have."""
        if all_ranks:
            self._thread.join()
        else:
            self._written.wait()

    def done(self) -> bool:
        """Return whether the checkpoint is written, or has failed."""
        return not self._thread.is_alive()

    def result(self, timeout: float | None = None) -> None:
        """Wait until all ranks have written the checkpoint.

        Args:
            timeout: The longest wait, in seconds; by default there is no limit.

        Raises:
            RuntimeError: A rank failed.
            TimeoutError: The checkpoint is not written within ``timeout``.
        """
        self._thread.join(timeout)
        if not self.done():
            raise TimeoutError(f'the checkpoint is not written after {timeout} s')
        self._is_raised = True
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Wait, and raise the error if no call of ``result`` has raised it yet."""
        if not self._is_raised:
            self.result()


def _wait_for_first() -> None:
    """Do nothing while other ranks have their turn."""


def _failed(ranks: Iterable[int], why: str) -> RuntimeError:
    return RuntimeError(f'saving a checkpoint failed on ranks {[*ranks]}: {why}')


def _delete(folder: Path) -> None:
    """Delete a folder, its marks last, so that a later save can end an interrupted deletion."""
    for file in folder.iterdir():
        if file.is_file() and not file.name.startswith(f'{_METADATA}.'):
            file.unlink()
    shutil.rmtree(folder)


def _write(file: Path, data: bytes) -> None:
    with file.open('wb') as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f'{folder.name}.{what}')


def _is_ours(file: Path) -> bool:
    return file.name.startswith(_METADATA) or file.suffix == '.distcp'


def _resolved(folder: Folder) -> Path:
    """Return the path of a folder, which need not exist yet; links are resolved."""
    return Path(os.path.realpath(folder))
