"""The output of all benchmarks: tables, and files that name the machine of the measurement."""

import io
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch

import torchgpipe
from benchmarks.harness.simulated import NAME
from torchgpipe.base.devices import accelerator, accelerators, is_cpu

#: Peak TFLOP/s of dense bfloat16 products, from data sheets, by a part of the device's name.
PEAKS = {'A100': 312, 'H100': 989, 'H200': 989, 'B200': 2250, 'MI300X': 1307}

#: The header of a table, and its rows.
Rows = tuple[list[str], list[list[str]]]


def accept_any_text() -> None:
    """Write a question mark for each character that a terminal does not have, such as ``×``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors='replace')


def markdown(rows: Rows) -> str:
    """Write a table for the documentation."""
    header, body = rows
    lines = [header, ['---', *['--:'] * (len(header) - 1)], *body]
    return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


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


def machine() -> dict[str, Any]:
    """Return the date, the versions and the machine of a measurement."""
    gpus = [torch.get_device_module(device).get_device_name(device) for device in accelerators()]
    return {
        'date': date.today().isoformat(),
        'torchgpipe': torchgpipe.__version__,
        'torch': torch.__version__,
        'python': platform.python_version(),
        'cpu': _cpu_name(),
        'cores': len(cores()),
        'gpus': gpus,
        'cuda': torch.version.cuda,
        'cudnn': torch.backends.cudnn.version() if accelerator() == 'cuda' else None,
    }


def describe(here: dict[str, Any], accelerated: bool = False) -> str:
    """Say in one line where and when figures were measured: on accelerators, or on the CPU."""
    hardware = f'{here["cpu"]}, {here["cores"]} cores'
    if accelerated and NAME in here['gpus']:
        hardware = f'{len(here["gpus"])} × {NAME} on {hardware}'
    elif accelerated:
        hardware = ', '.join(here['gpus'])
        if here['cuda']:
            hardware += f', CUDA {here["cuda"]}, cuDNN {here["cudnn"]}'
    return f'torchgpipe {here["torchgpipe"]}, torch {here["torch"]}, {hardware}, {here["date"]}'


def cores() -> list[int]:
    """Return the cores that this process may use."""
    return (
        sorted(os.sched_getaffinity(0))
        if hasattr(os, 'sched_getaffinity')
        else list(range(os.cpu_count() or 1))
    )


def _cpu_name() -> str:
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
        return next(
            line.partition(':')[2].strip() for line in lines if line.startswith('model name')
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def peak_tflops(device: torch.device) -> float | None:
    """Return the peak of a device for dense bfloat16 products, if it is known."""
    if is_cpu(device):
        return None
    name = torch.get_device_module(device).get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def write_json(folder: Path, name: str, results: Any) -> Path:
    """Write results together with the machine that they come from."""
    path = folder / f'{name}.json'
    text = json.dumps({'machine': machine(), 'results': results}, indent=1) + '\n'
    with replacing(path) as new:
        new.write_text(text)
    return path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, whose file takes the place of another when all is written."""
    new = path.with_name(path.name + '.new')
    try:
        yield new
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)
