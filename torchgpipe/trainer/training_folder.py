"""The folder of a training: the process that uses it, its description, and its checkpoints.

::

    training.lock        locked while a process trains; the host and the process, for an error
    training.json        the options that cannot change, and the name of the training
    step-300/            a complete checkpoint after 300 steps
    step-400.saving/     a checkpoint that is being written, or was when a rank was killed
    step-400.before/     the checkpoint that step-400 replaces, until the new one is complete
    step-400.damaged/    a checkpoint that could not be loaded; kept for the user
    step-300-best/       any other name belongs to the user

The lock belongs to an open file, which all ranks of a launch share. The system releases it when
the last of them has ended, however they end. So no lock is left behind, and no rank of an ended
launch writes beside a new one.
"""

import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import reduction
from pathlib import Path
from typing import Any
from uuid import uuid4

import click
import torch
import torch.distributed as dist

from torchgpipe.distributed import DistributedGPipe
from torchgpipe.distributed.agreement import NotBegun
from torchgpipe.trainer.files import output_folder, replacing
from torchgpipe.trainer.ranks import from_first_rank

#: The names of checkpoints, and of folders that a save leaves when it is interrupted.
_CHECKPOINT = re.compile(r'step-([1-9]\d*)(|\.before|\.saving)')

#: Options in ``training.json`` since 0.22. Older trainings resume without them.
_OPTIONAL = ('name', 'weight_decay', 'dtype', 'digest')


class Lock:
    """An open, locked file. Processes that get it as an argument share the lock."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> Any:
        return _received, (reduction.DupFd(self.descriptor),)


def new_name() -> str:
    """Return a name for a training, by which its lines in logs are known."""
    return uuid4().hex[:8]


def _received(duplicate: Any) -> Lock:
    """Return the lock in the process that receives it."""
    return Lock(duplicate.detach())


class TrainingFolder:
    """The folder of a training.

    Args:
        path: The folder, which need not exist.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._description = self.path / 'training.json'

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint after a number of steps."""
        return self.path / f'step-{step}'

    def steps(self) -> list[int]:
        """Return the steps of checkpoints in ascending order; some may be damaged."""
        steps = set()
        for path in self.path.glob('step-*'):
            name = _CHECKPOINT.fullmatch(path.name)
            if name and name[2] != '.saving':
                steps.add(int(name[1]))
        return sorted(steps)

    @contextmanager
    def locked(self) -> Iterator[Lock]:
        """Hold the folder for one training.

        Raises:
            click.UsageError: Another process holds it, or it cannot be written.
        """
        output_folder(str(self.path))
        with open(self.path / 'training.lock', 'a+') as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise click.UsageError(
                    f'{self.path} is in use by {file.read() or "another process"}: wait until '
                    'that training has ended, or give another folder'
                ) from None
            except OSError as error:
                click.echo(
                    f'{self.path} has no lock ({error.strerror}): start no other training '
                    'in it meanwhile',
                    err=True,
                )
            file.truncate(0)
            file.write(f'process {os.getpid()} on {socket.gethostname()}')
            file.flush()
            yield Lock(file.fileno())

    def check(self, training: Mapping[str, Any], resume: bool, steps: int) -> str:
        """Check that a training can begin or continue here, and return its name.

        Args:
            training: The options that cannot change.
            resume: Whether it continues from a checkpoint.
            steps: The number of steps in all.

        Raises:
            click.UsageError: The folder has another training, checkpoints of an unknown one, or
                later checkpoints.
        """
        saved = self._read()
        checkpoints = self.steps()
        if saved is None:
            if checkpoints:
                raise click.UsageError(
                    f'{self.path} has step-{checkpoints[-1]}, but no training.json, so it is not '
                    'the folder of a training: give another folder'
                )
            return new_name()
        differences = []
        for name, value in training.items():
            is_known = name in saved or name not in _OPTIONAL
            if is_known and saved.get(name) != value:
                differences.append(f'{name} {saved.get(name)} there, {value} here')
        if differences:
            raise click.UsageError(
                f"{self.path} has another training's checkpoints ({'; '.join(differences)}): give "
                'the options that it had, or another folder'
            )
        if checkpoints and not resume:
            raise click.UsageError(
                f'{self.path} has checkpoints already: give --resume, or another folder'
            )
        if checkpoints and checkpoints[-1] > steps:
            raise click.UsageError(
                f'{self.path} has step-{checkpoints[-1]}, but --steps is '
                f'{steps}: give {checkpoints[-1]} steps or more'
            )
        return str(saved.get('name', ''))

    def _read(self) -> dict[str, Any] | None:
        """Return the description of the training, if there is one."""
        try:
            saved = json.loads(self._description.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise click.UsageError(f'cannot read {self._description}: {error}') from None
        if not isinstance(saved, dict):
            raise click.UsageError(
                f'{self._description} does not describe a training: it is {json.dumps(saved)[:50]}'
            )
        return saved

    def describe(self, training: Mapping[str, Any]) -> None:
        """Write the description of the training."""
        output_folder(str(self.path))
        with replacing(self._description) as new:
            new.write_text(json.dumps(training) + '\n')

    def set_aside(self, step: int) -> Path:
        """Rename a checkpoint that cannot be loaded, so that a new one can have its name."""
        number = 0
        while True:
            path = self.path / f'step-{step}.damaged{number or ""}'
            if not os.path.lexists(path):
                break
            number += 1
        checkpoint = self.checkpoint(step)
        if not os.path.lexists(checkpoint):
            checkpoint = checkpoint.with_name(f'{checkpoint.name}.before')
        return checkpoint.rename(path)

    def begin(
        self,
        training: Mapping[str, Any],
        model: DistributedGPipe,
        optimizer: torch.optim.Optimizer,
        resume: bool,
    ) -> dict[str, Any]:
        """Begin a training, or load its newest checkpoint that is complete, on all ranks.

        Damaged checkpoints are set aside.

        Args:
            training: The description of the training.
            model: The model.
            optimizer: Its optimizer.
            resume: Whether to continue from a checkpoint.

        Returns:
            The ``extra`` of the checkpoint; ``{'step': 0}`` if there is none.

        Raises:
            click.UsageError: There are checkpoints, but none can be loaded.
        """
        is_first = dist.get_rank() == 0
        # Other ranks may see an older folder.
        steps = from_first_rank(self.steps() if resume and is_first else [], model.devices[0])
        if not steps:
            if is_first:
                self.describe(training)
            return {'step': 0}
        damaged = []
        for step in reversed(steps):
            try:
                state: dict[str, Any] = model.load(self.checkpoint(step), optimizer)
            except (OSError, RuntimeError, ValueError) as error:
                if isinstance(error, RuntimeError) and not isinstance(error.__cause__, NotBegun):
                    raise  # Such as after the end of a rank, which does not damage a checkpoint.
                damaged.append(step)
                if is_first:
                    click.echo(f'step-{step} is not loaded: {error}', err=True)
                continue
            if is_first:
                for step in damaged:
                    click.echo(f'it is now {self.set_aside(step)}', err=True)
            return state
        dist.destroy_process_group()
        raise click.UsageError(f'no checkpoint in {self.path} can be loaded')

    def save(
        self,
        step: int,
        model: DistributedGPipe,
        optimizer: torch.optim.Optimizer,
        extra: Mapping[str, Any],
        wait: bool,
        keep: int,
    ) -> None:
        """Save a checkpoint, on all ranks, and delete old ones.

        Args:
            step: The step.
            model: The model.
            optimizer: Its optimizer.
            extra: Further state, the same on all ranks.
            wait: Whether to return after it is written.
            keep: The number of checkpoints to keep.
        """
        # It first waits for the previous one, and raises its error.
        model.save(self.checkpoint(step), optimizer, extra=extra, wait=wait)
        if dist.get_rank() == 0:
            self.delete_old(keep, step)

    def delete_old(self, keep: int, step: int) -> None:
        """Delete all but the newest checkpoints.

        Args:
            keep: The number of checkpoints to keep.
            step: The step whose checkpoint ranks may be writing.
        """
        kept = {step, *self.steps()[-keep:]}
        for path in self.path.glob('step-*'):
            name = _CHECKPOINT.fullmatch(path.name)
            if name and int(name[1]) not in kept and _is_checkpoint(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_checkpoint(path: Path) -> bool:
    """Return whether a path is a folder with the files of a checkpoint only."""
    return path.is_dir() and all(
        file.name.startswith('.metadata') or file.suffix == '.distcp' for file in path.iterdir()
    )
