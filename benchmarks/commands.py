"""The list of experiments: a new one is a module in benchmarks.experiments, and a name here.

A module has ``COMMANDS``. What it has beside them on the documentation's page is its ``SECTION``;
tables of :mod:`benchmarks.harness.published` are there by themselves.
"""
from benchmarks.experiments import (accuracy, arcface, balance, classes, concurrency, digits,
                                    memory, mingpt, overhead, schedules, speed, timeline, zoo)

__all__ = ['MODULES']

#: In the order in which they are listed.
MODULES = (digits, accuracy, speed, memory, timeline, schedules, classes, mingpt, arcface, balance,
           overhead, concurrency, zoo)
