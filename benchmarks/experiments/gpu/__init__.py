"""All that one GPU can prove: time and memory with every partition on one device."""

import gc
import time
from pathlib import Path

import click
import torch
from tqdm import tqdm

from benchmarks.experiments.gpu.page import GPU_PAGE, gpu_page, make_gpu_page
from benchmarks.experiments.gpu.parts import Part, all_parts
from benchmarks.experiments.gpu.results import NAME, Results
from benchmarks.harness.exhaustion import first_line, is_exhaustion
from benchmarks.harness.options import parse_devices
from benchmarks.harness.report import machine
from torchgpipe.base.devices import accelerator, current_device
from torchgpipe.trainer.files import output_folder, replacing


@click.command()
@click.option(
    '--devices',
    callback=parse_devices,
    metavar='D',
    help='One device. [default: the current accelerator]',
)
@click.option(
    '--scale',
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help='Fraction of batches, images and layers, for a small machine.',
)
@click.option(
    '--minutes',
    type=click.FloatRange(0, min_open=True),
    default=8.0,
    show_default=True,
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
@click.option(
    '--output',
    default='results',
    show_default=True,
    metavar='DIR',
    help='Where the results and the page go.',
)
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
    if len(devices) > 1:
        raise click.UsageError(f'this measures one device, but --devices has {len(devices)}')
    if not (devices or accelerator()):
        raise click.UsageError(
            'there is no accelerator; on the CPU, try it with --devices cpu --scale 0.01'
        )
    (device,) = devices or [current_device()]
    if device.type != 'cpu':
        torch.accelerator.set_device_index(device.index)
    folder = output_folder(output)
    results = Results(folder, device, scale)
    chosen = [part for part in all_parts() if not names or part.name in names]
    chosen.sort(key=lambda part: results.has_failed(part.name))  # These may end the process.

    end = time.monotonic() + 60 * minutes
    skipped = []
    try:
        for part in tqdm(chosen, desc=NAME, leave=False):
            if results.is_complete(part.name) and part.name not in names:
                continue
            if time.monotonic() > end:
                skipped.append(part.name)
                continue
            _measure(part, device, scale, results)
    finally:
        _write_page(folder, results)

    click.echo(f'{folder / NAME}.json\n{folder / NAME}.md')
    if skipped:
        click.echo(
            f'not started within {minutes:g} minutes: {", ".join(skipped)}; run this again '
            'to go on'
        )
    failures = results.failures([part.name for part in chosen])
    if failures:
        raise click.ClickException('\n'.join(failures))


def _measure(part: Part, device: torch.device, scale: float, results: Results) -> None:
    """Measure, and write the result. A failure does not stop later measurements."""
    try:
        results.add(part.name, part.measure(device, scale))
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
