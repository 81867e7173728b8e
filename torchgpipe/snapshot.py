"""Parameters and buffers of a partition, as a checkpointed cell saw them.

A recomputation is exact only if it finds what the first pass found::

    parameters    must be unchanged since forward ended; otherwise backward raises, as autograd
                  does without checkpoints
    buffers       are put back for the recomputation, and what it does to them is dropped: running
                  statistics, counters and power iterations move once
"""
import weakref
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple, cast

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

__all__ = ['Contents', 'Snapshot']


class Seen(NamedTuple):
    """A buffer as it was: the tensor, its version and a copy of its value.

    The tensor is not owned: it may carry a graph, and the graph owns this object.
    """

    buffer: Optional['weakref.ref[Tensor]']
    version: int
    clone: Optional[Tensor]

    @staticmethod
    def of(buffer: Optional[Tensor]) -> 'Seen':
        """Look at a buffer, or at the empty place of one."""
        if buffer is None:
            return Seen(None, 0, None)
        return Seen(weakref.ref(buffer), buffer._version, buffer.detach().clone())

    def is_still(self, buffer: Optional[Tensor]) -> bool:
        """Tell whether that is what is there now."""
        if buffer is None or self.buffer is None:
            return buffer is None and self.buffer is None
        return self.buffer() is buffer and buffer._version == self.version


class Slot(NamedTuple):
    """The place of a buffer in its module.

    ``silent`` means that it changes without a new version: the kernels of batch and instance
    normalization write to their running statistics behind autograd's back.
    """

    buffers: Dict[str, Any]
    name: str
    silent: bool

    @property
    def buffer(self) -> Any:
        """The buffer that is there now, if any."""
        return self.buffers.get(self.name)


class Contents:
    """The parameters and buffers of a partition, for all cells of a forward pass.

    Args:
        partition: Its layers.
        aware: Types of modules that by themselves leave their buffers alone in a recomputation.
    """

    __slots__ = ('_clones', '_parameters', '_versions', 'slots')

    def __init__(self, partition: nn.Module, aware: Tuple[type, ...] = ()) -> None:
        self._parameters: List[Tuple[str, Tensor]] = list(partition.named_parameters())
        self._versions: Optional[List[int]] = None
        self._clones: Dict[int, Seen] = {}
        self.slots: List[Slot] = [
            Slot(module._buffers, name, silent=isinstance(module, _NormBase) and module.training)
            for module in partition.modules() if not isinstance(module, aware)
            for name, buffer in module._buffers.items()
            if not is_lazy(cast(Tensor, buffer))]

    def see(self, k: int) -> Seen:
        """Keep the value of a buffer; cells that find the same version share a copy."""
        slot, seen = self.slots[k], self._clones.get(k)
        buffer = slot.buffer
        if slot.silent or seen is None or not seen.is_still(buffer):
            seen = self._clones[k] = Seen.of(buffer)
        return seen

    def settle(self) -> None:
        """Take the parameters as they are now: forward is over, or a recomputation is.

        Some layers write to their own parameters there, such as an embedding with a largest norm.
        """
        self._versions = [parameter._version for _, parameter in self._parameters]

    def check(self) -> None:
        """Raise if anyone else has written to a parameter since."""
        for (name, parameter), version in zip(self._parameters, self._versions or ()):
            if parameter._version != version:
                raise RuntimeError(
                    f"parameter '{name}' has been modified by an inplace operation between "
                    f'forward and backward (it is at version {parameter._version}; expected '
                    f'version {version}), so a checkpointed micro-batch can not be recomputed. '
                    "Call backward before the optimizer's step, or use checkpoint='never'.")


class Snapshot:
    """The buffers of a partition as one cell found them."""

    __slots__ = ('_contents', '_seen')

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._seen = [contents.see(k) for k in range(len(contents.slots))]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Let a recomputation see what the first pass saw, and write where nobody will look."""
        self._contents.check()
        now = [(slot, slot.buffer) for slot in self._contents.slots]
        try:
            for (slot, buffer), seen in zip(now, self._seen):
                if slot.silent or not seen.is_still(buffer):
                    slot.buffers[slot.name] = None if seen.clone is None else seen.clone.clone()
            yield
        finally:
            for slot, buffer in now:
                slot.buffers[slot.name] = buffer
            self._contents.settle()
