"""Micro-batches as torchgpipe 0.0.7 had them, all in one module."""
from torchgpipe.engine.batch import Batch, check
from torchgpipe.engine.gather import gather
from torchgpipe.engine.scatter import scatter

__all__ = ['Batch', 'check', 'gather', 'scatter']
