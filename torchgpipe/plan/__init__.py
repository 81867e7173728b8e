"""Predict the time and memory of a step before it runs, and choose its settings.

:func:`simulate` takes a schedule and what its stages cost. :func:`plan` searches balance, chunks,
checkpoints, schedule and virtual stages for the fastest step within the devices' memory.
"""
from torchgpipe.plan.costs import Costs, Link, StageCosts
from torchgpipe.plan.overhead import measure_links, measure_overhead
from torchgpipe.plan.search import Plan, plan
from torchgpipe.plan.simulation import Simulation, simulate

__all__ = ['Costs', 'Link', 'Plan', 'Simulation', 'StageCosts', 'measure_links',
           'measure_overhead', 'plan', 'simulate']
