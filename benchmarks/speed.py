"""Measure the speed of training: samples per second."""
import time
from statistics import median
from typing import Any

from tqdm import tqdm

from benchmarks.experiment import Experiment, Setting
from benchmarks.job import Job, synchronize
from benchmarks.options import Options

__all__ = ['measure', 'steps_of_an_epoch', 'time_epochs']

#: Samples of an epoch at full scale.
SAMPLES = 10_000


def steps_of_an_epoch(setting: Setting, scale: float) -> int:
    """Give the number of steps in an epoch: a fraction of those at full scale."""
    return max(1, round(SAMPLES / setting.batch * scale))


def measure(experiment: Experiment, setting: Setting, options: Options, result: dict[str, Any]
            ) -> None:
    """Train for some epochs, and add to the result what each of them gave."""
    time_epochs(Job(experiment, setting, options), result)


def time_epochs(job: Job, result: dict[str, Any]) -> None:
    """Time epochs; the first ones are there to get warm."""
    setting, options = job.setting, job.options
    steps = steps_of_an_epoch(setting, options.scale)
    throughputs = []
    with tqdm(total=options.epochs * steps * job.batch, desc=setting.name, unit=' samples',
              leave=False) as bar:
        for epoch in range(options.epochs):
            start = time.perf_counter()
            for _ in range(steps):
                job.step()
                bar.update(job.batch)
            synchronize(job.devices)
            seconds = time.perf_counter() - start
            if epoch >= options.skip_epochs:
                throughputs.append(steps * job.batch / seconds)
                result.update(figure=median(throughputs), epochs=throughputs)
