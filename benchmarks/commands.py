"""The list of experiments: a new one is a module in benchmarks.experiments, and a name here.

A module has ``COMMANDS``. Its sections on the documentation's page are ``SECTIONS``. Tables of
:mod:`benchmarks.harness.published` are on that page without one.
"""

from benchmarks.experiments import (
    accuracy,
    balance,
    concurrency,
    digits,
    folders,
    gpu,
    keep,
    machine,
    memory,
    overhead,
    plans,
    scaling,
    schedules,
    sharded,
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
    sharded,
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
