"""Epochs of training, and how long they take."""

from statistics import median
from typing import Any

from tqdm import tqdm

from benchmarks.harness.experiment import Setting
from benchmarks.harness.job import Job
from torchgpipe.base.devices import synchronize
from torchgpipe.engine.streams import current_stream
from torchgpipe.timeline.recorder import Stamp, seconds, stamp

#: Samples of an epoch at full scale.
SAMPLES = 10_000


def steps_of_an_epoch(setting: Setting, scale: float) -> int:
    """Return the number of steps in an epoch: a fraction of those at full scale."""
    return max(1, round(SAMPLES / setting.batch * scale))


def time_epochs(job: Job, result: dict[str, Any]) -> None:
    """Time epochs; the first ones are there to get warm."""
    setting, options = job.setting, job.options
    steps = steps_of_an_epoch(setting, options.scale)
    throughputs = []
    with tqdm(
        total=options.epochs * steps * job.batch, desc=setting.name, unit=' samples', leave=False
    ) as bar:
        for epoch in range(options.epochs):
            start = _now(job)
            for _ in range(steps):
                job.step()
                bar.update(job.batch)
            time = seconds(start, _now(job))
            if epoch >= options.skip_epochs:
                throughputs.append(steps * job.batch / time)
                result.update(figure=median(throughputs), epochs=throughputs)


def _now(job: Job) -> Stamp:
    """Return the time when all devices are through with all that is queued."""
    synchronize(job.devices)
    now = stamp(current_stream(job.devices[0]))
    synchronize(job.devices)
    return now
