"""Folders and files that a training writes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click


def output_folder(path: str) -> Path:
    """Make the folder for results; raise :exc:`click.UsageError` if that is not possible."""
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / '.writable').touch()
        (folder / '.writable').unlink(missing_ok=True)  # another rank looks, too
    except OSError as error:
        raise click.UsageError(
            f'cannot write to the output folder {path!r}: {error.strerror or error}'
        ) from None
    return folder


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, whose file takes the place of another when all is written."""
    new = path.with_name(path.name + '.new')
    try:
        yield new
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
