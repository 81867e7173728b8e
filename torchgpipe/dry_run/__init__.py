"""Dry runs: a step of each rank of a mesh that does not exist.

Terms of this folder:

account
    The items in the row of a place along the pipe axis, each with its entry.
entry
    The change of memory, the FLOPs, the messages and the collectives of one item.
fake tensor
    A tensor with shape, type and device, but without memory and values; PyTorch makes it.
place
    The ranks with the same stages, at one position along the pipe axis.
replay
    The sum of entries over a whole row, of which only a few items have run.
virtual rank
    A rank that is a thread of this process, with fake tensors.
"""

from torchgpipe.dry_run.rehearsal import dry_run
from torchgpipe.dry_run.report import DryRun, RankMemory, StageWork, Traffic

__all__ = ['DryRun', 'RankMemory', 'StageWork', 'Traffic', 'dry_run']
