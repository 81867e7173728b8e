"""Experiments so small that a test can run them."""

from dataclasses import replace

import torch

from benchmarks.harness.experiment import OURS, Experiment, Model, Setting
from benchmarks.harness.options import Options
from benchmarks.harness.published import EXPERIMENTS

#: 44 + 21 layers.
UNET = Model('unet', (1, 4))

SETTINGS = (
    Setting('baseline', UNET, 4, published={OURS: 2.0, 'a paper': 1.0}),
    Setting('pipeline-2', UNET, 8, 4, (30, 35), published={OURS: 3.0, 'a paper': 1.5}),
    Setting('pipeline-3', UNET, 8, 4, (20, 20, 25), published={OURS: None}),
)

SPEED = Experiment('tiny-speed', 'Speed of a tiny U-Net', 'throughput', 'samples/s', 64, SETTINGS)

MEMORY = replace(SPEED, name='tiny-memory', figure='memory', unit='GiB', optimizer='RMSprop')

TIMELINE = replace(
    SPEED,
    name='tiny-timeline',
    settings=tuple(
        replace(setting, model=UNET, batch=4, chunks=4, balance=(20, 20, 25))
        for setting in EXPERIMENTS['unet-timeline'].settings
    ),
)

DEVICES = tuple(torch.device('cpu', j) for j in range(3))


def options(experiment, folder, **changes):
    """Return the options that a user would have chosen: the CPU, whatever else there is."""
    return Options(
        **{
            'settings': experiment.settings,
            'devices': DEVICES,
            'scale': 1 / 2,
            'epochs': 2,
            'skip_epochs': 1,
            'dtype': torch.float32,
            'compile': False,
            'seed': 0,
            'output': str(folder),
            **changes,
        }
    )
