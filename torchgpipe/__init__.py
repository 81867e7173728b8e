"""Pipeline parallelism for sequential PyTorch models, in one process."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torchgpipe.__version__ import __version__
from torchgpipe.base.context import is_checkpointing, is_recomputing
from torchgpipe.base.structure import Arguments, NoChunk
from torchgpipe.engine.policy import no_recompute
from torchgpipe.gpipe import GPipe

import torchgpipe.legacy  # noqa: F401  isort: skip  # the old paths

__all__ = [
    'Arguments',
    'GPipe',
    'NoChunk',
    '__version__',
    'is_checkpointing',
    'is_recomputing',
    'no_recompute',
]

if not TYPE_CHECKING:  # where any name would be one of the package

    def __getattr__(name: str) -> Any:
        """Import a module of the package when it is first used, as ``torchgpipe.sequential``."""
        if name.startswith('_') or find_spec(f'torchgpipe.{name}') is None:
            raise AttributeError(f'torchgpipe has no {name!r}')
        return import_module(f'torchgpipe.{name}')
