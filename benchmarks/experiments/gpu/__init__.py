"""All that one GPU can prove: time and memory with every partition on one device.

Results are written one by one, so that a run goes on where an earlier one stopped.
"""

import gc
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import torch
from tqdm import tqdm

from benchmarks.experiments.gpu.page import GPU_PAGE, gpu_page, make_gpu_page
from benchmarks.experiments.gpu.parts import Measurement, all_parts
from benchmarks.harness.memory import first_line, is_exhaustion, memory_limit
from benchmarks.harness.options import is_on_host, output_option, parse_devices, scale_option
from benchmarks.harness.report import machine, write_json
from torchgpipe.base.devices import accelerator, current_device
from torchgpipe.trainer.config import require
from torchgpipe.trainer.files import output_folder, replacing

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
        changed = []
        for name, value in _facts(machine(), self._settings).items():
            if before[name] != value:
                changed.append(f'{name} {before[name]} instead of {value}')
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
    for name in ('device', 'name', 'scale'):
        facts[name] = settings[name]
    return facts


def _name(device: torch.device) -> str:
    """Return the name of an accelerator, or of the device's type."""
    if device.type == 'cpu':
        return device.type
    name: str = torch.get_device_module(device).get_device_name(device)
    return name


@click.command()
@click.option(
    '--devices',
    callback=parse_devices,
    metavar='D',
    help='One device. [default: the current accelerator]',
)
@scale_option
@click.option(
    '--minutes',
    type=click.FloatRange(0, min_open=True),
    default=8.0,
    help='After these, nothing more is started; the next run goes on from there.',
)
@click.option(
    '--part',
    'names',
    type=click.Choice([part.name for part in all_parts()]),
    multiple=True,
    show_default='all',
    help='May be given several times; it is measured again.',
)
@output_option
def gpu(
    devices: tuple[torch.device, ...],
    scale: float,
    minutes: float,
    names: tuple[str, ...],
    output: str,
) -> None:
    """Measure time and memory on one GPU, which has all partitions.

    Each result is written as it comes, so a run that was stopped goes on where it was. The page
    is written from the results.
    """
    device = _device(devices)
    folder = output_folder(output)
    results = Results(folder, device, scale)
    parts = [part for part in all_parts() if part.name in names or not names]
    # Failed measurements are the last ones, because they may end the process.
    parts.sort(key=lambda part: results.has_failed(part.name))

    missing = [part for part in parts if part.name in names or not results.is_complete(part.name)]
    end = time.monotonic() + 60 * minutes
    bar = tqdm(desc=NAME, total=len(missing), leave=False)
    try:
        while missing and time.monotonic() <= end:
            _measure(missing.pop(0), device, scale, results)
            bar.update()
    finally:
        bar.close()
        _write_page(folder, results)

    click.echo(f'{folder / NAME}.json\n{folder / NAME}.md')
    if missing:
        skipped = ', '.join(part.name for part in missing)
        click.echo(f'not started within {minutes:g} minutes: {skipped}; run this again to go on')
    failures = results.failures([part.name for part in parts])
    if failures:
        raise click.ClickException('\n'.join(failures))


def _device(devices: Sequence[torch.device]) -> torch.device:
    """Return the one device of the option, or the current accelerator; make it the current one.

    Raises:
        click.UsageError: There are several devices, or there is no accelerator.
    """
    require(len(devices) < 2, f'this measures one device, but --devices has {len(devices)}')
    require(
        devices or accelerator(),
        'there is no accelerator; on the CPU, try it with --devices cpu --scale 0.01',
    )
    (device,) = devices or [current_device()]
    if device.type != 'cpu':
        torch.accelerator.set_device_index(device.index)
    return device


def _measure(part: Measurement, device: torch.device, scale: float, results: Results) -> None:
    """Measure, and write the result. A failure does not stop later measurements."""
    try:
        # The host's allocator does not fail before the system ends the process.
        with memory_limit() if is_on_host(device) else nullcontext():
            result = part.measure(device, scale)
        results.add(part.name, result)
    except Exception as error:
        reason = first_line(error)
        if is_exhaustion(error):
            results.add(part.name, {'status': 'out of memory', 'reason': reason})
        else:
            results.add(part.name, {'failure': f'{type(error).__name__}: {reason}'})
            # After such an error the device takes no more work. Old versions have none.
            if isinstance(error, getattr(torch, 'AcceleratorError', ())):
                raise click.ClickException(
                    f'{part.name}: {reason}; run this again to go on'
                ) from None
    gc.collect()
    if device.type != 'cpu':
        torch.get_device_module(device).empty_cache()


def _write_page(folder: Path, results: Results) -> None:
    path = folder / f'{NAME}.md'
    with replacing(path) as new:
        new.write_text(gpu_page(machine(), results.to_dict()))


COMMANDS = [gpu]

#: Pages of the documentation, with functions that return their text.
PAGES = {GPU_PAGE: make_gpu_page}
