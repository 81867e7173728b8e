"""The tracker of torchgpipe 0.0.7, which leads skips to other partitions through portals.

The engine carries them as it carries batches: :mod:`torchgpipe.engine.cell`.
"""
from torch import Tensor

from torchgpipe.context import context
from torchgpipe.engine.batch import Batch
from torchgpipe.engine.stream import AbstractStream
from torchgpipe.legacy.portal import Portal
from torchgpipe.skip.layout import SkipLayout
from torchgpipe.skip.namespace import Key, Namespace
from torchgpipe.skip.tracker import SkipTracker

__all__ = ['SkipTrackerThroughPortals', 'SkipTrackerThroughPotals']


class SkipTrackerThroughPortals(SkipTracker):
    """The skip tensors of one micro-batch; those that go to another partition are in portals.

    Args:
        skip_layout: Tells which skips go to another partition.
    """

    def __init__(self, skip_layout: SkipLayout) -> None:
        super().__init__()
        self.skip_layout = skip_layout
        self.portals: dict[Key, Portal] = {}
        self._phonies: dict[Key, Tensor] = {}

    def save(self, batch: Batch, ns: Namespace | None, name: str, tensor: Tensor | None) -> None:
        """Keep a skip tensor: [Note: Tensor life of a portal]."""
        if not self.skip_layout.requires_copy(ns, name):
            super().save(batch, ns, name, tensor)
            return
        portal = self.portals.get((ns, name))
        again = portal is not None and context.recomputing
        life = 1 if again else 3 if context.checkpointing else 2
        if portal is None:
            portal = self.portals[ns, name] = Portal(tensor, life)
        else:
            portal.put_tensor(tensor, life)
        self._phonies[ns, name] = portal.blue()

    def load(self, batch: Batch, ns: Namespace | None, name: str) -> Tensor | None:
        """Return a skip tensor; :exc:`KeyError` if there is none."""
        if not self.skip_layout.requires_copy(ns, name):
            return super().load(batch, ns, name)
        return self.portals[ns, name].orange(self._phonies[ns, name])

    def copy(self, batch: Batch, prev_stream: AbstractStream, next_stream: AbstractStream,
             ns: Namespace | None, name: str) -> None:
        """Move a skip tensor to another device."""
        self._phonies[ns, name] = self.portals[ns, name].copy(
            prev_stream, next_stream, self._phonies[ns, name])


#: As torchgpipe 0.0.7 spelled it.
SkipTrackerThroughPotals = SkipTrackerThroughPortals
