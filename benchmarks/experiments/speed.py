"""Measure the speed of training: samples per second."""
from typing import Any

from benchmarks.harness.epochs import time_epochs
from benchmarks.harness.experiment import Experiment, Setting
from benchmarks.harness.job import Job
from benchmarks.harness.options import Options

__all__ = ['measure']


def measure(experiment: Experiment, setting: Setting, options: Options, result: dict[str, Any]
            ) -> None:
    """Train for some epochs, and add to the result what each of them gave."""
    time_epochs(Job(experiment, setting, options), result)
