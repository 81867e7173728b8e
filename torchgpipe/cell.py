"""The cell: what happens to one micro-batch in one partition, whatever the order of the cells.

::

    batch ─(Wait)─▶ partition, or Checkpoint ─(Wait)─▶ Recompute ─▶ order ─▶ batch
             1               2                   3         4           5

Skips that come from another partition, or go to one, pass through all of this beside the batch,
see :mod:`torchgpipe.skip.tracker`.

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
from functools import partial
from typing import Callable, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from torchgpipe.aliases import Function
from torchgpipe.ambient import Ambient
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.checkpoint import Checkpointing
from torchgpipe.compute import Compute
from torchgpipe.copy import Wait
from torchgpipe.dependency import fork, join
from torchgpipe.microbatch import Batch, Place, place, share_memory, versions
from torchgpipe.skip.crossing import Crossing
from torchgpipe.skip.layout import SkipLayout
from torchgpipe.skip.portal import changed_in_place
from torchgpipe.skip.tracker import SkipTrackerThroughPortals
from torchgpipe.snapshot import Contents, Snapshot
from torchgpipe.stream import AbstractStream, CPUStream, use_stream

__all__ = ['Cells']

_serial = itertools.count()


class Cells:
    """The cells of one partition. All are run by the worker of its device, one after the other.

    Args:
        j: Index of the partition.
        partition: Its layers.
        device: Its device.
        trackers: The skip tracker of each of the ``m`` micro-batches.
        skip_layout: Where skips come from and go to.
        checkpoint_stop: The first ``checkpoint_stop`` micro-batches are checkpointed.
        stream: The compute stream.
        arrivals: The copy streams on which batches arrive, if they come from another memory.
        departures: The copy streams on which they leave, if they go to another memory.
    """

    def __init__(self, j: int, partition: nn.Sequential, device: torch.device,
                 trackers: Sequence[SkipTrackerThroughPortals], skip_layout: SkipLayout,
                 checkpoint_stop: int, stream: AbstractStream,
                 arrivals: Optional[Sequence[AbstractStream]] = None,
                 departures: Optional[Sequence[AbstractStream]] = None) -> None:
        self.j = j
        self.m = m = len(trackers)
        self.stream = stream
        self._compute = Compute(j, partition, device, m)
        self._trackers = trackers
        self._incoming = [key for _, key in skip_layout.incoming(j)]
        self._outgoing = [key for _, key in skip_layout.outgoing(j)]
        self._arrivals = arrivals
        self._departures = departures
        self._grad = torch.is_grad_enabled()
        self._checkpoint_stop = checkpoint_stop if self._grad else 0
        self._trainable = self._checkpoint_stop > 0 and any(
            parameter.requires_grad for parameter in partition.parameters())
        self._order: Optional[Tensor] = None
        self._ambient: Optional[Ambient] = None
        self._contents: Optional[Contents] = None

    def run(self, i: int, batch: Batch, quiet: bool = False) -> Batch:
        """Take micro-batch ``i`` through the partition.

        Args:
            i: Index of the micro-batch.
            batch: Its value.
            quiet: Whether the partition is known not to draw from the CPU's random generator.
        """
        outside = place.place
        place.place = Place(i, self.m, next(_serial))
        try:
            if self._trackers[i].shared:
                return self._run_watched(i, batch, quiet)
            return self._run(i, batch, quiet)
        finally:
            place.place = outside

    def _run_watched(self, i: int, batch: Batch, quiet: bool) -> Batch:
        """Run a cell on a batch that lies in the memory of skips: [Note: Changes in place]."""
        shared = self._trackers[i].shared
        watched = set(shared)
        before = versions(batch)
        output = self._run(i, batch, quiet)
        if versions(batch) != before:
            names = ', '.join(sorted(f"'{name}'" for _, name in watched))
            raise RuntimeError(changed_in_place(
                f'the input of partition {self.j}, which is also the skip tensor {names},'))
        shared.difference_update(
            self._incoming if share_memory(batch, output) else watched)
        return output

    def _run(self, i: int, batch: Batch, quiet: bool) -> Batch:
        again = i < self._checkpoint_stop
        if not self._incoming and not self._outgoing:
            return self._through(i, partial(self._compute, i, again, None), batch, quiet, None)
        crossing = Crossing(partial(self._compute, i, again), self._trackers[i], self._incoming,
                            self._outgoing, batch)
        batch = crossing.enter(batch)
        return crossing.leave(self._through(i, crossing, batch, quiet, crossing))

    def _through(self, i: int, function: Function, batch: Batch, quiet: bool,
                 crossing: Optional[Crossing]) -> Batch:
        if self._arrivals is not None:
            batch = _wait(self._arrivals[i], self.stream, batch)  # 1
        # A cell without anything to train has no graph, so there is nothing to save memory on.
        recompute = None
        if i < self._checkpoint_stop and (self._trainable or batch.find_grad() is not None):
            kept = batch if crossing is None else crossing.keep(batch)
            output, recompute = self._checkpoint(function, kept, quiet)  # 2
        else:
            output = Batch(function(batch.value))  # 2
        if self._grad or self._departures is not None:
            self._finish(i, output, recompute)
        return output

    def _checkpoint(self, function: Function, batch: Batch, quiet: bool
                    ) -> Tuple[Batch, Callable[[Batch], None]]:
        if self._ambient is None:
            self._ambient = Ambient.capture()
        if self._contents is None:
            self._contents = Contents(self._compute.partition, aware=(DeferredBatchNorm,))
        checkpointing = Checkpointing(
            function, batch, ambient=self._ambient, quiet=quiet,
            snapshot=Snapshot(self._contents), device=self._compute.device)
        return checkpointing.checkpoint(always=False), checkpointing.recompute

    def _finish(self, i: int, output: Batch, recompute: Optional[Callable[[Batch], None]]) -> None:
        """Hang onto the output what backward has to meet before it meets the layers."""
        departure = CPUStream if self._departures is None else self._departures[i]
        # [Note: Stream of the nodes behind a cell]
        # When autograd hands a gradient on, it lets the stream of the next node wait for it at
        # once. These nodes belong to the copy stream, so that the compute stream does not wait
        # until `Wait` says so, and the recomputation, queued before, overlaps with the copy.
        with use_stream(departure):
            if self._departures is not None:
                _wait(self.stream, departure, output)  # 3
            if recompute is not None:
                recompute(output)  # 4
            if self._grad and self.m > 1:
                self._chain(i, output)  # 5
        if self._contents is not None and i == self.m - 1:
            self._contents.settle()

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
