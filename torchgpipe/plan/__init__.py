"""Predict what a step takes before it runs: in time, bubbles and memory.

:func:`simulate` takes a schedule, and what its stages cost.
"""
from torchgpipe.plan.costs import Costs, Link, StageCosts
from torchgpipe.plan.simulate import simulate
from torchgpipe.plan.simulation import Simulation

__all__ = ['Costs', 'Link', 'Simulation', 'StageCosts', 'simulate']
