"""Pipeline parallelism for sequential PyTorch models, in one process."""
from torchgpipe.__version__ import __version__
from torchgpipe.engine.passes import is_checkpointing, is_recomputing
from torchgpipe.gpipe import GPipe

import torchgpipe.legacy  # noqa: F401,I100,I202  isort: skip  # the old paths

__all__ = ['GPipe', '__version__', 'is_checkpointing', 'is_recomputing']
