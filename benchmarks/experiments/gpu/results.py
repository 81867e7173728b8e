"""Results that are written one by one, so that a run goes on where an earlier one stopped."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.harness.report import machine, write_json

#: The name of the file.
NAME = 'gpu'

#: The facts of a machine that all results of a file share.
SAME = ('torchgpipe', 'torch', 'python', 'cpu', 'cores', 'cuda', 'cudnn')


class Results:
    """The results of measurements by name, in a file.

    Args:
        folder: The folder of the file.
        device: The device of the measurements.
        scale: The fraction of the full size.

    Raises:
        click.UsageError: The file has results of other versions, of another device or scale, or
            cannot be read.
    """

    def __init__(self, folder: Path, device: torch.device, scale: float) -> None:
        self._folder = folder
        self._settings = {'device': str(device), 'name': _name(device), 'scale': scale}
        self._by_name: dict[str, Any] = {}

        path = folder / f'{NAME}.json'
        if not path.exists():
            return
        try:
            stored = json.loads(path.read_text())
            before = _facts(stored['machine'], stored['results'])
            self._by_name = stored['results']['parts']
        except (KeyError, TypeError, ValueError) as error:
            raise click.UsageError(
                f"'{path}' has no results of this command "
                f'({type(error).__name__}: {error}); remove it, or choose '
                'another --output'
            ) from None
        now = _facts(machine(), self._settings)
        changed = [
            f'{name} {before[name]} instead of {now[name]}'
            for name in now
            if before[name] != now[name]
        ]
        if changed:
            raise click.UsageError(
                f"'{path}' has results of {', '.join(changed)}; remove it, or "
                'choose another --output'
            )

    def is_complete(self, name: str) -> bool:
        """Return whether there is a result of this name, and no failure."""
        return name in self._by_name and not self.has_failed(name)

    def add(self, name: str, result: dict[str, Any]) -> None:
        """Write a result."""
        self._by_name[name] = result
        write_json(self._folder, NAME, self.to_dict())

    def has_failed(self, name: str) -> bool:
        """Return whether a measurement of this name has failed."""
        return 'failure' in self._by_name.get(name, {})

    def failures(self, names: Sequence[str]) -> list[str]:
        """Return the failures of measurements, each with its name."""
        lines = []
        for name in names:
            failure = self._by_name.get(name, {}).get('failure')
            if failure is not None:
                lines.append(f'{name}: {failure}')
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Return the device, the scale, and all results by name."""
        return {**self._settings, 'parts': self._by_name}


def _facts(machine: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that results of one file share."""
    facts = {name: machine[name] for name in SAME}
    return {**facts, **{name: settings[name] for name in ('device', 'name', 'scale')}}


def _name(device: torch.device) -> str:
    """Return the name of an accelerator, or of the device's type."""
    if device.type == 'cpu':
        return device.type
    name: str = torch.get_device_module(device).get_device_name(device)
    return name
