"""Measure the speed of training: samples per second."""

from typing import Any

import click

from benchmarks.harness.campaign import campaign
from benchmarks.harness.curves import predict
from benchmarks.harness.experiment import Experiment, Setting
from benchmarks.harness.job import Job, time_epochs
from benchmarks.harness.options import Options, experiment_options, take_options
from benchmarks.harness.published import EXPERIMENTS
from torchgpipe.schedule import NAMES, make

#: Those for partitions that have a device each, as the published ones have.
SCHEDULES = [name for name in NAMES if len(make(name, 1, 1).stages[0]) == 1]


def measure(
    experiment: Experiment, setting: Setting, options: Options, result: dict[str, Any]
) -> None:
    """Train for some epochs, and add the results of each of them."""
    time_epochs(Job(experiment, setting, options), result)


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
            predict(experiment, taken)
        else:
            campaign(experiment, taken, measure)

    return command


COMMANDS = [
    _command(experiment)
    for experiment in (
        EXPERIMENTS['resnet101-speed'],
        EXPERIMENTS['amoebanetd-speed'],
        EXPERIMENTS['unet-speed'],
    )
]
