"""Folders of checkpoints: a new one takes the place of the last one when all ranks are done.

::

    model.saving/    written by all ranks; in the end the first one renames:
    model/           ──▶ model.before/, and model.saving/ ──▶ model/, and removes model.before/

What is interrupted leaves one of the last two as it was.
"""
import os
import shutil
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

__all__ = ['Folder', 'Writer', 'make_way', 'opened', 'resolved']

#: Where a checkpoint is.
Folder = str | os.PathLike[str]

#: What is written last.
_METADATA = '.metadata'


def resolved(folder: Folder) -> Path:
    """Return where a folder is, or will be; a link is replaced by what it leads to."""
    return Path(os.path.realpath(folder))


def make_way(folder: Path) -> None:
    """Prepare the folder that a checkpoint is written to first, and see that it may be renamed.

    Raises:
        FileExistsError: There are other things where the checkpoint is to be.
    """
    others = sorted(each.name for each in folder.iterdir() if not _is_ours(each)
                    ) if folder.exists() else []
    if others:
        raise FileExistsError(f'a checkpoint takes the place of the whole folder {folder}, but '
                              f'there is {", ".join(others[:5])} in it; name another folder')
    saving = _beside(folder, 'saving')
    if saving.exists():
        shutil.rmtree(saving)
    saving.mkdir(parents=True)


def opened(folder: Path) -> tuple[Path, Metadata]:
    """Return where the last complete checkpoint of a folder is, and what it says of itself.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It can't be read.
    """
    for each in (folder, _beside(folder, 'before')):
        if (each / _METADATA).is_file():
            try:
                return each, FileSystemReader(each).read_metadata()
            except Exception as error:
                raise ValueError(f'{each / _METADATA} can not be read, so that this is no '
                                 f'checkpoint: {type(error).__name__}: {error}') from error
    why = f'has no {_METADATA}, which is written last' if folder.is_dir() else 'is not there'
    near = sorted(str(each.parent) for place in (folder, folder.parent)
                  for each in place.glob(f'*/{_METADATA}') if each.parent.suffix != '.saving')
    raise FileNotFoundError(f'{folder} is no checkpoint: it {why}'
                            + (f'; there are some at {", ".join(near[:5])}' if near else ''))


class Writer(FileSystemWriter):
    """Write a checkpoint beside a folder, and let it take the place of that in the end.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._saving = folder, _beside(folder, 'saving')
        super().__init__(self._saving)
        self._staged: dict[str, Any] | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return copies in the memory of the host, made in the first call."""
        if self._staged is None:
            self._staged = super().stage(state_dict)
        return self._staged

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """End a checkpoint, on the first rank, when all ranks have written their parts.

        Raises:
            RuntimeError: Another rank has written elsewhere.
        """
        names = {written.storage_data.relative_path for each in results for written in each}
        missing = sorted(name for name in names if not (self._saving / name).exists())
        if missing:
            raise RuntimeError(f'{missing[0]} of another rank is not in {self._saving}: all ranks '
                               'need a folder on a file system that they share')
        super().finish(metadata, results)
        _replace(self._folder)


def _replace(folder: Path) -> None:
    before = _beside(folder, 'before')
    if folder.exists():
        if before.exists():
            shutil.rmtree(before)
        folder.rename(before)
    _beside(folder, 'saving').rename(folder)
    shutil.rmtree(before, ignore_errors=True)


def _beside(folder: Path, what: str) -> Path:
    return folder.with_name(f'{folder.name}.{what}')


def _is_ours(file: Path) -> bool:
    return file.name.startswith(_METADATA) or file.suffix == '.distcp'
