"""Timelines: predicted and measured actions of a training step, drawn alike.

Terms of this folder:

lane
    The timed actions of one device.
mark
    The start or the end of an action: a time on the CPU, an event on an accelerator.
recorder
    An observer of a pipeline that records its actions.
"""

from torchgpipe.timeline.metrics import StepMetrics, gathered_mean, measure
from torchgpipe.timeline.recorder import record
from torchgpipe.timeline.timeline import Comparison, Copied, Timeline, compare

__all__ = [
    'Comparison',
    'Copied',
    'StepMetrics',
    'Timeline',
    'compare',
    'gathered_mean',
    'measure',
    'record',
]
