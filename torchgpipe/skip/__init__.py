"""Skip connections that go directly from the layer that stashes to the layer that pops.

Terms of this folder:

layout
    The source and destination partition of each skip.
namespace
    A scope for names of skips, so that one name can occur several times in a model.
pop
    A layer takes a tensor that an earlier layer has stashed under a name.
route
    The pair of a skip's source and destination partition.
stash
    A layer keeps a tensor for a later layer, under a name.
tracker
    The storage of a thread's stashed tensors.
"""

from torchgpipe.skip.skippable import (
    SkipGenerator,
    Skippable,
    pop,
    skippable,
    stash,
    verify_skippables,
)
from torchgpipe.skip.transfer import Namespace

__all__ = [
    'Namespace',
    'SkipGenerator',
    'Skippable',
    'pop',
    'skippable',
    'stash',
    'verify_skippables',
]
