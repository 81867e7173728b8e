"""The output of all benchmarks: tables, and files that name the machine of the measurement."""

import json
import platform
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import click
import torch

import torchgpipe
from benchmarks.harness.charts import Bars, Curves, draw
from benchmarks.harness.options import NAME
from torchgpipe.base.devices import accelerator, accelerators
from torchgpipe.base.errors import table
from torchgpipe.trainer.files import replacing
from torchgpipe.trainer.launch import available_cores

#: The header of a table, and its rows.
Rows = tuple[list[str], list[list[str]]]

#: A text or a table.
Part = str | Rows


def markdown(rows: Rows) -> str:
    """Write a table for the documentation."""
    header, body = rows
    lines = [header, ['---', *['--:'] * (len(header) - 1)], *body]
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def written(part: Part) -> str:
    """Write a text or a table for the documentation."""
    return part if isinstance(part, str) else markdown(part)


def machine() -> dict[str, Any]:
    """Return the date, the versions and the machine of a measurement."""
    gpus = [torch.get_device_module(device).get_device_name(device) for device in accelerators()]
    return {
        'date': date.today().isoformat(),
        'torchgpipe': torchgpipe.__version__,
        'torch': torch.__version__,
        'python': platform.python_version(),
        'cpu': _cpu_name(),
        'cores': len(available_cores()),
        'gpus': gpus,
        'cuda': torch.version.cuda,
        'cudnn': torch.backends.cudnn.version() if accelerator() == 'cuda' else None,
    }


def describe(computer: dict[str, Any], accelerated: bool = False) -> str:
    """Say in one line where and when figures were measured: on accelerators, or on the CPU."""
    hardware = f'{computer["cpu"]}, {computer["cores"]} cores'
    if accelerated and NAME in computer['gpus']:
        hardware = f'{len(computer["gpus"])} × {NAME} on {hardware}'
    elif accelerated:
        hardware = ', '.join(computer['gpus'])
        if computer['cuda']:
            hardware += f', CUDA {computer["cuda"]}, cuDNN {computer["cudnn"]}'
    versions = f'torchgpipe {computer["torchgpipe"]}, torch {computer["torch"]}'
    return f'{versions}, {hardware}, {computer["date"]}'


def _cpu_name() -> str:
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
        return next(
            line.partition(':')[2].strip() for line in lines if line.startswith('model name')
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def filled(text: str) -> str:
    """Break the lines of a text."""
    return '\n'.join(
        fill(line, 99, break_on_hyphens=False, break_long_words=False)
        for line in text.splitlines()
    )


def chosen_options() -> list[str]:
    """Return the words of the current command for all options but their defaults, and the folder.

    Outside of a command there are none.
    """
    context = click.get_current_context(silent=True)
    if context is None:
        return []
    words = []
    for option in context.command.params:
        value = context.params.get(str(option.name))
        is_default = value is None or value == option.get_default(context)
        if is_default or option.name == 'output' or not isinstance(option, click.Option):
            continue
        values = value if isinstance(value, tuple | list) else [value]
        for item in values:
            words += [option.opts[0]] if option.is_flag else [option.opts[0], str(item)]
    return words


def write_json(folder: Path, name: str, results: Any, accelerated: bool = False) -> Path:
    """Write results together with the machine and the options that they come from.

    Args:
        folder: The folder.
        name: The name of the command.
        results: The results.
        accelerated: Whether they are from accelerators.
    """
    path = folder / f'{name}.json'
    stored = {
        'machine': machine(),
        'accelerated': accelerated,
        'options': chosen_options(),
        'results': results,
    }
    with replacing(path) as new:
        new.write_text(json.dumps(stored, indent=1) + '\n')
    return path


class Section(NamedTuple):
    """The results of a command: its output, its files, and its section of the page.

    Attributes:
        title: The heading of the section.
        name: The command, and the name of its files.
        parts: Returns text and tables of results.
        panels: Returns the panels of a picture of results.
    """

    title: str
    name: str
    parts: Callable[[Any], Iterable[Part]]
    panels: Callable[[Any], Sequence[Curves | Bars]] = lambda results: []

    def publish(self, results: Any, folder: Path, accelerated: bool = False) -> None:
        """Print results, and write them with their picture.

        Args:
            results: The results.
            folder: The folder for the files.
            accelerated: Whether they are from accelerators.
        """
        click.echo(f'{describe(machine(), accelerated)}\n')
        for part in self.parts(results):
            text = filled(part) if isinstance(part, str) else table(*part)
            click.echo(f'{text}\n')
        click.echo(write_json(folder, self.name, results, accelerated))
        panels = self.panels(results)
        if panels:
            for path in draw(panels, folder / self.name):
                click.echo(path)
