"""Measure the speed of training: samples per second; or predict it from the costs of layers.

A prediction is for the same number of equal devices as was published. The model is profiled on one
device, with a small batch. That gives the time of each layer once per micro-batch, and its time
per sample. The simulator returns the time of a step on devices like this one. Copies between them
are assumed to be free. One profile varies with the load of the machine, so the ratios are medians
over several.
"""

from statistics import median
from typing import Any

import click
import torch

from benchmarks.harness.campaign import campaign
from benchmarks.harness.experiment import Experiment, Setting
from benchmarks.harness.job import Job, time_epochs
from benchmarks.harness.options import Options, experiment_options, take_options
from benchmarks.harness.published import EXPERIMENTS
from benchmarks.harness.report import Section, chosen_options
from benchmarks.harness.tables import prediction_bars, prediction_parts
from torchgpipe.balance import Profile, profile
from torchgpipe.base.devices import is_cpu, memory_of
from torchgpipe.base.settings import checkpoint_stops
from torchgpipe.plan import Costs, simulate
from torchgpipe.schedule import NAMES, make
from torchgpipe.schedule.generators import PLAIN_CALL
from torchgpipe.trainer.config import require
from torchgpipe.trainer.files import output_folder

#: Schedules for partitions that have a device each, as the published ones have.
SCHEDULES = [name for name in NAMES if len(make(name, 1, 1).stages[0]) == 1]

#: Samples of a profile.
BATCH = 8

#: Options that a prediction does not use.
UNUSED = ('--epochs', '--skip-epochs', '--dtype', '--compile', '--schedule')

#: How many profiles are taken.
PROFILES = 5


def measure(
    experiment: Experiment, setting: Setting, options: Options, result: dict[str, Any]
) -> None:
    """Train for some epochs, and add the results of each of them."""
    time_epochs(Job(experiment, setting, options), result)


def predict(experiment: Experiment, options: Options) -> None:
    """Profile the model, simulate the settings, and publish the results."""
    folder = output_folder(options.output)
    resolution = experiment.scaled_resolution(options.scale)
    device = memory_of(options.place(experiment.baseline)[0])
    torch.manual_seed(options.seed)
    model = experiment.baseline.model.build()
    sample = torch.rand(BATCH, 3, resolution, resolution)
    profiles = [profile(model, sample, device=device) for _ in range(PROFILES)]
    summary = {
        'experiment': experiment.name,
        'baseline': experiment.baseline.name,
        'resolution': resolution,
        'batch': BATCH,
        'profiles': PROFILES,
        'device': str(device),
        'scale': options.scale,
        'seed': options.seed,
        'settings': [_prediction(experiment, setting, profiles) for setting in options.settings],
    }
    name = f'{experiment.name}-predicted'
    Section(experiment.title, name, prediction_parts, prediction_bars).publish(
        summary, folder, not is_cpu(device)
    )


def _prediction(
    experiment: Experiment, setting: Setting, profiles: list[Profile]
) -> dict[str, Any]:
    """Return the ratios of speeds to the baseline by the plain call, by schedule."""
    ratios: dict[str, list[float]] = {}
    for costs in profiles:
        base = _speeds(costs, experiment.baseline)[PLAIN_CALL]
        for name, speed in _speeds(costs, setting).items():
            ratios.setdefault(name, []).append(speed / base)

    return {
        'setting': setting.name,
        'partitions': len(setting),
        'chunks': setting.chunks,
        'ratios': {name: median(values) for name, values in ratios.items()},
        'lowest': {name: min(values) for name, values in ratios.items()},
        'published': {
            source: experiment.published_ratio(setting, source) for source in setting.published
        },
    }


def _speeds(costs: Profile, setting: Setting) -> dict[str, float]:
    """Return samples per second, by schedule."""
    times = step_seconds(costs, setting)
    return {name: setting.batch / seconds for name, seconds in times.items()}


def step_seconds(costs: Profile, setting: Setting) -> dict[str, float]:
    """Predict the seconds of a step of a setting, by the plain call and by each schedule.

    On accelerators, each of which has a thread of autograd's, the plain call is fill and drain.

    Args:
        costs: The costs of the layers, with any batch.
        setting: The setting. Schedules with two partitions on a device need another balance.
    """
    whole = costs.scaled(setting.batch)
    if not setting.balance:
        return {PLAIN_CALL: sum(x.forward_seconds + x.backward_seconds for x in whole.layers)}
    n, m, mode = len(setting), setting.chunks, setting.checkpoint
    result = {}
    for name in (PLAIN_CALL, *NAMES):
        schedule = make('gpipe' if name == PLAIN_CALL else name, n, m)
        stages = sum(map(len, schedule.stages))
        balance = setting.balance
        if stages != n:
            balance = whole.balance(stages, chunks=m, checkpoint=mode)
        recomputing = schedule.recomputing(checkpoint_stops(mode, m, stages))
        result[name] = simulate(recomputing, Costs.of(whole, balance, m, mode)).seconds
    return result


def _command(experiment: Experiment) -> click.Command:
    @click.command(
        experiment.name,
        help=(
            f'{experiment.title}: train on random data, and relate the samples per second to the '
            'baseline. The median epoch counts.'
        ),
    )
    @experiment_options(experiment)
    @click.option(
        '--schedule',
        type=click.Choice(SCHEDULES),
        show_default='the plain call',
        help='Train by GPipe.step, in this order.',
    )
    @click.option(
        '--predict',
        'predicted',
        is_flag=True,
        help='Train nothing: profile the layers with a small batch, simulate the plain '
        'call and each schedule on equal devices, as many as there are partitions.',
    )
    def command(predicted: bool, **options: Any) -> None:
        taken = take_options(experiment, **options)
        if predicted:
            for word in chosen_options():
                require(word not in UNUSED, f'{word} is for a training, without --predict')
            predict(experiment, taken)
        else:
            campaign(experiment, taken, measure)

    return command


COMMANDS = []
for name in ('resnet101-speed', 'amoebanetd-speed', 'unet-speed'):
    COMMANDS.append(_command(EXPERIMENTS[name]))
