"""Run a partition's layers, and name the culprit when one fails.

An error keeps its type and its traceback, which leads into the layer. What it lacks is which of
the many cells it came from, so it gains a note (PEP 678)::

    RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 9x9)
    in partition 1 on cuda:1, micro-batch 0 of 4, layer '3'
"""
from types import TracebackType
from typing import Any, Optional

import torch
from torch import Tensor, nn

from torchgpipe.aliases import TensorOrTensors
from torchgpipe.microbatch import Batch, check, versions
from torchgpipe.notes import add_note
from torchgpipe.passes import is_recomputing
from torchgpipe.skip.tracker import SkipTracker, current, use_skip_tracker

__all__ = ['Compute']


class Compute:
    """The layers of a partition as a function, for a first pass and for its recomputation.

    The autograd graph holds it, through checkpoints, so it must not hold any tensor of the graph.

    Args:
        j: Index of the partition.
        partition: Its layers.
        device: Its device.
        m: Number of micro-batches.
    """

    __slots__ = ('device', 'j', 'm', 'partition')

    def __init__(self, j: int, partition: nn.Sequential, device: torch.device, m: int) -> None:
        self.j = j
        self.partition = partition
        self.device = device
        self.m = m

    def __call__(self, i: int, again: bool, tracker: Optional[SkipTracker], value: TensorOrTensors
                 ) -> TensorOrTensors:
        """Compute micro-batch ``i``.

        Args:
            i: Its index.
            again: Whether this may be called again, under a checkpoint.
            tracker: Where its skips are, if any come from or go to another partition.
            value: Its value.
        """
        if tracker is None:
            tracker = SkipTracker()
        outside, current.tracker = current.tracker, tracker
        try:
            output = self._recompute(value) if again and is_recomputing() \
                else self.partition(value)
        except Exception as error:
            layer = _failing_layer(self.partition, error.__traceback__)
            add_note(error, self._where(i, layer))
            raise
        finally:
            current.tracker = outside
            tracker.tensors.clear()
        try:
            check(output)
        except TypeError as error:
            add_note(error, self._where(i, next(reversed(self.partition._modules))))
            raise
        return output

    def _recompute(self, value: TensorOrTensors) -> TensorOrTensors:
        """Run the partition again, and see that it leaves its input alone.

        Where the input requires grad, autograd sees to it. Where it does not, a second pass
        would get what the first one has changed.
        """
        input = tuple(Batch(value))
        before = versions(input)
        output: TensorOrTensors = self.partition(value)
        if versions(input) != before:
            layer = _changing_layer(self.partition, value)
            name = 'a layer' if layer is None else f"layer '{layer}'"
            raise RuntimeError(
                f'{name} of partition {self.j} on {self.device} changed the input of the '
                'partition in place, and the partition is checkpointed: its recomputation started '
                'from the changed input, so gradients would be wrong. Use an operation that is '
                "not in place there, or checkpoint='never'.")
        return output

    def _where(self, i: int, layer: Optional[str]) -> str:
        where = f'in partition {self.j} on {self.device}, micro-batch {i} of {self.m}'
        return where if layer is None else f"{where}, layer '{layer}'"


def _failing_layer(partition: nn.Module, traceback: Optional[TracebackType]) -> Optional[str]:
    """Find the layer that was running, in the frames of the error: free while all goes well."""
    forward: Any = nn.Sequential.forward
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code is forward.__code__ and frame.f_locals.get('self') is partition:
            return _name(partition, frame.f_locals.get('module'))
        traceback = traceback.tb_next
    return None


def _name(partition: nn.Module, layer: Any) -> Optional[str]:
    return next((name for name, child in partition.named_children() if child is layer), None)


def _changing_layer(partition: nn.Sequential, value: TensorOrTensors) -> Optional[str]:
    """Find the layer that changes the partition's input in place, by running them on a copy."""
    tensors = tuple(x.detach().clone() for x in Batch(value))
    output: Any = tensors[0] if isinstance(value, Tensor) else tensors
    with torch.no_grad(), use_skip_tracker(SkipTracker()):
        for name, layer in partition.named_children():
            try:
                output = layer(output)
            except RuntimeError:  # It pops what another partition stashed.
                return None
            if any(x._version for x in tensors):
                return name
    return None
