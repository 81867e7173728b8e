"""Pipeline parallelism for sequential PyTorch models, in one process."""
from torchgpipe.__version__ import __version__
from torchgpipe.checkpoint import is_checkpointing, is_recomputing
from torchgpipe.gpipe import GPipe

__all__ = ['GPipe', '__version__', 'is_checkpointing', 'is_recomputing']
