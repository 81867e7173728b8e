"""Logs of JSON lines: appended to, and cut only where lines are those of a lost attempt.

::

    {"training": "5f…", "step": 1, …}   of an earlier training: never changed
    {"training": "c0…", "step": 1, …}
    {"training": "c0…", "step": 2, …}   the last step of the checkpoint that is loaded
    {"training": "c0…", "step": 3, …}   lost with its process: cut, and written again
    {"training": "c0…", "st             half a line of a killed process: cut

A log may also be a device, a pipe, or the output of this process. Lines are written to it, and
nothing is read or cut.
"""

import errno
import json
import os
import re
import stat
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import click

from torchgpipe.base.errors import format_bytes


class _TrainingLines(NamedTuple):
    """The lines of one training in a log."""

    lines: list[dict[str, Any]]
    #: The size of the file without lines that are lost, in bytes.
    size: int


def check_log(path: str, training: str, last: int, regular: bool = False) -> None:
    """Check that a training can write to a log.

    Args:
        path: The file, which need not exist.
        training: The name of the training.
        last: The last step of the newest checkpoint, or 0.
        regular: Whether only a regular file will do.

    Raises:
        click.UsageError: It cannot, or the file has other text than lines of JSON.
    """
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        # To open a pipe and close it again would end its reader.
        if not _is_stream(path):
            os.close(_open(path))
    except OSError as error:
        raise _unwritable(path, error) from None
    if not _is_stream(path):
        _own_lines(path, training, last)
    elif regular:
        raise click.UsageError(f'the log {path} is no regular file, which --log-samples takes')


def sample_logs(path: str) -> list[str]:
    """Return the logs of samples beside a log: its name with ``.0``, ``.1`` and so on."""
    log = Path(path)
    name = re.compile(re.escape(log.name) + r'\.\d+')
    return sorted(str(file) for file in log.parent.glob('*') if name.fullmatch(file.name))


class Log:
    """A log of JSON lines that a training writes to.

    Args:
        path: The file; empty to keep lines in memory only.
        training: The name of the training.
        last: The last step of the checkpoint that is loaded, or 0.
    """

    def __init__(self, path: str, training: str, last: int) -> None:
        #: The lines of the training.
        self.lines: list[dict[str, Any]] = []
        #: Whether lines can be read again after a restart.
        self.is_regular = bool(path) and not _is_stream(path)
        self._training = training
        self._descriptor: int | None = None
        if not path:
            return
        try:
            self._descriptor = _open(path)
        except OSError as error:
            raise _unwritable(path, error) from None
        weakref.finalize(self, os.close, self._descriptor)
        if self.is_regular:
            self.lines, size = _own_lines(path, training, last)
            os.truncate(path, size)

    def has(self, step: int) -> bool:
        """Return whether there is a line of a step."""
        return any(line['step'] == step for line in self.lines)

    def add(self, line: dict[str, Any]) -> None:
        """Add a line."""
        self.lines.append(line)
        if self._descriptor is None:
            return
        text = json.dumps({'training': self._training, **line}) + '\n'
        rest = memoryview(text.encode())
        try:
            # Usually one write, so that a killed process leaves whole lines.
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BrokenPipeError:  # The training goes on without the reader.
            click.echo(f'step {line["step"]}: the process that reads the log has ended', err=True)
            self._descriptor = None


def line_of(entry: dict[str, Any]) -> str:
    """Return the entry of a step as a line of a table."""
    mfu = '' if entry['mfu'] is None else f' {entry["mfu"]:.1%} MFU '
    return (
        f'step {entry["step"]:>5}  loss {entry["loss"]:<8.6g} norm {entry["grad_norm"]:<7.4g} '
        f'lr {entry["lr"]:.2e} {entry["tokens_per_second"]:>9,.0f} tokens/s '
        f'{entry["tokens_per_second_per_device"]:>9,.0f}/device '
        f'{entry["tflops_per_device"]:>7.3g} TFLOP/s{mfu} '
        f'{format_bytes(entry["peak_memory"]):>8} {entry["seconds"] * 1e3:>8.1f} ms  '
        f'bubble {entry["bubble"]:5.1%}'
        + (f'  validation {entry["val_loss"]:.4f}' if 'val_loss' in entry else '')
    )


def _is_stream(path: str) -> bool:
    """Return whether a path is a device, a pipe, or the output of this process."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(status.st_mode):
        return False
    return not stat.S_ISREG(status.st_mode) or _output_at(path) is not None


def _output_at(path: str) -> int | None:
    """Return the descriptor of this process' output, if the path leads to it."""
    for descriptor in (1, 2):
        try:
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        except OSError:  # One of them does not exist.
            continue
    return None


def _open(path: str) -> int:
    """Open a log to append to it; raise an :exc:`OSError` for a pipe that no process reads."""
    output = _output_at(path)
    if output is not None:
        return os.dup(output)  # which shares its position with other text of this process
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


def _unwritable(path: str, error: OSError) -> click.UsageError:
    why = 'no process reads this pipe' if error.errno == errno.ENXIO else error.strerror
    return click.UsageError(f'cannot write to the log {path!r}: {why}')


def _own_lines(path: str, training: str, last: int) -> _TrainingLines:
    """Return the lines of a training up to a step.

    Raises:
        click.UsageError: There is text that is not JSON, or lines of another training follow
            those that would be cut.
    """
    lines: list[dict[str, Any]] = []
    position = size = 0
    is_cut = False
    with open(path, 'rb') as file:
        for text in file:
            position += len(text)
            if not text.endswith(b'\n') and _is_half(text, training):
                break
            line = _parsed(path, text)
            is_own = line.get('training', '') == training
            if is_own and line['step'] > last:
                is_cut = True
                continue
            if is_cut:
                raise click.UsageError(
                    f'{path} has lines of another training after lines of this one that a '
                    'checkpoint does not have: give another log'
                )
            size = position
            if is_own:
                lines.append(line)
    for line in lines:
        line.pop('training', None)
    return _TrainingLines(lines, size)


def _is_half(text: bytes, training: str) -> bool:
    """Return whether a text is the start of a line of a training."""
    start = json.dumps({'training': training})[:-1].encode()
    return start.startswith(text[: len(start)])


def _parsed(path: str, text: bytes) -> dict[str, Any]:
    try:
        line = json.loads(text)
        if isinstance(line, dict) and isinstance(line.get('step'), int) and text[-1:] == b'\n':
            return line
    except ValueError:
        pass
    raise click.UsageError(f'{path} is no log of JSON lines: it has {text[:50]!r}')
