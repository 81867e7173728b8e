"""A run of micro-batches through partitions: the common part of the plain call and a step.

A cell starts when its partition is done with the micro-batch before, and the partition before with
this one; so whoever runs a cell is the only one to touch its micro-batch. What differs is the
transport, how tensors come from one cell to another: over edges of a graph
(:mod:`torchgpipe.engine.edges`), or as leaves and messages (:mod:`torchgpipe.engine.stepping`)::

    bring          batch, skips ──▶ here, in the graph of this cell       transport
    run            ──▶ cell, under the locks of its layers
    send           output, skips ──▶ wherever the next ones find them     transport

[Note: Tensor ownership] A batch and a skip are the run's between cells. A cell takes a skip out
of the list that it is given, so that it dies in the layer that pops it, unless a graph needs it.

[Note: Changes in place] The layer that pops a skip gets it with all changes in place since its
stash, as without a pipeline, as long as these come in the cell that stashes it. Later, a change
would be seen or not, depending on whether the skip was copied, and its gradient would be wrong; so
it raises. It is noticed by the skip's version; where other tensors lie in its memory,
:mod:`torchgpipe.engine.aliasing` watches them. (Tensors of inference mode have no versions, so a
change goes unnoticed there. Micro-batches are views of one tensor and have one version: to change
the input of the model in place and then stash it raises needlessly.)
"""
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor

from torchgpipe.base.context import MicroBatch, MiniBatch, ThreadState, context, generator_lock
from torchgpipe.base.structure import versions
from torchgpipe.engine.aliasing import Aliasing, changed_in_place
from torchgpipe.engine.cell import Cell, Cells
from torchgpipe.engine.checkpoint.draws import DrawMonitor
from torchgpipe.engine.checkpoint.recomputation import Recomputation
from torchgpipe.engine.compiled import part_contexts
from torchgpipe.engine.microbatches import Batch
from torchgpipe.engine.partition import Engine, Partition
from torchgpipe.engine.shared import SharedTensors
from torchgpipe.engine.stream import AbstractStream, CPUStream, current_stream, no_context
from torchgpipe.schedule.action import Action
from torchgpipe.skip.namespace import Key

__all__ = ['Run', 'Skip']

_serial = itertools.count()


class Skip(NamedTuple):
    """A skip on its way.

    Args:
        tensor: It, or ``None`` if that is what was stashed.
        version: Its version then.
        j: The partition that stashed it.
        k: Which of the tensors it is that this gave.
    """

    tensor: Tensor | None
    version: int = 0
    j: int = 0
    k: int = 0


class Run:
    """One pass of micro-batches through partitions (Huang et al., "GPipe", 2019).

    Args:
        engine: The partitions, and what runs them.
        batches: The micro-batches; :meth:`run` replaces each by its output.
        checkpoint_stops: How many micro-batches each partition checkpoints, from the first one on;
            none if missing.
        copy_streams: ``copy_streams[j][i]`` carries micro-batch ``i`` into or out of partition
            ``j``; made by the workers if missing.
        common: The indices of tensors that all micro-batches share.
        offload: Whether what checkpoints keep waits in the memory of the host.
    """

    #: Held beside the lock of the model, from start to end.
    _steps: AbstractContextManager[Any] = no_context
    #: Whether backward is a part of it, so that cells may give modules other parameters.
    has_backward = False

    def __init__(self, engine: Engine, batches: list[Batch], checkpoint_stops: Sequence[int] = (),
                 copy_streams: Sequence[Sequence[AbstractStream]] | None = None,
                 common: Sequence[int] = (), offload: bool = False) -> None:
        self._engine = engine
        self._batches = batches
        #: Of each micro-batch, the skips that wait to be popped.
        self._skips: list[dict[Key, Skip]] = [{} for _ in batches]
        self._state = state = ThreadState.capture()
        #: Intra-op threads of each worker, where several run at the same time.
        self._share = max(1, state.num_threads // max(1, min(len(batches), engine.cpu_workers)))
        self._copy_streams = copy_streams or [
            engine.workers.copy_streams(partition.device, len(batches))
            if partition.arrives or partition.departs else [] for partition in engine.partitions]
        self._streams = [current_stream(partition.device) for partition in engine.partitions]
        stops = checkpoint_stops or [0] * len(engine.partitions)
        state.check(threads=self.has_backward or not engine.one_worker or any(stops))
        # Hooks of the user's decide by themselves where what is saved waits, and would look at it
        # while it is still on its way.
        offload = offload and state.hooks is None
        self._shared = SharedTensors(engine, len(batches)) if engine.shares else None
        self._cells = [
            Cells(partition, stop, state, engine.one_worker,
                  self._hold(partition, partition.lock_alone), stream,
                  engine.workers.host_stream(partition.device) if offload else CPUStream)
            for partition, stop, stream in zip(engine.partitions, stops, self._streams)]
        #: What cells call: the layers of each partition.
        self._layers: list[Callable[..., Any]] = [each.layers for each in engine.partitions]
        #: The contexts in which cells have the layers of each partition.
        self._held = [
            self._hold(partition, partition.lock_alone
                       if self.has_backward or cells.no_recompute else partition.lock)
            for partition, cells in zip(engine.partitions, self._cells)]
        #: Looks after all of this pass; or, where some partitions draw, after less than that.
        self._monitor = None if any(
            cells.draws is not False for cells in self._cells) else DrawMonitor()
        for cells in self._cells:
            cells.monitor = self._monitor
        outer = context.micro_batch
        self.mini_batch = MiniBatch() if outer is None else outer.mini_batch
        #: Sees what losses within layers divide by, where that matters.
        self.losses: Any = None
        self.aliasing = Aliasing(batches, common, state.transformed)

    def wrap_last(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let cells of the last partition call something around its layers."""
        self._layers[-1] = wrap(self._layers[-1])

    def _hold(self, partition: Partition, lock: AbstractContextManager[Any]
              ) -> AbstractContextManager[Any]:
        return lock if self._shared is None else self._shared.held(partition.j, lock)

    def run(self) -> None:
        """Run all cells; afterwards the batches hold the outputs.

        Raises:
            BaseException: What a cell raised, the first one. No others were started since then,
                and those that ran beside it have ended.
        """
        if not self._engine.one_worker:
            self._engine.workers.check_caller()
        parts = self._engine.several_memories and self._state.grad
        inputs = [x.grad_fn for batch in self._batches for x in batch.tensors] if parts else []
        with self._engine.lock, self._steps:
            self._run(inputs, parts)

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
                part_contexts(inputs, [
                    x for batch in self._batches for x in batch.tensors])
        finally:
            self._state.repair()

    def _run_cells(self) -> None:
        """Run all cells."""
        raise NotImplementedError

    def _act(self, action: Action) -> None:
        """Run an action of a schedule."""
        raise NotImplementedError

    def _bring(self, i: int, j: int, popped: Sequence[Skip]) -> list[Tensor]:
        """Return the batch, and after it skips, in the graph and the memory of a cell."""
        raise NotImplementedError

    def _send(self, i: int, j: int, cell: Cell, output: list[Tensor],
              recomputation: Recomputation | None) -> None:
        """Let what a cell gave leave it."""
        raise NotImplementedError

    def _put_last(self, j: int, phony: Tensor) -> None:
        """Let backward come to where a phony was taken when partition ``j`` has ended it."""

    def _check_monitor(self, monitor: DrawMonitor, partitions: Iterable[int]) -> None:
        """Let partitions that were thought not to draw be looked at again, if anyone drew."""
        if monitor.anyone_drew():
            for j in partitions:
                self._cells[j].watch_draws()

    def _run_cell(self, i: int, j: int) -> None:
        """Take micro-batch ``i`` through partition ``j``."""
        partition, m, outside = self._engine.partitions[j], len(self._batches), context.micro_batch
        cell = Cell(partition, self._layers[j], i, m, self._batches[i].kind)
        context.micro_batch = MicroBatch(i, m, j, next(_serial), self.mini_batch, partition.lock,
                                         self.losses)
        try:
            tensors = self._bring(
                i, j, self._pop(i, partition, cell) if partition.incoming else ())
            observed = self._cells[j].observed
            draws = observed is not None and observed.draws is not False
            with self._held[j], (generator_lock if draws and not partition.has_pipeline
                                 else no_context):
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
        """Return the skips that a cell pops, and let it know: [Note: Changes in place]."""
        found = []
        for _, key in partition.incoming:
            skip = self._skips[i].pop(key)
            if skip.tensor is None:
                cell.absent.append(key)
                continue
            if versions([skip.tensor]) != [skip.version]:
                raise RuntimeError(changed_in_place(f"the skip tensor '{key[1]}'"))
            cell.popped.append(key)
            found.append(skip)
        return found

    def _keep(self, i: int, j: int, cell: Cell, output: Sequence[Tensor]) -> None:
        """Keep what a cell gave for those that take it."""
        number = len(output) - len(cell.stashed)
        for _, key in self._engine.partitions[j].outgoing:
            self._skips[i][key] = Skip(None)
        for k, key in enumerate(cell.stashed, number):
            self._skips[i][key] = Skip(output[k], versions([output[k]])[0], j, k)
        self._batches[i] = Batch(tuple(output[:number]), cell.kind)
