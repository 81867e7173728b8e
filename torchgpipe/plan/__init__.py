"""Predict the time and memory of a step before it runs, and choose its settings.

:func:`simulate` takes a schedule and the costs of its stages. :func:`plan` searches balance,
chunks, checkpoints, schedule and virtual stages for the fastest step within the devices' memory;
for a mesh also the sizes of its axes. :func:`search_schedule` searches the order of actions.

Terms of this folder:

balance
    The number of layers in each partition.
block
    Consecutive layers, as a candidate for a stage.
bottleneck
    The smallest bound on the cost of every block for which a cut exists.
bubble
    The part of the devices' time in a step in which they wait, from 0 to 1.
edge
    A place between layers where a partition may start or end.
link
    Latency and bandwidth of copies from one device to another.
overhead
    The time per micro-batch or action that does not depend on the batch size.
peak
    The moment of a step at which a stage or a device holds most memory.
profile
    Measured time and memory of each layer, on a sample.
stage
    One partition in a schedule. A device may have several stages.
"""

from torchgpipe.plan.costs import Costs, Link, StageCosts, measure_links, measure_overhead
from torchgpipe.plan.mesh_search import plan, plan_mesh
from torchgpipe.plan.orders import FoundSchedule, search_schedule
from torchgpipe.plan.search import MeshPlan, Plan, plan_devices
from torchgpipe.plan.simulation import Simulation, simulate
from torchgpipe.plan.transformers import MACHINES, Machine, ParameterBytes, Transformer

__all__ = [
    'Costs',
    'FoundSchedule',
    'Link',
    'MACHINES',
    'Machine',
    'MeshPlan',
    'ParameterBytes',
    'Plan',
    'Simulation',
    'StageCosts',
    'Transformer',
    'measure_links',
    'measure_overhead',
    'plan',
    'plan_devices',
    'plan_mesh',
    'search_schedule',
    'simulate',
]
