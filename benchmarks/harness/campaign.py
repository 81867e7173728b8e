"""Run the settings of an experiment one after another, and keep whatever was measured."""

import gc
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.harness.experiment import Experiment, Setting
from benchmarks.harness.memory import memory_limit, unless_exhausted
from benchmarks.harness.options import Options, is_on_host
from benchmarks.harness.report import Section, write_json
from benchmarks.harness.tables import experiment_bars, experiment_parts, is_accelerated
from torchgpipe.trainer.files import output_folder

#: A function that measures one setting, and adds to a result as it goes.
Measure = Callable[[Experiment, Setting, Options, dict[str, Any]], None]


def campaign(experiment: Experiment, options: Options, measure: Measure) -> None:
    """Measure each chosen setting. Write and print the results, also when interrupted."""
    folder = output_folder(options.output)
    summary = _summary(experiment, options)
    results = summary['settings']
    try:
        for setting in options.settings:
            result = _describe(experiment, setting, options)
            try:
                _measure(experiment, setting, options, measure, result)
            finally:
                if result['status'] != 'not measured':
                    results.append(result)
                    _relate(experiment, results)
                    _write(folder, experiment.name, summary)
    finally:
        if results:
            section = Section(experiment.title, experiment.name, experiment_parts, experiment_bars)
            with suppress(OSError):  # The folder is gone, which is an error already.
                section.publish(summary, folder, is_accelerated(summary))


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

    def measured() -> dict[str, Any]:
        with memory_limit() if all(map(is_on_host, devices)) else nullcontext():
            measure(experiment, setting, options, result)
        return {'status': 'measured'}

    try:
        outcome = unless_exhausted(measured)
        if outcome['status'] != 'measured':
            outcome['figure'] = None
        result.update(outcome)
    except BaseException:
        result['status'] = 'not measured' if result['figure'] is None else 'interrupted'
        raise
    finally:
        gc.collect()
        for device in {device for device in devices if device.type != 'cpu'}:
            torch.get_device_module(device).empty_cache()


def _relate(experiment: Experiment, results: list[dict[str, Any]]) -> None:
    """Add the ratio of each figure to the one of the baseline."""
    figures = {result['setting']: result['figure'] for result in results}
    base = figures.get(experiment.baseline.name)
    for result in results:
        result['ratio'] = result['figure'] / base if base and result['figure'] else None


def _summary(experiment: Experiment, options: Options) -> dict[str, Any]:
    """Return the options of a campaign, without results yet."""
    return {
        'experiment': experiment.name,
        'figure': experiment.figure,
        'unit': experiment.unit,
        'baseline': experiment.baseline.name,
        'scale': options.scale,
        'resolution': experiment.scaled_resolution(options.scale),
        'epochs': options.epochs,
        'skip_epochs': options.skip_epochs,
        'dtype': str(options.dtype).removeprefix('torch.'),
        'compile': options.compile,
        'seed': options.seed,
        'schedule': options.schedule,
        'settings': [],
    }
