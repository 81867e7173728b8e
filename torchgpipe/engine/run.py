"""A run of micro-batches through partitions: the common part of the plain call and a step.

:class:`Run` runs cells. A cell starts when the previous cell of its partition has ended, and the
previous partition has finished this micro-batch. So only one thread at a time uses a micro-batch.
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
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchgpipe.base.context import MicroBatch, MiniBatch, ThreadState, context
from torchgpipe.base.errors import add_note
from torchgpipe.base.locks import Lock, generator_lock, is_held, released_generator
from torchgpipe.engine.aliasing import Aliasing
from torchgpipe.engine.cell import Cell, Cells
from torchgpipe.engine.checkpoint.random import Drawing, DrawMonitor
from torchgpipe.engine.checkpoint.recomputation import Recomputation
from torchgpipe.engine.microbatches import Chunk
from torchgpipe.engine.partition import Engine, Partition, part_contexts
from torchgpipe.engine.policy import PartitionPolicy
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


@dataclass(slots=True, eq=False)
class PartitionRun:
    """One partition in one run."""

    partition: Partition
    cells: Cells
    #: The function that cells call: the layers, and after the last ones the loss of an evaluation.
    function: Callable[..., Any]
    #: The context in which cells have the layers (rule 14).
    held: Lock
    #: The compute stream.
    stream: AbstractStream
    #: By micro-batch, the stream that copies it into or out of the partition's memory.
    copy_streams: Sequence[AbstractStream]


class Run:
    """One pass of micro-batches through partitions (Huang et al., "GPipe", 2019).

    Args:
        batches: The micro-batches; :meth:`run` replaces each by its output.
        recomputed: The micro-batches that each partition checkpoints. By default, there are none.
        copy_streams: ``copy_streams[j][i]`` copies micro-batch ``i`` into or out of partition
            ``j``. By default, the workers make them.
        common: The indices of tensors that all micro-batches share.
        offload: Whether inputs of checkpointed cells wait in the memory of the host.
        policies: By partition, the results that checkpointed cells keep. By default, none.
    """

    #: Held together with the lock of the model, from start to end.
    _steps: Lock = no_context
    #: Whether the run includes backward, so that cells may replace parameters of modules.
    has_backward = False
    #: Records the normalizers of losses within layers, where they matter.
    losses: Any = None

    def __init__(
        self,
        engine: Engine,
        batches: list[Chunk],
        recomputed: Sequence[Collection[int]] = (),
        copy_streams: Sequence[Sequence[AbstractStream]] | None = None,
        common: Sequence[int] = (),
        offload: bool = False,
        policies: Sequence[PartitionPolicy] = (),
    ) -> None:
        self._engine = engine
        self._batches = batches
        self._state = ThreadState.capture()
        recomputed = recomputed or [()] * len(engine.partitions)
        self._state.check(self.has_backward or not engine.one_worker or any(recomputed))
        #: The number of intra-op threads of each worker, if several run concurrently.
        self._worker_threads = self._state.num_threads
        if engine.cpu_workers > 1:
            workers = min(len(batches), engine.cpu_workers)
            self._worker_threads = max(1, self._state.num_threads // workers)
        outer = context.micro_batch
        self.mini_batch = MiniBatch() if outer is None else outer.mini_batch
        self.aliasing = Aliasing(batches, common, self._state.transformed)
        #: By micro-batch, the stashed skips that are not popped yet.
        self._skips: list[dict[Key, Skip]] = [{} for _ in batches]
        self._shared = SharedTensors(engine, len(batches)) if engine.shares else None

        # The user's hooks decide where saved tensors are kept. They would also read a tensor while
        # its copy to the host is not finished.
        offload = offload and self._state.hooks is None
        #: By partition.
        self._runs: list[PartitionRun] = []
        policies = policies or [PartitionPolicy()] * len(engine.partitions)
        for partition, micro_batches, policy in zip(engine.partitions, recomputed, policies):
            run = self._prepare(partition, micro_batches, offload, policy)
            if copy_streams is not None:
                run.copy_streams = copy_streams[partition.j]
            self._runs.append(run)

        #: Detects draws in the whole pass, if no partition is known to draw. Otherwise, cells that
        #: do not draw have their own monitors.
        self._monitor: DrawMonitor | None = None
        if all(run.cells.draws is Drawing.NO for run in self._runs):
            self._monitor = DrawMonitor()
        for run in self._runs:
            run.cells.monitor = self._monitor

    def _prepare(
        self,
        partition: Partition,
        recomputed: Collection[int],
        offload: bool,
        policy: PartitionPolicy,
    ) -> PartitionRun:
        workers = self._engine.workers
        device = partition.device
        stream = current_stream(device)
        copy_streams: Sequence[AbstractStream] = ()
        if partition.arrives or partition.departs:
            copy_streams = workers.copy_streams(device, len(self._batches))

        host_stream: AbstractStream = CPUStream
        if offload or any(policy) and self._state.hooks is None:
            host_stream = workers.host_stream(device)

        # A recomputation replaces attributes of modules, which other partitions may share.
        held_alone = self._hold(partition, partition.lock_alone)
        cells = Cells(
            partition,
            recomputed,
            self._state,
            self._engine.one_worker,
            held_alone,
            stream,
            host_stream,
            offload,
            policy,
        )
        held = held_alone
        # A step has leaves in place of parameters, and modules with another policy have another
        # forward, also in the first pass.
        if not self.has_backward and (cells.scopes is None or not cells.scopes.modules):
            held = self._hold(partition, partition.lock)
        return PartitionRun(
            partition,
            cells,
            partition.layers,
            held,
            stream,
            copy_streams,
        )

    def _hold(self, partition: Partition, lock: Lock) -> Lock:
        if self._shared is None:
            return lock
        return self._shared.held(partition.j, lock)

    def wrap_last(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Wrap the function that cells of the last partition call."""
        last = self._runs[-1]
        last.function = wrap(last.function)

    def run(self) -> None:
        """Run all cells; afterwards the batches hold the outputs.

        Raises:
            BaseException: The error of the cell that comes first in the order of the schedule. No
                later cells were started since then, and concurrent cells have ended.
        """
        if not self._engine.one_worker:
            self._engine.workers.check_caller()
            self._check_layers()
        # Autograd runs such a graph in several threads, which must not enter one copy of the
        # context variables at once.
        separates_contexts = self._engine.several_memories and self._state.grad
        inputs = []
        if separates_contexts:
            inputs = [x.grad_fn for x in self._tensors()]
        # A layer of another pipeline may be the caller.
        with released_generator(), self._engine.lock, self._steps:
            try:
                if self._shared is None:
                    self._run_cells()
                else:
                    self._shared.run(self._put_last, self._run_cells)
                if self._monitor is not None:
                    self._check_monitor(self._monitor, self._runs)
                if context.micro_batch is None:  # It is the outermost run.
                    self.mini_batch.end()
                if separates_contexts:
                    part_contexts(inputs, self._tensors())
            except NotImplementedError as error:
                if 'jvp' in str(error):
                    add_note(error, _NO_FORWARD_MODE)
                raise
            finally:
                self._state.repair()

    def _tensors(self) -> list[Tensor]:
        return [x for batch in self._batches for x in batch.tensors]

    def _check_layers(self) -> None:
        """Check that workers do not wait for layers of the cell that calls this pipeline."""
        if context.micro_batch is None:
            return
        for j, run in enumerate(self._runs):
            if is_held(run.partition.lock_alone):
                raise RuntimeError(
                    f'a layer called a GPipe whose partition {j} has layers of the '
                    'calling partition, so its workers would wait for the caller. Call the layers '
                    "instead, or put all of its partitions on one device, as in devices=['cpu', "
                    "'cpu']"
                )

    def _run_cells(self) -> None:
        """Run all cells."""
        raise NotImplementedError

    def _act(self, action: Action) -> None:
        """Run an action of a schedule."""
        raise NotImplementedError

    def _bring(
        self,
        i: int,
        j: int,
        popped: Sequence[Skip],
    ) -> list[Tensor]:
        """Return the batch and then the skips, in the graph and the memory of a cell."""
        raise NotImplementedError

    def _send(
        self,
        i: int,
        j: int,
        cell: Cell,
        output: list[Tensor],
        recomputation: Recomputation | None,
    ) -> None:
        """Pass the output of a cell on to the next cells."""
        raise NotImplementedError

    def _put_last(self, j: int, phony: Tensor) -> None:
        """Make backward reach the fork of a phony only after partition ``j`` has finished."""

    def _check_monitor(
        self,
        monitor: DrawMonitor,
        runs: Iterable[PartitionRun],
    ) -> None:
        """Watch partitions again that were seen not to draw, if the monitor detected a draw."""
        if monitor.check():
            for run in runs:
                run.cells.watch_draws()

    def _run_cell(self, i: int, j: int) -> None:
        """Run micro-batch ``i`` in partition ``j``."""
        run = self._runs[j]
        partition = run.partition
        m = len(self._batches)
        kind = self._batches[i].kind
        cell = Cell(partition, run.function, i, m, kind)
        outside = context.micro_batch
        context.micro_batch = MicroBatch(
            i, m, j, next(_serial), self.mini_batch, partition.lock, self.losses
        )
        try:
            popped: Sequence[Skip] = ()
            if partition.incoming:
                skips = self._skips[i]
                popped, cell.popped, cell.absent = take(skips, partition.incoming)
            tensors = self._bring(i, j, popped)
            # Rule 5: Between cells, the run owns batches and skips. A cell removes its skips from
            # the list that it is given, so that they live only as long as the layers and the graph
            # need them. No other variable may refer to them.
            del popped
            # Other threads must not draw while the cell draws, or its recomputation could not
            # repeat it. The workers of an inner pipeline need the lock themselves.
            observed = run.cells.observed
            # Without observations, there is one worker and no recomputation.
            may_draw = observed is not None and observed.draws is not Drawing.NO
            lock = generator_lock if may_draw and not partition.has_pipeline else no_context
            with run.held, lock:
                if partition.has_skips or i in self.aliasing.watched:
                    before = self.aliasing.before(i, j, cell, tensors)
                    output, recomputation = run.cells.run(i, cell, tensors)
                    self.aliasing.after(i, partition, cell, before, output)
                else:
                    output, recomputation = run.cells.run(i, cell, tensors)
                    self.aliasing.hand_on(j, output)
            self._send(i, j, cell, output, recomputation)
        finally:
            context.micro_batch = outside

    def _keep_output(
        self,
        i: int,
        j: int,
        cell: Cell,
        output: Sequence[Tensor],
    ) -> None:
        """Keep the output of a cell for the next cells."""
        outgoing = self._runs[j].partition.outgoing
        if outgoing:
            keep(self._skips[i], outgoing, j, cell.stashed, output)
        number = len(output) - len(cell.stashed)
        self._batches[i] = Chunk(tuple(output[:number]), cell.kind)
