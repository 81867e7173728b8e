"""The list of experiments: a new one is a module in benchmarks.experiments, and a name here.

A module has ``COMMANDS``. Its section on the documentation's page is ``SECTION``. Tables of
:mod:`benchmarks.harness.published` are on that page without one.
"""

from benchmarks.experiments import (
    accuracy,
    arcface,
    balance,
    classes,
    classes_resnet18,
    concurrency,
    digits,
    folders,
    gpu,
    keep,
    machine,
    memory,
    mingpt,
    mingpt_sizes,
    overhead,
    plans,
    scaling,
    schedules,
    speed,
    timeline,
    two_hosts,
    zoo,
)

#: In the order in which they are listed.
MODULES = (
    digits,
    accuracy,
    speed,
    memory,
    timeline,
    schedules,
    scaling,
    two_hosts,
    classes,
    classes_resnet18,
    mingpt,
    mingpt_sizes,
    arcface,
    balance,
    overhead,
    concurrency,
    keep,
    machine,
    gpu,
    plans,
    zoo,
    folders,
)
