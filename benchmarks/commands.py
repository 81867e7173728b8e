"""The commands of the experiments: options in, a measured table out."""
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.experiments import accuracy, memory, speed, timeline
from benchmarks.experiments.accuracy.pictures import write_pictures
from benchmarks.experiments.accuracy.recipe import EPOCHS
from benchmarks.harness.campaign import campaign
from benchmarks.harness.experiment import Experiment
from benchmarks.harness.options import experiment_options, take_options
from benchmarks.harness.published import (AMOEBANETD_MEMORY, AMOEBANETD_SPEED, RESNET_ACCURACY,
                                          RESNET_SPEED, UNET_MEMORY, UNET_SPEED, UNET_TIMELINE)
from benchmarks.harness.report import cores, output_folder

__all__ = ['EXPERIMENT_COMMANDS']


def _speed(experiment: Experiment) -> click.Command:
    @click.command(experiment.name, help=(
        f'{experiment.title}: train on random data, and relate the samples per second to the '
        'baseline. The median epoch counts.'))
    @experiment_options(experiment)
    def command(**options: Any) -> None:
        campaign(experiment, take_options(experiment, **options), speed.measure)
    return command


def _memory(experiment: Experiment) -> click.Command:
    @click.command(experiment.name, help=(
        f'{experiment.title}: what parameters, gradients, optimizer state and activations of each '
        'partition take. Model memory is all of these but activations; activation memory is the '
        'peak of all memory, less the model memory.'))
    @experiment_options(experiment, 2, 1, 'a step each, at least one of which comes first')
    def command(**options: Any) -> None:
        campaign(experiment, take_options(experiment, **options), memory.measure)
    return command


@click.command(UNET_TIMELINE.name, help=(
    f'{UNET_TIMELINE.title}: each setting adds one to the settings before. Draws the measured '
    'timeline of a step (PNG, SVG), with a lane for each partition, and writes a trace for '
    'Perfetto or chrome://tracing.'))
@experiment_options(UNET_TIMELINE)
@click.option('--model', type=click.Choice(['unet', 'resnet101', 'amoebanetd']), default='unet',
              show_default=True, help='Which model; published figures are there for U-Net only.')
def _timeline(model: str, **options: Any) -> None:
    experiment = timeline.experiment_for(model)
    campaign(experiment, take_options(experiment, **options), timeline.measure)


@click.command(RESNET_ACCURACY.name, help=(
    f'{RESNET_ACCURACY.title}, or on any images: the recipe of Goyal et al., with a validation '
    'after each epoch. Every epoch is kept, in a CSV log and in a checkpoint. To try it without '
    'ImageNet, make a folder with the command `pictures`.'))
@experiment_options(RESNET_ACCURACY, EPOCHS, 0, 'all images')
@click.option('--data', required=True, metavar='DIR',
              help='Images in train/<class>/ and val/<class>/.')
@click.option('--workers', type=click.IntRange(0), default=lambda: len(cores()),
              show_default='cores', help='Processes that read images.')
@click.option('--resume', is_flag=True, help='Go on from the checkpoint in --output.')
def _accuracy(data: str, workers: int, resume: bool, **options: Any) -> None:
    taken = take_options(RESNET_ACCURACY, **options)
    accuracy.open_folders(Path(data), resolution=1, seed=0)
    if not resume:
        accuracy.refuse_to_overwrite(RESNET_ACCURACY, taken)
    campaign(RESNET_ACCURACY, taken, partial(
        accuracy.measure, data=Path(data), workers=workers, resume=resume))


@click.command()
@click.argument('folder', metavar='DIR')
def pictures(folder: str) -> None:
    """Write a small folder of images, to try resnet101-accuracy on.

    Crops of two photographs and some handwritten digits, from scikit-learn: 80 for training, 20
    for validation, in 5 classes.
    """
    write_pictures(output_folder(folder))


EXPERIMENT_COMMANDS = [
    pictures, _accuracy,
    _speed(RESNET_SPEED), _speed(AMOEBANETD_SPEED), _memory(AMOEBANETD_MEMORY),
    _speed(UNET_SPEED), _memory(UNET_MEMORY), _timeline]
