"""Timelines: what was predicted of a training step and what was measured, drawn alike."""
from torchgpipe.timeline.lanes import Copied
from torchgpipe.timeline.recorder import record
from torchgpipe.timeline.timeline import Comparison, Timeline, compare

__all__ = ['Comparison', 'Copied', 'Timeline', 'compare', 'record']
