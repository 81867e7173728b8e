"""The cell: one micro-batch in one partition, checkpointed or not.

A cell knows nothing of its neighbours. Whoever runs it brings its batch, and hangs onto its output
what backward has to meet before it (:mod:`torchgpipe.engine.edges`). So cells may run in any
order.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torchgpipe.aliases import Function
from torchgpipe.engine.batch import Batch
from torchgpipe.engine.checkpoint.draws import Draws, Recorder, Witness
from torchgpipe.engine.checkpoint.layer_state import CellState, Layers
from torchgpipe.engine.checkpoint.recomputation import Recomputation
from torchgpipe.engine.checkpoint.results import Results
from torchgpipe.engine.offload import Offload
from torchgpipe.engine.partition import Partition
from torchgpipe.engine.stream import AbstractStream, CPUStream, is_cuda
from torchgpipe.engine.thread_state import ThreadState

__all__ = ['Cells']


class Cells:
    """The cells of one partition in one forward pass. One thread at a time runs any of them.

    Args:
        partition: The partition.
        checkpoint_stop: The first ``checkpoint_stop`` micro-batches are checkpointed.
        state: The state of the thread that asked for the forward pass.
        one_worker: Whether all partitions run on one worker, so none at the same time.
        held: The context in which a recomputation has the layers.
        host_stream: Carries inputs of checkpointed cells to the host, and back; none if they stay.
    """

    def __init__(self, partition: Partition, checkpoint_stop: int, state: ThreadState,
                 one_worker: bool, held: AbstractContextManager[Any],
                 host_stream: AbstractStream = CPUStream) -> None:
        partition.compare_late()
        self._partition = partition
        self._state = state
        self._host_stream = host_stream
        self._checkpoint_stop = checkpoint_stop if state.grad else 0
        self._trainable = self._checkpoint_stop > 0 and any(
            parameter.requires_grad for parameter in partition.layers.parameters())
        #: What has to be known of the layers, where it matters what they do.
        self.layers = None if one_worker and not self._checkpoint_stop else Layers(
            partition.layers, partition.observed, held)
        #: Whether cells give layers another forward, which are kept out of recomputation.
        self.marked = self.layers is not None and bool(self.layers.marked)
        #: Tells after the forward pass whether any layers drew that were not known to.
        self.witness: Witness | None = None

    def draws(self) -> bool | None:
        """Tell whether they draw from a random generator that other cells draw from, too.

        ``None`` if that is not known yet, or does not matter.
        """
        return None if self.layers is None else self.layers.observed.draws

    def suspect(self) -> None:
        """Take note that someone drew while these ran, which were not known to."""
        assert self.layers is not None
        self.layers.observed.suspect()

    def run(self, i: int, function: Function, batch: Batch,
            keep: Callable[[Batch], Batch] | None = None,
            blame: Callable[[Any], str] | None = None) -> tuple[Batch, Recomputation | None]:
        """Run the cell of micro-batch ``i``.

        Args:
            i: Its index.
            function: What the cell computes.
            batch: Its value.
            keep: Gives what to recompute from, if that is more than the batch.
            blame: Says which layer has changed the batch in place.

        Returns:
            The output, and what has to come before it in backward, if the cell is checkpointed.
        """
        # A cell without anything to train has no graph, so there is nothing to save memory on.
        if i < self._checkpoint_stop and (self._trainable or batch.find_grad() is not None):
            return self._checkpoint(function, batch if keep is None else keep(batch), blame)
        layers = self.layers
        if layers is None or layers.observed.draws is not None:
            return batch.call(function), None
        recorder = Recorder()
        output = recorder.run(lambda: batch.call(function))
        layers.observed.learn(recorder)
        return output, None

    def _checkpoint(self, function: Function, batch: Batch, blame: Callable[[Any], str] | None
                    ) -> tuple[Batch, Recomputation]:
        """Run it for the first time."""
        layers = self.layers
        assert layers is not None
        observed = layers.observed
        watch = None if observed.watched and observed.draws is not None else layers.watch()
        recorder = watch or observed.recorder()
        found = CellState(layers, watch)
        device = self._partition.device
        draws = Draws(device, recorder, self.witness)
        results = Results(layers.modules, layers.marked, draws) if layers.marked else None
        offload = Offload(self._host_stream) if is_cuda(self._host_stream) else None
        recomputation = Recomputation(function, self._state, draws, found, device, blame,
                                      self._partition.late, results, offload)
        output = recomputation.first_pass(batch)
        found.end()
        if recorder is not None:
            observed.learn(recorder)
        elif draws.suspect:
            observed.suspect()
        return output, recomputation
