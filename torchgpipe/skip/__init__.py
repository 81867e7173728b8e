"""Skip connections that go directly from the layer that stashes to the layer that pops."""
from torchgpipe.skip.skippable import (SkipGenerator, Skippable, pop, skippable, stash,
                                       verify_skippables)
from torchgpipe.skip.tracker import Namespace

__all__ = ['Namespace', 'SkipGenerator', 'Skippable', 'pop', 'skippable', 'stash',
           'verify_skippables']
