"""A run of micro-batches through partitions: the common part of the plain call and a step.

:class:`Run` runs cells. A cell starts when its partition has finished the previous micro-batch and
the previous partition has finished this one. So only one thread at a time uses a micro-batch.
Subclasses define the transport, which moves tensors from cell to cell: over edges of a graph
(:mod:`torchgpipe.engine.plain_call`), or as leaves and messages
(:mod:`torchgpipe.engine.scheduled`)::

    bring          batch, skips ──▶ here, in the graph of this cell       transport
    run            ──▶ cell, under the locks of its layers
    send           output, skips ──▶ wherever the next ones find them     transport

[Note: Tensor ownership] The run owns batches and skips between cells (rule 5). A cell removes a
skip from its list of inputs. So the skip is freed in the layer that pops it, unless a graph needs
it.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from torchgpipe.base.context import MicroBatch, MiniBatch, ThreadState, context
from torchgpipe.base.errors import add_note
from torchgpipe.base.locks import generator_lock, is_held, released_generator
from torchgpipe.engine.aliasing import Aliasing
from torchgpipe.engine.cell import Cell, Cells
from torchgpipe.engine.checkpoint.random import DrawMonitor
from torchgpipe.engine.checkpoint.recomputation import Recomputation
from torchgpipe.engine.microbatches import Chunk
from torchgpipe.engine.partition import Engine, Partition, part_contexts
from torchgpipe.engine.shared import SharedTensors
from torchgpipe.engine.streams import AbstractStream, CPUStream, current_stream, no_context
from torchgpipe.schedule.schedule import Action
from torchgpipe.skip.transfer import Key, Skip, keep, take

_serial = itertools.count()

_NO_FORWARD_MODE = (
    'A pipeline in training has no forward-mode differentiation of dual tensors. Use '
    'torch.func.jvp, of the sequential module that was wrapped or of a pipeline with all '
    "partitions on one device and checkpoint='never'; or call the pipeline in torch.no_grad()"
)


class Run:
    """One pass of micro-batches through partitions (Huang et al., "GPipe", 2019).

    Args:
        batches: The micro-batches; :meth:`run` replaces each by its output.
        recomputed: The micro-batches that each partition checkpoints. By default, there are none.
        copy_streams: ``copy_streams[j][i]`` copies micro-batch ``i`` into or out of partition
            ``j``. By default, the workers make them.
    """

    #: Held together with the lock of the model, from start to end.
    _steps: AbstractContextManager[Any] = no_context
    #: Whether the run includes backward, so that cells may replace parameters of modules.
    has_backward = False

    def __init__(
        self,
        engine: Engine,
        batches: list[Chunk],
        recomputed: Sequence[Collection[int]] = (),
        copy_streams: Sequence[Sequence[AbstractStream]] | None = None,
        common: Sequence[int] = (),
        offload: bool = False,
    ) -> None:
        self._engine = engine
        self._batches = batches
        #: By micro-batch, the stashed skips that are not popped yet.
        self._skips: list[dict[Key, Skip]] = [{} for _ in batches]
        self._state = state = ThreadState.capture()
        #: The number of intra-op threads of each worker, if several run concurrently.
        self._share = max(1, state.num_threads // max(1, min(len(batches), engine.cpu_workers)))
        self._copy_streams = copy_streams or [
            engine.workers.copy_streams(partition.device, len(batches))
            if partition.arrives or partition.departs
            else []
            for partition in engine.partitions
        ]
        self._streams = [current_stream(partition.device) for partition in engine.partitions]
        recomputed = recomputed or [()] * len(engine.partitions)
        state.check(threads=self.has_backward or not engine.one_worker or any(recomputed))
        # The user's hooks decide where saved tensors are kept. They would also read a tensor while
        # its copy to the host is not finished.
        offload = offload and state.hooks is None
        self._shared = SharedTensors(engine, len(batches)) if engine.shares else None
        self._cells = [
            Cells(
                partition,
                again,
                state,
                engine.one_worker,
                self._hold(partition, partition.lock_alone),
                stream,
                engine.workers.host_stream(partition.device) if offload else CPUStream,
            )
            for partition, again, stream in zip(engine.partitions, recomputed, self._streams)
        ]
        #: The functions that cells call: the layers of each partition.
        self._layers: list[Callable[..., Any]] = [each.layers for each in engine.partitions]
        #: The contexts in which cells have the layers of each partition (rule 14).
        self._held = [
            self._hold(
                partition,
                partition.lock_alone
                if self.has_backward or cells.no_recompute
                else partition.lock,
            )
            for partition, cells in zip(engine.partitions, self._cells)
        ]
        #: Detects draws in the whole pass. If some partitions draw, cells have their own monitors.
        self._monitor = (
            None if any(cells.draws is not False for cells in self._cells) else DrawMonitor()
        )
        for cells in self._cells:
            cells.monitor = self._monitor
        outer = context.micro_batch
        self.mini_batch = MiniBatch() if outer is None else outer.mini_batch
        #: Records the normalizers of losses within layers, where they matter.
        self.losses: Any = None
        self.aliasing = Aliasing(batches, common, state.transformed)

    def wrap_last(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Wrap the function that cells of the last partition call."""
        self._layers[-1] = wrap(self._layers[-1])

    def _hold(
        self, partition: Partition, lock: AbstractContextManager[Any]
    ) -> AbstractContextManager[Any]:
        if self._shared is None:
            return lock
        return self._shared.held(partition.j, lock)

    def run(self) -> None:
        """Run all cells; afterwards the batches hold the outputs.

        Raises:
            BaseException: The first error that a cell raised. No other cells were started since
                then, and concurrent cells have ended.
        """
        if not self._engine.one_worker:
            self._engine.workers.check_caller()
            self._check_layers()
        parts = self._engine.several_memories and self._state.grad
        inputs = [x.grad_fn for batch in self._batches for x in batch.tensors] if parts else []
        # A layer of another pipeline may be the caller.
        with released_generator(), self._engine.lock, self._steps:
            self._run(inputs, parts)

    def _check_layers(self) -> None:
        """Check that workers do not wait for layers of the cell that calls this pipeline."""
        if context.micro_batch is None:
            return
        for partition in self._engine.partitions:
            if is_held(partition.lock_alone):
                raise RuntimeError(
                    f'a layer called a GPipe whose partition {partition.j} has layers of the '
                    'calling partition, so its workers would wait for the caller. Call the layers '
                    "instead, or put all of its partitions on one device, as in devices=['cpu', "
                    "'cpu']"
                )

    def _run(self, inputs: list[Any], parts: bool) -> None:
        try:
            if self._shared is None:
                self._run_cells()
            else:
                self._shared.run(self._put_last, self._run_cells)
            if self._monitor is not None:
                self._check_monitor(self._monitor, range(len(self._cells)))
            if context.micro_batch is None:  # It is the outermost run.
                self.mini_batch.end()
            if parts:
                part_contexts(inputs, [x for batch in self._batches for x in batch.tensors])
        except NotImplementedError as error:
            if 'jvp' in str(error):
                add_note(error, _NO_FORWARD_MODE)
            raise
        finally:
            self._state.repair()

    def _run_cells(self) -> None:
        """Run all cells."""
        raise NotImplementedError

    def _act(self, action: Action) -> None:
        """Run an action of a schedule."""
        raise NotImplementedError

    def _bring(self, i: int, j: int, popped: Sequence[Skip]) -> list[Tensor]:
        """Return the batch and then the skips, in the graph and the memory of a cell."""
        raise NotImplementedError

    def _send(
        self, i: int, j: int, cell: Cell, output: list[Tensor], recomputation: Recomputation | None
    ) -> None:
        """Pass the output of a cell on to the next cells."""
        raise NotImplementedError

    def _put_last(self, j: int, phony: Tensor) -> None:
        """Make backward reach the fork of a phony only after partition ``j`` has finished."""

    def _check_monitor(self, monitor: DrawMonitor, partitions: Iterable[int]) -> None:
        """Watch partitions again that were seen not to draw, if the monitor detected a draw."""
        if monitor.anyone_drew():
            for j in partitions:
                self._cells[j].watch_draws()

    def _run_cell(self, i: int, j: int) -> None:
        """Run micro-batch ``i`` in partition ``j``."""
        partition = self._engine.partitions[j]
        m = len(self._batches)
        outside = context.micro_batch
        cell = Cell(partition, self._layers[j], i, m, self._batches[i].kind)
        context.micro_batch = MicroBatch(
            i, m, j, next(_serial), self.mini_batch, partition.lock, self.losses
        )
        try:
            tensors = self._bring(
                i, j, self._pop(i, partition, cell) if partition.incoming else ()
            )
            observed = self._cells[j].observed
            draws = observed is not None and observed.draws is not False
            with (
                self._held[j],
                generator_lock if draws and not partition.has_pipeline else no_context,
            ):
                if partition.has_skips or i in self.aliasing.watched:
                    before = self.aliasing.before(i, j, cell, tensors)
                    output, recomputation = self._cells[j].run(i, cell, tensors)
                    self.aliasing.after(i, partition, cell, before, output)
                else:
                    output, recomputation = self._cells[j].run(i, cell, tensors)
                    self.aliasing.hand_on(j, output)
            self._send(i, j, cell, output, recomputation)
        finally:
            context.micro_batch = outside

    def _pop(self, i: int, partition: Partition, cell: Cell) -> list[Skip]:
        """Return the skips that a cell pops, and list them in it."""
        skips, cell.popped, cell.absent = take(self._skips[i], partition.incoming)
        return skips  # The caller keeps no reference to them (rule 5).

    def _keep(self, i: int, j: int, cell: Cell, output: Sequence[Tensor]) -> None:
        """Keep the output of a cell for the next cells."""
        number = len(output) - len(cell.stashed)
        if outgoing := self._engine.partitions[j].outgoing:
            keep(self._skips[i], outgoing, j, cell.stashed, output)
        self._batches[i] = Chunk(tuple(output[:number]), cell.kind)
