"""Pipeline parallelism for sequential PyTorch models, in one process."""
import atexit

from torchgpipe.__version__ import __version__
from torchgpipe.context import is_checkpointing, is_recomputing
from torchgpipe.ending import let_threads_finish
from torchgpipe.engine.checkpoint.results import no_recompute
from torchgpipe.gpipe import GPipe
from torchgpipe.structure import Arguments, NoChunk

import torchgpipe.legacy  # noqa: F401,I100,I202  isort: skip  # the old paths

atexit.register(let_threads_finish)  # also where the processes are PyTorch's, as those of DDP

__all__ = ['Arguments', 'GPipe', 'NoChunk', '__version__', 'is_checkpointing', 'is_recomputing',
           'no_recompute']
