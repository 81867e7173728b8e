"""Predict the published speeds from costs of layers here, on the same number of equal devices.

The model is profiled on one device, with a small batch. That gives the time of each layer once per
micro-batch, and its time per sample. The simulator returns the time of a step on devices like this
one. Copies between them are assumed to be free. One profile varies with the load of the machine,
so the ratios are medians over several.
"""

from statistics import median
from typing import Any

import click
import torch

from benchmarks.harness.chart import draw_predictions
from benchmarks.harness.experiment import Experiment, Setting
from benchmarks.harness.options import Options
from benchmarks.harness.report import describe, machine, write_json
from benchmarks.harness.tables import prediction_notes, prediction_rows
from torchgpipe.balance import Profile, profile
from torchgpipe.base.devices import memory_of
from torchgpipe.base.errors import table
from torchgpipe.base.settings import checkpoint_stops
from torchgpipe.plan import Costs, simulate
from torchgpipe.schedule import NAMES, make
from torchgpipe.schedule.generators import PLAIN_CALL
from torchgpipe.trainer.files import output_folder

#: Samples of a profile.
BATCH = 8

#: How many profiles are taken.
PROFILES = 5


def predict(experiment: Experiment, options: Options) -> None:
    """Profile the model, simulate the settings, and write and print the results."""
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
        'settings': [_result(experiment, setting, profiles) for setting in options.settings],
    }
    click.echo(
        '\n\n'.join(
            [
                f'{experiment.title}: {describe(machine(), device.type != "cpu")}',
                table(*prediction_rows(summary)),
                *prediction_notes(summary),
            ]
        )
    )
    name = f'{experiment.name}-predicted'
    files = [write_json(folder, name, summary), *draw_predictions(summary, folder / name)]
    click.echo('\n' + '\n'.join(map(str, files)))


def _result(experiment: Experiment, setting: Setting, profiles: list[Profile]) -> dict[str, Any]:
    ratios: dict[str, list[float]] = {}
    for measured in profiles:
        base = _speeds(measured, experiment.baseline)[PLAIN_CALL]
        for name, speed in _speeds(measured, setting).items():
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


def _speeds(measured: Profile, setting: Setting) -> dict[str, float]:
    """Return samples per second, by schedule."""
    return {
        name: setting.batch / seconds for name, seconds in step_seconds(measured, setting).items()
    }


def step_seconds(measured: Profile, setting: Setting) -> dict[str, float]:
    """Predict the seconds of a step of a setting, by the plain call and by each schedule.

    On accelerators, each of which has a thread of autograd's, the plain call is fill and drain.

    Args:
        measured: The costs of the layers, with any batch. setting: The setting. Schedules with two
        partitions on a device need another balance.
    """
    whole = measured.scaled(setting.batch)
    if not setting.balance:
        return {PLAIN_CALL: sum(x.forward_seconds + x.backward_seconds for x in whole.layers)}
    n, m, mode = len(setting), setting.chunks, setting.checkpoint
    found = {}
    for name in (PLAIN_CALL, *NAMES):
        schedule = make('gpipe' if name == PLAIN_CALL else name, n, m)
        stages = sum(map(len, schedule.stages))
        balance = (
            setting.balance if stages == n else whole.balance(stages, chunks=m, checkpoint=mode)
        )
        found[name] = simulate(
            schedule.recomputing(checkpoint_stops(mode, m, stages)),
            Costs.of(whole, balance, m, mode),
        ).seconds
    return found
