"""Timelines: predicted and measured actions of a training step, drawn alike."""
from torchgpipe.timeline.recorder import record
from torchgpipe.timeline.timeline import Comparison, Copied, Timeline, compare

__all__ = ['Comparison', 'Copied', 'Timeline', 'compare', 'record']
