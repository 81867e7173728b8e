"""Run the settings of an experiment one after another, and keep whatever was measured."""

import gc
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.harness.curves import draw_ratios
from benchmarks.harness.experiment import Experiment, Setting
from benchmarks.harness.memory import is_exhaustion, memory_limit
from benchmarks.harness.options import Options, is_on_host
from benchmarks.harness.report import describe, machine, write_json
from benchmarks.harness.tables import experiment_rows, is_accelerated, notes, partition_rows
from torchgpipe.base.errors import table
from torchgpipe.trainer.files import output_folder

#: A function that measures one setting, and adds to a result as it goes.
Measure = Callable[[Experiment, Setting, Options, dict[str, Any]], None]


def campaign(experiment: Experiment, options: Options, measure: Measure) -> None:
    """Measure each chosen setting. Write and print the results, also when interrupted."""
    folder = output_folder(options.output)
    results: list[dict[str, Any]] = []
    try:
        for setting in options.settings:
            result = _describe(experiment, setting, options)
            try:
                _measure(experiment, setting, options, measure, result)
            finally:
                if result['status'] != 'not measured':
                    results.append(result)
                    _relate(experiment, results)
                    _write(folder, experiment.name, _summary(experiment, options, results))
    finally:
        if results:
            _show(experiment, _summary(experiment, options, results), folder)


def _write(folder: Path, name: str, summary: dict[str, Any]) -> None:
    try:
        write_json(folder, name, summary)
    except OSError as error:
        raise click.ClickException(
            f"cannot write '{folder / name}.json': {error.strerror or error}"
        ) from None


def _describe(experiment: Experiment, setting: Setting, options: Options) -> dict[str, Any]:
    batch = setting.scaled_batch(options.scale)
    published = {
        source: {'figure': figure, 'ratio': experiment.published_ratio(setting, source)}
        for source, figure in setting.published.items()
    }
    return {
        'setting': setting.name,
        'model': str(setting.model),
        'batch': batch,
        'chunks': min(setting.chunks, batch),
        'balance': list(setting.balance),
        'checkpoint': setting.checkpoint if setting.balance else None,
        'devices': [str(device) for device in options.place(setting)],
        'status': 'not measured',
        'figure': None,
        'ratio': None,
        'published': published,
        'details': {},
        'published_details': {name: dict(sources) for name, sources in setting.details.items()},
    }


def _measure(
    experiment: Experiment,
    setting: Setting,
    options: Options,
    measure: Measure,
    result: dict[str, Any],
) -> None:
    devices = options.place(setting)
    accelerators = {device for device in devices if device.type != 'cpu'}
    try:
        with memory_limit() if all(map(is_on_host, devices)) else nullcontext():
            measure(experiment, setting, options, result)
        result['status'] = 'measured'
    except (MemoryError, RuntimeError) as error:
        if not is_exhaustion(error):
            raise
        reason = str(error).splitlines()[:1] or ['an allocation failed']
        result.update(status='out of memory', reason=reason[0], figure=None)
    except BaseException:
        result['status'] = 'not measured' if result['figure'] is None else 'interrupted'
        raise
    finally:
        gc.collect()
        for device in accelerators:
            torch.get_device_module(device).empty_cache()


def _relate(experiment: Experiment, results: list[dict[str, Any]]) -> None:
    base = next(
        (result['figure'] for result in results if result['setting'] == experiment.baseline.name),
        None,
    )
    for result in results:
        result['ratio'] = result['figure'] / base if base and result['figure'] else None


def _summary(
    experiment: Experiment, options: Options, results: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        'experiment': experiment.name,
        'figure': experiment.figure,
        'unit': experiment.unit,
        'baseline': experiment.baseline.name,
        'scale': options.scale,
        'resolution': experiment.scaled_resolution(options.scale),
        'epochs': options.epochs,
        'skip_epochs': options.skip_epochs,
        'dtype': str(options.dtype).split('.')[1],
        'compile': options.compile,
        'seed': options.seed,
        'schedule': options.schedule,
        'settings': results,
    }


def _show(experiment: Experiment, summary: dict[str, Any], folder: Path) -> None:
    click.echo(f'{experiment.title}: {describe(machine(), is_accelerated(summary))}\n')
    click.echo(table(*experiment_rows(summary)))
    if partition_rows(summary)[1]:
        click.echo('\n' + table(*partition_rows(summary)))
    for note in notes(summary):
        click.echo(f'\n{note}')
    files = [folder / f'{experiment.name}.json']
    with suppress(OSError):  # A folder that is gone has been complained about.
        # Small runs on the CPU are no result that bars could stand for.
        if any(result['ratio'] for result in summary['settings']) and (
            summary['scale'] >= 1 or is_accelerated(summary)
        ):
            files += draw_ratios(summary, folder / experiment.name)
    click.echo('\n' + '\n'.join(str(path) for path in files if path.exists()))
