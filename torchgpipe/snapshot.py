"""Parameters and buffers of a partition, as a checkpointed cell saw them.

A recomputation is exact only if it finds what the first pass found::

    parameters    must be unchanged since forward ended; otherwise backward raises, as autograd
                  does without checkpoints
    buffers       are put back for the recomputation, and what it does to them is dropped: running
                  statistics, counters and power iterations move once
"""
from contextlib import contextmanager
from typing import Any, ContextManager, Dict, Iterator, List, NamedTuple, Optional, Tuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from torchgpipe.stream import no_context

__all__ = ['Contents', 'Snapshot']


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
        """The buffer that is there now."""
        return self.buffers[self.name]


class Contents:
    """The parameters and buffers of a partition, for all cells of a forward pass.

    Args:
        partition: Its layers.
        aware: Types of modules that by themselves leave their buffers alone in a recomputation.
    """

    __slots__ = ('_parameters', '_versions', 'buffers')

    def __init__(self, partition: nn.Module, aware: Tuple[type, ...] = ()) -> None:
        self._parameters: List[Tuple[str, Tensor]] = list(partition.named_parameters())
        self._versions: Optional[List[int]] = None
        self.buffers: List[Slot] = [
            Slot(module._buffers, name, silent=isinstance(module, _NormBase) and module.training)
            for module in partition.modules() if not isinstance(module, aware)
            for name, buffer in module._buffers.items() if buffer is not None]

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
    """The buffers of a partition that one cell changed, with their values from before."""

    __slots__ = ('_changed', '_contents')

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._changed: List[Tuple[Slot, Tensor]] = []

    def taken(self) -> ContextManager[None]:
        """Watch the first pass."""
        return self._taken() if self._contents.buffers else no_context

    @contextmanager
    def _taken(self) -> Iterator[None]:
        before = [slot.buffer for slot in self._contents.buffers]
        versions = [buffer._version for buffer in before]
        clones = [buffer.clone() for buffer in before]
        yield
        self._changed = [
            (slot, clone) for slot, buffer, version, clone
            in zip(self._contents.buffers, before, versions, clones)
            if slot.silent or slot.buffer is not buffer or buffer._version != version]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Let a recomputation see what the first pass saw, and write where nobody will look."""
        self._contents.check()
        now = [(slot, slot.buffer) for slot, _ in self._changed]
        try:
            for slot, old in self._changed:
                slot.buffers[slot.name] = old.clone()
            yield
        finally:
            for slot, buffer in now:
                slot.buffers[slot.name] = buffer
            self._contents.settle()
