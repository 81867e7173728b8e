"""Timelines: what was predicted of a training step and what was measured, drawn alike."""
from torchgpipe.timeline.recorder import record
from torchgpipe.timeline.timeline import Copied, Timeline

__all__ = ['Copied', 'Timeline', 'record']
