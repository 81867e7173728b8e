"""Edges: what autograd has to meet between cells.

::

    batch ─(Wait)─▶ cell ─(Wait)─▶ Recompute ─▶ order ─▶ batch
             1                2         3          4

1. The compute stream waits for the copy stream that brought the batch from another memory.
2. The copy stream that takes the batch to another memory waits for the compute stream.
3. In backward the recomputation is queued before the wait of step 2 lets the gradient in.
4. An edge to the micro-batch before: [Note: Order of backward].

Skips that come from another partition, or go to one, pass through all of this beside the batch,
see :mod:`torchgpipe.skip.tracker`.

[Note: Order of backward]
Nothing in the graph alone keeps autograd from going through all micro-batches of a partition side
by side, which would hold the recomputed activations of all of them at once. So each output carries
an edge to the output of the micro-batch before::

    forward     output 0 ◀──phony── output 1 ◀──phony── output 2
    backward    3. last             2.                  1. first

Micro-batch ``i`` thus starts no earlier than ``i+1`` has started, and it does not overtake it:
autograd takes the ready node that was made last, by a number that each thread counts for itself,
and the nodes of one partition are all made by one thread, in order. So are the copies to it. With
numbers of another thread, autograd may leave them until nothing else is left to do on the device,
and the partition before would get no gradient until this one has computed all of them. The edge
hangs on outputs, not on inputs, because a join makes its tensor require grad, and the first
partition would go on to compute a gradient for data that needs none.

[Note: Outputs that stay as they are] An edge makes another tensor of an output, with a history of
its own. Whatever else lies in the output's memory (another output, a view, what a layer keeps for
itself) would not see in its history that a later partition changes it in place. So there is no
edge between two partitions where the batch would stay as it is otherwise, since it neither goes to
another memory nor comes out of a checkpoint. Micro-batches reach such a partition in the order in
which they leave the next one.
"""
from collections.abc import Sequence

from torch import Tensor

from torchgpipe.engine.batch import Batch
from torchgpipe.engine.checkpoint.recomputation import Recomputation
from torchgpipe.engine.copy import Wait
from torchgpipe.engine.dependency import fork, join
from torchgpipe.engine.stream import AbstractStream, no_context, use_stream

__all__ = ['Edges']


class Edges:
    """The edges around the cells of one partition in one forward pass.

    Args:
        m: Number of micro-batches.
        stream: The compute stream.
        arrivals: The copy streams on which batches arrive, if they come from another memory.
        departures: The copy streams on which they leave, if they go to another memory.
        last: Whether this is the last partition, whose outputs are gathered.
        grad: Whether there is a graph.
    """

    def __init__(self, m: int, stream: AbstractStream, arrivals: Sequence[AbstractStream] | None,
                 departures: Sequence[AbstractStream] | None, last: bool, grad: bool) -> None:
        self.stream = stream
        self._m = m
        self._arrivals = arrivals
        self._departures = departures
        #: Whether to put the outputs of cells in order that have no other edge.
        self._orders = last and grad and m > 1
        self._grad = grad
        self._order: Tensor | None = None
        self._last: list[Tensor] = []

    def put_last(self, phony: Tensor) -> None:
        """Let backward come to where a phony was taken when no micro-batch is to come."""
        self._last.append(phony)

    def arrive(self, i: int, batch: Batch) -> None:
        """Let the partition have micro-batch ``i``, in place."""
        if self._arrivals is not None:
            _wait(self._arrivals[i], self.stream, batch)  # 1

    def leave(self, i: int, output: Batch, recomputation: Recomputation | None) -> None:
        """Let micro-batch ``i`` leave: add to its output, in place, what backward runs first."""
        departures = self._departures
        if departures is None and recomputation is None and not self._orders:
            return  # [Note: Outputs that stay as they are]
        # [Note: Stream of the nodes behind a cell]
        # When autograd hands a gradient on, it lets the stream of the next node wait at once for
        # all that is queued on the stream of this one. These nodes belong to the copy stream, so
        # that the compute stream does not wait until `Wait` says so, and the recomputation, queued
        # before, overlaps with the computation of the gradient and with its copy.
        # A leaf, such as an input that is handed on, gets a node that belongs to the compute
        # stream: its gradients are added up there, not on the copy stream of each micro-batch.
        if departures is not None:
            for k, x in enumerate(output):
                if x.is_leaf and x.requires_grad:
                    output[k], _ = fork(x)
        with no_context if departures is None else use_stream(departures[i]):
            if departures is not None:
                _wait(self.stream, departures[i], output)  # 2
            if recomputation is not None:
                recomputation.join(output)  # 3
            if self._grad and self._m > 1:
                self._put_in_order(i, output)  # 4

    def _put_in_order(self, i: int, output: Batch) -> None:
        k = output.find_grad()
        if k is None:
            return
        tensor = output[k]
        if self._order is not None:
            tensor = join(tensor, self._order)
        for phony in self._last if i == 0 else ():
            tensor = join(tensor, phony)
        if i < self._m - 1:
            tensor, self._order = fork(tensor)
        output[k] = tensor


def _wait(prev_stream: AbstractStream, next_stream: AbstractStream, batch: Batch) -> None:
    batch[:] = Wait.apply(prev_stream, next_stream, *batch)  # type: ignore[no-untyped-call]
