"""The cell: what happens to one micro-batch in one partition, whatever the order of the cells.

::

    batch ─(Wait)─▶ partition, or Checkpoint ─(Wait)─▶ Recompute ─▶ order ─▶ batch
             1               2                   3         4           5

1. The compute stream waits for the copy stream that brought the batch from another memory.
2. The layers run on the compute stream.
3. The copy stream that takes the batch to another memory waits for the compute stream.
4. In backward the recomputation is queued before the wait of step 3 lets the gradient in.
5. An edge to the micro-batch before: [Note: Order of backward].

[Note: Order of backward]
Nothing in the graph alone keeps autograd from going through all micro-batches of a partition side by
side, which would hold the recomputed activations of all of them at once. So each output carries an edge
to the output of the micro-batch before::

    forward     output 0 ◀──phony── output 1 ◀──phony── output 2
    backward    3. last             2.                  1. first

Micro-batch ``i`` thus starts no earlier than ``i+1`` has started, and it does not overtake it:
autograd takes the ready node that was made last, and the nodes of one partition are all made by one
thread, in order. The edge hangs on outputs, not on inputs, because a join makes its tensor require
grad, and the first partition would go on to compute a gradient for data that needs none.
"""
import itertools
from functools import partial
from types import TracebackType
from typing import Any, List, Optional, Sequence

import torch
from torch import Tensor, nn

from torchgpipe.aliases import TensorOrTensors
from torchgpipe.checkpoint import Checkpointing, is_recomputing
from torchgpipe.copy import Wait
from torchgpipe.dependency import fork, join
from torchgpipe.microbatch import Batch, Place, check, place
from torchgpipe.stream import AbstractStream

__all__ = ['Cells']

_serial = itertools.count()


class Cells:
    """The cells of one partition. All are run by the worker of its device, one after the other.

    Args:
        j: Index of the partition.
        partition: Its layers.
        device: Its device, for error messages.
        m: Number of micro-batches.
        checkpoint_stop: The first ``checkpoint_stop`` micro-batches are checkpointed.
        stream: The compute stream.
        arrivals: The copy streams on which batches arrive, if they come from another memory.
        departures: The copy streams on which they leave, if they go to another memory.
    """

    def __init__(self, j: int, partition: nn.Sequential, device: torch.device, m: int,
                 checkpoint_stop: int, stream: AbstractStream,
                 arrivals: Optional[Sequence[AbstractStream]] = None,
                 departures: Optional[Sequence[AbstractStream]] = None) -> None:
        self.j = j
        self.partition = partition
        self.device = device
        self.m = m
        self.stream = stream
        self._arrivals = arrivals
        self._departures = departures
        self._grad = torch.is_grad_enabled()
        self._checkpoint_stop = checkpoint_stop if self._grad else 0
        self._trainable = self._checkpoint_stop > 0 and any(
            parameter.requires_grad for parameter in partition.parameters())
        self._order: Optional[Tensor] = None

    def run(self, i: int, batch: Batch) -> Batch:
        """Take micro-batch ``i`` through the partition."""
        outside = place.place
        place.place = Place(i, self.m, next(_serial))
        try:
            if self._arrivals is not None:
                batch[:] = Wait.apply(self._arrivals[i], self.stream, *batch)  # 1
            output = self._run(i, batch)
            if self._grad and self.m > 1:
                self._chain(i, output)  # 5
            return output
        finally:
            place.place = outside

    def _run(self, i: int, batch: Batch) -> Batch:
        # A cell without anything to train has no graph, so there is nothing to save memory on.
        checkpointed = i < self._checkpoint_stop and (
            self._trainable or batch.find_grad() is not None)
        if not checkpointed:
            return self._depart(i, Batch(self._compute(i, batch.value)))  # 2, 3
        checkpointing = Checkpointing(partial(self._compute, i), batch)
        output = self._depart(i, checkpointing.checkpoint())  # 2, 3
        checkpointing.recompute(output)  # 4
        return output

    def _depart(self, i: int, batch: Batch) -> Batch:
        if self._departures is not None:
            batch[:] = Wait.apply(self.stream, self._departures[i], *batch)
        return batch

    def _chain(self, i: int, output: Batch) -> None:
        k = output.find_grad()
        if k is None:
            return
        tensor = output[k]
        if self._order is not None:
            tensor = join(tensor, self._order)
        if i < self.m - 1:
            tensor, self._order = fork(tensor)
        output[k] = tensor

    def _compute(self, i: int, value: TensorOrTensors) -> TensorOrTensors:
        try:
            output = self._recompute(value) if is_recomputing() else self.partition(value)
        except Exception as error:
            layer = _failing_layer(self.partition, error.__traceback__)
            _add_note(error, self._where(i, layer))
            raise
        try:
            check(output)
        except TypeError as error:
            _add_note(error, self._where(i, next(reversed(self.partition._modules))))
            raise
        return output

    def _recompute(self, value: TensorOrTensors) -> TensorOrTensors:
        """Run the partition again, and see that it leaves its input alone.

        Where the input requires grad, autograd sees to it. Where it does not, a second pass
        would get what the first one has changed.
        """
        input = tuple(Batch(value))
        versions = [x._version for x in input]
        output: TensorOrTensors = self.partition(value)
        if [x._version for x in input] != versions:
            layer = _changing_layer(self.partition, value)
            name = 'a layer' if layer is None else f"layer '{layer}'"
            raise RuntimeError(
                f'{name} of partition {self.j} on {self.device} changed the input of the partition '
                'in place, and the partition is checkpointed: its recomputation started from the '
                'changed input, so gradients would be wrong. Use an operation that is not in '
                "place there, or checkpoint='never'.")
        return output

    def _where(self, i: int, layer: Optional[str]) -> str:
        where = f'in partition {self.j} on {self.device}, micro-batch {i} of {self.m}'
        return where if layer is None else f"{where}, layer '{layer}'"


def _add_note(error: BaseException, note: str) -> None:
    # PEP 678 came with Python 3.11; before, the attribute is there for those who look.
    notes: List[str] = getattr(error, '__notes__', [])
    error.__notes__ = [*notes, note]  # type: ignore[attr-defined]


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
    current: Any = tensors[0] if isinstance(value, Tensor) else tensors
    with torch.no_grad():
        for name, layer in partition.named_children():
            current = layer(current)
            if any(x._version for x in tensors):
                return name
    return None
