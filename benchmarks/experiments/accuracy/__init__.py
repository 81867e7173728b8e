"""Train ResNet-101 on ImageNet, or on any folder of images laid out alike."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.experiments.accuracy.images import open_folders, write_pictures
from benchmarks.experiments.accuracy.progress import refuse_to_overwrite
from benchmarks.experiments.accuracy.train import EPOCHS, measure
from benchmarks.harness.campaign import campaign
from benchmarks.harness.options import experiment_options, take_options
from benchmarks.harness.published import EXPERIMENTS
from torchgpipe.trainer.files import output_folder
from torchgpipe.trainer.launch import available_cores

EXPERIMENT = EXPERIMENTS['resnet101-accuracy']


@click.command(
    EXPERIMENT.name,
    help=(
        f'{EXPERIMENT.title}, or on any images: the recipe of Goyal et al., with a '
        'validation after each epoch. Every epoch is kept, in a CSV log and in a checkpoint. To '
        'try it without ImageNet, make a folder with the command `pictures`.'
    ),
)
@experiment_options(EXPERIMENT, EPOCHS, 0, 'all images')
@click.option(
    '--data', required=True, metavar='DIR', help='Images in train/<class>/ and val/<class>/.'
)
@click.option(
    '--workers',
    type=click.IntRange(0),
    default=lambda: len(available_cores()),
    show_default='cores',
    help='Processes that read images.',
)
@click.option('--resume', is_flag=True, help='Go on from the checkpoint in --output.')
def _accuracy(data: str, workers: int, resume: bool, **options: Any) -> None:
    taken = take_options(EXPERIMENT, **options)
    images = Path(data)
    open_folders(images, resolution=1, seed=0)  # checks them
    if not resume:
        refuse_to_overwrite(EXPERIMENT, taken)
    campaign(EXPERIMENT, taken, partial(measure, data=images, workers=workers, resume=resume))


@click.command()
@click.argument('folder', metavar='DIR')
def pictures(folder: str) -> None:
    """Write a small folder of images, to try resnet101-accuracy on.

    Crops of two photographs and some handwritten digits, from scikit-learn: 80 for training, 20
    for validation, in 5 classes.
    """
    write_pictures(output_folder(folder))


COMMANDS = [pictures, _accuracy]
