"""Timelines: predicted and measured actions of a training step, drawn alike."""
from torchgpipe.timeline.lanes import Copied
from torchgpipe.timeline.recorder import record
from torchgpipe.timeline.timeline import Comparison, Timeline, compare

__all__ = ['Comparison', 'Copied', 'Timeline', 'compare', 'record']
