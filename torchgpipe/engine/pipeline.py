"""The pipeline: bring micro-batches to their cells, each on its worker.

A cell starts when its partition is done with the micro-batch before, and the partition before with
this one; so whoever runs a cell is the only one to touch its micro-batch. With four micro-batches
and three partitions whose cells take equally long::

    partition 0   0,0   1,0   2,0   3,0
    partition 1         0,1   1,1   2,1   3,1
    partition 2               0,2   1,2   2,2   3,2

[Note: Order of draws]
Cells that draw from the CPU's random generator run in the order in which the unwrapped model would
run them, given one micro-batch after the other. So a seed gives the numbers of that, whatever the
balance and the devices. Beside them, nobody could tell whether another one begins to draw. So if
any partition draws, all cells run one after the other, in the calling thread. So they do where a
hook or a mode of the user's sees their order, where they share a module which may change, and on
one worker::

    partition 0   0,0               1,0
    partition 1         0,1               1,1
    partition 2               0,2               1,2

Whether a partition draws, the first micro-batch tells that goes through it in its mode.

[Note: What the caller runs]
The calling thread would have nothing to do but to wait, so it does the work of the last device
itself: one thread less has to be woken up, which takes as long as a small layer. It does that for
all micro-batches, since autograd goes by numbers that each thread counts for itself, see
[Note: Order of backward].

So it does with cells that run one after the other. Only these may have all intra-op threads. A
worker with more than its share would get a team of OpenMP's of its own; as soon as all teams
together have more threads than there are cores, each goes to sleep between any two kernels, for
the rest of the process, and small kernels take twice as long.
"""
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from torchgpipe.communication import without_order
from torchgpipe.engine.aliasing import Aliasing
from torchgpipe.engine.batch import Batch
from torchgpipe.engine.cell import Cells
from torchgpipe.engine.checkpoint.draws import Witness
from torchgpipe.engine.compiled import part_contexts
from torchgpipe.engine.copy import Copy
from torchgpipe.engine.edges import Edges
from torchgpipe.engine.interpreter import Plan, interpret
from torchgpipe.engine.mini_batch import MicroBatchContext, MiniBatch, current
from torchgpipe.engine.partition import Engine, Partition
from torchgpipe.engine.shared import SharedTensors
from torchgpipe.engine.stream import AbstractStream, CPUStream, current_stream, use_stream
from torchgpipe.engine.thread_state import ThreadState, running
from torchgpipe.private import is_transformed
from torchgpipe.schedule.action import Action
from torchgpipe.skip.boundary import SkipBoundary
from torchgpipe.skip.namespace import Key
from torchgpipe.skip.tracker import SkipTrackerThroughPortals

__all__ = ['Pipeline']

_serial = itertools.count()


class Pipeline:
    """One pass of micro-batches through partitions (Huang et al., "GPipe", 2019).

    >>> import torch
    >>> from torch import nn
    >>> from torchgpipe.engine.scatter import gather, scatter
    >>> batches = scatter(torch.ones(4, 2), chunks=2)
    >>> Pipeline(Engine([nn.Sequential(nn.Flatten()), nn.Sequential(nn.ReLU())]), batches).run()
    >>> gather(batches).shape
    torch.Size([4, 2])

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

    def __init__(self, engine: Engine, batches: list[Batch], checkpoint_stops: Sequence[int] = (),
                 copy_streams: Sequence[Sequence[AbstractStream]] | None = None,
                 common: Sequence[int] = (), offload: bool = False) -> None:
        self._engine = engine
        self._batches = batches
        #: Of each micro-batch, where there are skips.
        self._trackers = [SkipTrackerThroughPortals(engine.skip_layout)
                          for _ in batches if engine.has_skips]
        self._state = state = ThreadState.capture()
        #: Intra-op threads of each worker, where several run at the same time.
        self._share = max(1, state.num_threads // max(1, min(len(batches), engine.cpu_workers)))
        self._copy_streams = copy_streams or [
            engine.workers.copy_streams(partition.device, len(batches))
            if partition.arrives or partition.departs else [] for partition in engine.partitions]
        stops = checkpoint_stops or [0] * len(engine.partitions)
        # Hooks of the user's decide by themselves where what is saved waits, and would look at it
        # while it is still on its way.
        offload = offload and state.hooks is None
        self._shared = SharedTensors(engine, len(batches)) if engine.shares else None
        self._hold = hold = (lambda j, lock: lock) if self._shared is None else self._shared.held
        self._cells = [
            Cells(partition, stop, state, engine.one_worker,
                  hold(partition.j, partition.lock_alone),
                  engine.workers.host_stream(partition.device) if offload else CPUStream)
            for partition, stop in zip(engine.partitions, stops)]
        #: The contexts in which cells have the layers of each partition.
        self._held = [
            hold(partition.j, partition.lock_alone if cells.marked else partition.lock)
            for partition, cells in zip(engine.partitions, self._cells)]
        #: Looks after all of this pass; or, where some partitions draw, after less than that.
        self._witness = None if any(
            cells.draws() is not False for cells in self._cells) else Witness()
        for cells in self._cells:
            cells.witness = self._witness
        self._edges = [self._make_edges(partition) for partition in engine.partitions]
        outer = current.micro_batch
        self._is_outermost = outer is None
        self._mini_batch = MiniBatch() if outer is None else outer.mini_batch
        self.aliasing = Aliasing(batches, common)

    def _make_edges(self, partition: Partition) -> Edges:
        streams = self._copy_streams[partition.j]
        return Edges(len(self._batches), current_stream(partition.device),
                     streams if partition.arrives else None,
                     streams if partition.departs else None,
                     partition.j == len(self._engine.partitions) - 1,
                     self._state.grad and not is_transformed())

    def run(self) -> None:
        """Run all cells; afterwards the batches hold the outputs.

        Raises:
            BaseException: What a cell raised, the first one. No others were started since then,
                and those that ran beside it have ended.
        """
        if not self._engine.one_worker:
            self._engine.workers.check_caller()
        parts = self._engine.several_memories and self._state.grad
        inputs = [x.grad_fn for batch in self._batches for x in batch] if parts else []
        try:
            if self._shared is None:
                self._run_cells()
            else:
                self._shared.run(self._edges, self._run_cells)
            if self._witness is not None:
                self._hear(self._witness, range(len(self._cells)))
            if self._is_outermost:
                self._mini_batch.end()
            if parts:
                part_contexts(inputs, itertools.chain(*self._batches))
        finally:
            self._state.repair()
            for tracker in self._trackers:
                tracker.clear()

    def _run_cells(self) -> None:
        """Run all cells: at the same time, or one after the other where their order matters."""
        m, known = len(self._batches), 0
        if not (self._engine.one_worker or self._takes_turns):
            if any(cells.draws() is None for cells in self._cells):
                self._run_at_once(0, 1)  # which tells
                known = 1
            if not any(cells.draws() for cells in self._cells):
                self._run_at_once(known, m)
                return
        if self._engine.one_worker:
            self._run_in_order(known, m)
        else:
            self._as_worker(partial(self._run_in_order, known, m), self._state.num_threads)

    @property
    def _takes_turns(self) -> bool:
        """Whether anyone may see when a cell runs, or no two could run at the same time."""
        return len(self._batches) == 1 or self._state.takes_turns or any(
            partition.in_turn for partition in self._engine.partitions)

    def _run_at_once(self, start: int, stop: int) -> None:
        """Let each worker run its cells, each as soon as those before it are done."""
        engine = self._engine
        devices = tuple([partition.device for partition in engine.partitions])
        plan = Plan.of_forward(start, stop, devices)
        self._as_worker(partial(interpret, plan, self._act, engine.workers, self._act_here),
                        self._share)

    def _act(self, action: Action) -> None:
        self._state.run(partial(self._act_here, action), self._share)

    def _act_here(self, action: Action) -> None:
        j, _, i = action
        with without_order(partial(_undeclared, j)), use_stream(self._edges[j].stream):
            self._run_cell(i, j)

    def _run_in_order(self, start: int, stop: int) -> None:
        """Run one cell after the other in the calling thread: [Note: Order of draws]."""
        for i in range(start, stop):
            for j, cells in enumerate(self._cells):
                # Beside one that draws, nobody could tell whether another one begins to.
                witness = Witness() if cells.draws() is False else None
                with use_stream(self._edges[j].stream):
                    self._run_cell(i, j)
                if witness is not None:
                    self._hear(witness, [j])

    def _as_worker(self, function: Callable[[], None], num_threads: int) -> None:
        """Let the calling thread do the work of workers, which may wait for a lock that it has."""
        before = running.workers
        running.workers = before | {id(self._engine.workers)}
        try:
            if num_threads != self._state.num_threads:
                torch.set_num_threads(num_threads)
            function()
        finally:
            running.workers = before
            if num_threads != self._state.num_threads:
                torch.set_num_threads(self._state.num_threads)

    def _is_ordered(self, j: int) -> bool:
        """Tell whether anyone sees when a partition's cells run: [Note: Order of draws].

        Of a partition of which it is not known yet, that may be so. One worker runs one cell at a
        time in any case.
        """
        return self._engine.one_worker or self._state.takes_turns or \
            self._engine.partitions[j].in_turn or self._cells[j].draws() is not False

    def fence(self, i: int, j: int) -> None:
        """Copy a batch, and the skips that partition ``j`` pops, to where they are needed.

        See :mod:`torchgpipe.engine.edges` for the waits, and for why the worker does this that
        runs the cell. A batch that stays in its memory is left as it is. A skip is handed on once,
        from its source straight to its destination.
        """
        for prev_j, key in self._engine.partitions[j].brought:
            streams = self._streams(i, prev_j, j)
            with use_stream(self._edges[prev_j].stream):  # on that device it is not current here
                if key is None:
                    self.aliasing.copy(i, self._batches[i], partial(self._copy, *streams))
                else:
                    self._trackers[i].copy(self._batches[i], *streams, *key)

    def _copy(self, prev_stream: AbstractStream, next_stream: AbstractStream, batch: Batch
              ) -> None:
        batch[:] = Copy.apply(  # type: ignore[no-untyped-call]
            prev_stream, next_stream, *batch)

    def _streams(self, i: int, prev_j: int, next_j: int) -> tuple[AbstractStream, AbstractStream]:
        """Give the streams on which micro-batch ``i`` goes from one partition to another."""
        if self._engine.apart(prev_j, next_j):
            return self._copy_streams[prev_j][i], self._copy_streams[next_j][i]
        return self._edges[prev_j].stream, self._edges[next_j].stream

    def _hear(self, witness: Witness, partitions: Iterable[int]) -> None:
        """Let partitions that were thought not to draw be looked at again, if anyone drew."""
        if witness.look():
            for j in partitions:
                self._cells[j].suspect()

    def _run_cell(self, i: int, j: int) -> None:
        batches, outside = self._batches, current.micro_batch
        partition = self._engine.partitions[j]
        current.micro_batch = MicroBatchContext(
            i, len(batches), j, next(_serial), self._mini_batch, partition.lock)
        try:
            self._bring(i, j)
            with self._held[j]:
                if partition.has_skips or i in self.aliasing.watched:
                    batches[i] = self.aliasing.run(
                        i, partition, batches[i], partial(self._skips_of, i),
                        partial(self._run, i, j))
                else:
                    batches[i] = self._run(i, j, batches[i])
                    self.aliasing.hand_on(j, batches[i])
        finally:
            current.micro_batch = outside

    def _skips_of(self, i: int, keys: Iterable[Key]) -> dict[Key, Tensor]:
        """Return those of some skips of micro-batch ``i`` that are tensors."""
        portals = self._trackers[i].portals if self._trackers else {}
        return {key: x for key in keys if (x := portals[key].tensor) is not None}

    def _bring(self, i: int, j: int) -> None:
        if self._engine.partitions[j].brought:
            self.fence(i, j)

    def _run(self, i: int, j: int, batch: Batch) -> Batch:
        """Take micro-batch ``i`` through partition ``j``: a cell between its edges."""
        partition, cells, edges = self._engine.partitions[j], self._cells[j], self._edges[j]
        compute, m = partition.compute, len(self._batches)
        if not partition.has_skips:
            edges.arrive(i, batch)
            output, recomputation = cells.run(
                i, partial(compute, i, m, None), batch, blame=compute.blame)
            edges.leave(i, output, recomputation)
            return output
        boundary = SkipBoundary(self._trackers[i], partition.incoming, partition.outgoing, batch)
        batch = boundary.enter(batch)
        edges.arrive(i, batch)
        output, recomputation = cells.run(
            i, partial(boundary, partial(compute, i, m)), batch, boundary.keep)
        edges.leave(i, output, recomputation)
        return boundary.leave(output)


def _undeclared(j: int) -> str:
    return (f'a layer of partition {j} communicates with other processes, while other partitions '
            'run: the ranks would not come to their collectives in the same order. Let the module '
            'say so, as layers of torchgpipe.shard do: communicates = True; then cells run one '
            'after the other. Or put all partitions on one device')
