"""The output of all benchmarks: tables, and files that name the machine of the measurement."""

import json
import platform
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch

import torchgpipe
from benchmarks.harness.options import NAME
from torchgpipe.base.devices import accelerator, accelerators
from torchgpipe.trainer.files import replacing
from torchgpipe.trainer.launch import available_cores

#: The header of a table, and its rows.
Rows = tuple[list[str], list[list[str]]]


output_option = click.option(
    '--output', default='results', metavar='DIR', help='Where results and pictures go.'
)


def markdown(rows: Rows) -> str:
    """Write a table for the documentation."""
    header, body = rows
    lines = [header, ['---', *['--:'] * (len(header) - 1)], *body]
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


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


def write_json(folder: Path, name: str, results: Any) -> Path:
    """Write results together with the machine that they come from."""
    path = folder / f'{name}.json'
    text = json.dumps({'machine': machine(), 'results': results}, indent=1) + '\n'
    with replacing(path) as new:
        new.write_text(text)
    return path
