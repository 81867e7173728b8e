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
Nothing in the graph alone keeps autograd from going through all micro-batches of a partition side
by side, which would hold the recomputed activations of all of them at once. So each output carries
an edge to the output of the micro-batch before::

    forward     output 0 ◀──phony── output 1 ◀──phony── output 2
    backward    3. last             2.                  1. first

Micro-batch ``i`` thus starts no earlier than ``i+1`` has started, and it does not overtake it:
autograd takes the ready node that was made last, and the nodes of one partition are all made by
one thread, in order. The edge hangs on outputs, not on inputs, because a join makes its tensor
require grad, and the first partition would go on to compute a gradient for data that needs none.
"""
import itertools
from typing import Optional, Sequence

import torch
from torch import Tensor, nn

from torchgpipe.ambient import Ambient
from torchgpipe.checkpoint import Checkpointing
from torchgpipe.compute import Compute
from torchgpipe.copy import Wait
from torchgpipe.dependency import fork, join
from torchgpipe.microbatch import Batch, Place, place
from torchgpipe.stream import AbstractStream

__all__ = ['Cells']

_serial = itertools.count()


class Cells:
    """The cells of one partition. All are run by the worker of its device, one after the other.

    Args:
        j: Index of the partition.
        partition: Its layers.
        device: Its device.
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
        self.m = m
        self.stream = stream
        self._compute = Compute(j, partition, device, m)
        self._arrivals = arrivals
        self._departures = departures
        self._grad = torch.is_grad_enabled()
        self._checkpoint_stop = checkpoint_stop if self._grad else 0
        self._trainable = self._checkpoint_stop > 0 and any(
            parameter.requires_grad for parameter in partition.parameters())
        self._order: Optional[Tensor] = None
        self._ambient: Optional[Ambient] = None

    def run(self, i: int, batch: Batch) -> Batch:
        """Take micro-batch ``i`` through the partition."""
        outside = place.place
        place.place = Place(i, self.m, next(_serial))
        try:
            if self._arrivals is not None:
                batch = _wait(self._arrivals[i], self.stream, batch)  # 1
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
        if self._ambient is None:
            self._ambient = Ambient.capture()
        checkpointing = Checkpointing(self._compute.of(i), batch, self._ambient)
        output = self._depart(i, checkpointing.checkpoint())  # 2, 3
        checkpointing.recompute(output)  # 4
        return output

    def _depart(self, i: int, batch: Batch) -> Batch:
        if self._departures is not None:
            batch = _wait(self.stream, self._departures[i], batch)
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


def _wait(prev_stream: AbstractStream, next_stream: AbstractStream, batch: Batch) -> Batch:
    batch[:] = Wait.apply(prev_stream, next_stream, *batch)  # type: ignore[no-untyped-call]
    return batch
