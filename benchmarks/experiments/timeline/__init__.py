"""The ablation, and the measured timeline of each of its settings."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks.experiments.timeline.ablation import carry, without
from benchmarks.harness.campaign import campaign
from benchmarks.harness.experiment import Experiment, Setting
from benchmarks.harness.job import Job, time_epochs
from benchmarks.harness.memory import GIB, peak_memory
from benchmarks.harness.options import (
    NAME,
    Options,
    experiment_options,
    is_simulated,
    take_options,
)
from benchmarks.harness.published import EXPERIMENTS, MEMORY, UTILISATION
from torchgpipe import GPipe
from torchgpipe.timeline import record

EXPERIMENT = EXPERIMENTS['unet-timeline']

#: Where the other models' balances for four devices come from.
OTHERS = {
    'resnet101': (EXPERIMENTS['resnet101-speed'], 'pipeline-4'),
    'amoebanetd': (EXPERIMENTS['amoebanetd-speed'], 'n4m4'),
}


def experiment_for(model: str) -> Experiment:
    """Return the ablation for a model: published for U-Net, with nothing to compare for others."""
    if model == 'unet':
        return EXPERIMENT
    source, name = OTHERS[model]
    like = source.setting(name)
    return replace(
        EXPERIMENT,
        name=f'{model}-timeline',
        resolution=source.resolution,
        title=EXPERIMENT.title.replace('U-Net', model),
        settings=tuple(
            replace(setting, model=like.model, balance=like.balance, published={}, details={})
            for setting in EXPERIMENT.settings
        ),
    )


def measure(
    experiment: Experiment, setting: Setting, options: Options, result: dict[str, Any]
) -> None:
    """Time epochs, then take the memory and the timeline of one step each."""
    changes = [carry] if 'portals' in setting.off else []
    with without(setting.off):
        job = Job(experiment, setting, options, *changes)
        time_epochs(job, result)
        assert isinstance(job.model, GPipe)
        with record(job.model) as timeline:
            job.forward().backward()
        job.clear()
        model = sum(sum(sizes.values()) for sizes in job.sizes())
        # Last, since PyTorch does not run compiled layers any more once it was watched.
        peak = peak_memory(job.step, job.devices)
    result['details'].update(
        {UTILISATION: 100 * timeline.utilisation, MEMORY: (model + peak) / GIB}
    )
    stem = Path(options.output) / f'{experiment.name}-{setting.name}'
    title = f'{setting.model}: {_list(setting)}'
    if any(map(is_simulated, job.devices)):
        title += f', on a {NAME}'
    files = [stem.with_name(stem.name + ending) for ending in ('.png', '.svg', '.trace.json')]
    for path in files[:2]:
        timeline.save(path, title)
    timeline.to_chrome_trace(files[2])
    result['files'] = [path.name for path in files]


def _list(setting: Setting) -> str:
    return 'without ' + ', '.join(setting.off) if setting.off else 'as it is'


@click.command(
    EXPERIMENT.name,
    help=(
        f'{EXPERIMENT.title}: each setting adds one to the settings before. Draws the measured '
        'timeline of a step (PNG, SVG), with a lane for each device, and writes a trace for '
        'Perfetto or chrome://tracing.'
    ),
)
@experiment_options(EXPERIMENT)
@click.option(
    '--model',
    type=click.Choice(['unet', 'resnet101', 'amoebanetd']),
    default='unet',
    help='Which model; published figures are there for U-Net only.',
)
def _command(model: str, **options: Any) -> None:
    experiment = experiment_for(model)
    campaign(experiment, take_options(experiment, **options), measure)


COMMANDS = [_command]
