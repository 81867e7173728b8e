"""Pipeline parallelism for sequential PyTorch models, in one process."""
from torchgpipe.__version__ import __version__
from torchgpipe.gpipe import GPipe
from torchgpipe.passes import is_checkpointing, is_recomputing

__all__ = ['GPipe', '__version__', 'is_checkpointing', 'is_recomputing']
