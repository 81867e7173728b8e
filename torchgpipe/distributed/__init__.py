"""Pipelines over processes: the same models and steps on a mesh of data × pipe × tensor.

It needs ``torch.distributed``, which ``import torchgpipe`` does not import.

Terms of this folder:

facts
    Numbers that ranks exchange, so that all start the same step, or raise the same error.
link
    A connection between two ranks, which notices when a process or a host is lost.
mesh
    The ranks as an array with the axes data, pipe and tensor.
message
    Tensors of one micro-batch that go from one stage to another, with metadata if it is new.
rank
    One process of the mesh, with its own stages.
record
    A parameter of a rank, and its gradient on the way to ``.grad``.
replica
    The ranks with the same position on the data axis: they train on one part of a mini-batch.
stage
    A partition of the model on one rank, or on the ranks of one tensor axis.
tie
    A parameter in stages of several ranks, with one value and one gradient.
unit
    The layers whose parameters FSDP gathers and frees together.
watch
    A thread of each rank. It has links to other ranks, and ends this one when another fails.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchgpipe.distributed.checkpoint import load_checkpoint, save_checkpoint
from torchgpipe.distributed.mesh import init_mesh
from torchgpipe.distributed.model import DistributedGPipe
from torchgpipe.distributed.styles import SequenceColwiseParallel
from torchgpipe.shard.averaging import GradScaler

__all__ = [
    'DistributedGPipe',
    'GradScaler',
    'SequenceColwiseParallel',
    'dry_run',  # noqa: F822  see __getattr__
    'init_mesh',
    'load_checkpoint',
    'save_checkpoint',
]

if not TYPE_CHECKING:  # where any name would be one of the package

    def __getattr__(name: str) -> Any:
        """Import ``dry_run``, which is a tool above this folder, when it is first used."""
        if name == 'dry_run':
            return import_module('torchgpipe.dry_run').dry_run
        raise AttributeError(f'torchgpipe.distributed has no {name!r}')
