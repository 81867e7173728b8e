"""The plain call: autograd carries tensors between cells, over edges of one graph.

::

    batch ─(Copy)─(Wait)─▶ cell ─▶ Checkpoint ─(Wait)─▶ Tie ─▶ batch
                     1                            2      ▲
                                         Recompute ──phony── Tie of the previous micro-batch
                                             3                4

1. The compute stream waits for the copy stream that copied the batch from another memory.
2. The copy stream that copies the batch to another memory waits for the compute stream.
3. In backward, the recomputation is queued before the wait of step 2.
4. An edge leads to the previous micro-batch: [Note: Order of backward].

Nodes in parentheses are there only if a batch or a skip comes from or goes to another memory.
Otherwise, `Checkpoint` takes the phonies, and there is no `Tie`.

Skips from and to other partitions pass through the same steps, together with the batch. A skip is
copied once, from its source directly to its destination.

With four micro-batches and three partitions whose cells take equally long::

    partition 0   0,0   1,0   2,0   3,0
    partition 1         0,1   1,1   2,1   3,1
    partition 2               0,2   1,2   2,2   3,2

[Note: Order of backward]
The graph alone would let autograd interleave the micro-batches of a partition. Then the
recomputed activations of all these micro-batches would exist at once. Therefore each output has an
edge to the output of the previous micro-batch::

    forward     output 0 ◀──phony── output 1 ◀──phony── output 2
    backward    3. last             2.                  1. first

Micro-batch ``i`` thus starts after ``i+1`` has started, and it does not overtake ``i+1``. Autograd
runs the newest ready node first, by a sequence number that each thread counts for itself. One
thread makes all nodes of a partition, in order. The worker that runs the cell also makes the
copies to the partition. If another thread made the copies, autograd could leave them until the
device has no other work. Then the previous partition would get no gradient until this partition
has computed all of its gradients. The edge is attached to outputs, not to inputs, because a join
makes its tensor require grad. The first partition would then compute a gradient for data that
needs none.

[Note: Unchanged outputs] An edge turns an output into another tensor, with its own history. Other
tensors may share the output's memory (another output, a view, a tensor that a layer keeps). Their
history would not show that a later partition changes the output in place. Therefore there is no
edge if the batch is otherwise passed on unchanged: it neither goes to another memory nor comes
from a checkpoint. In backward, micro-batches reach such a partition in the order in which they
leave the next one. After the last partition there is no next one, so its outputs have an edge.

[Note: Order of draws]
Cells that draw from the CPU's random generator run in the order in which the unwrapped model would
run them on one micro-batch after the other. Therefore a seed gives the random numbers of the
unwrapped model on these micro-batches, for any balance and devices. While these cells run, it
could not be detected whether a concurrent cell begins to draw. So if any partition draws, all
cells run one after the other, in the calling thread. They also do on one worker, if they share a
module that may change, or if a hook or a mode of the user sees their order::

    partition 0   0,0               1,0
    partition 1         0,1               1,1
    partition 2               0,2               1,2

The first micro-batch through a partition in its mode shows whether the partition draws.

[Note: Work of the calling thread]
The calling thread would only wait, so it does the work of the last device itself. Thus one thread
less has to be woken up, which takes as long as a small layer. It does so for all micro-batches,
because autograd uses numbers that each thread counts for itself: see [Note: Order of backward].

The calling thread also runs cells that run one after the other. Only these cells may use all
intra-op threads. A worker with more than its share would get its own team of OpenMP threads. If
all teams together have more threads than there are cores, each team sleeps between any two
kernels, for the rest of the process. Then small kernels take twice as long.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgpipe.base.context import context
from torchgpipe.base.structure import Tensors
from torchgpipe.engine.backward_order import Copy, Recompute, Wait, find_grad, fork, get_phony, tie
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.checkpoint.random import Drawing, DrawMonitor
from torchgpipe.engine.checkpoint.recomputation import Recomputation
from torchgpipe.engine.microbatches import Chunk
from torchgpipe.engine.partition import Engine
from torchgpipe.engine.run import Run
from torchgpipe.engine.streams import AbstractStream, use_stream
from torchgpipe.engine.workers import WorkerPlan, interpret
from torchgpipe.schedule.schedule import Action
from torchgpipe.skip.transfer import Skip


class PlainCall(Run):
    """A forward pass, whose graph defines the backward pass.

    >>> from torch import nn
    >>> from torchgpipe.engine.microbatches import gather
    >>> from torchgpipe.engine.microbatches import cut
    >>> batches, _, _ = cut(torch.ones(4, 2), chunks=2)
    >>> PlainCall(Engine([nn.Sequential(nn.Flatten()), nn.Sequential(nn.ReLU())]), batches).run()
    >>> gather(batches).shape
    torch.Size([4, 2])
    """

    def __init__(
        self,
        engine: Engine,
        batches: list[Chunk],
        *args: Any,
        **options: Any,
    ) -> None:
        super().__init__(engine, batches, *args, **options)
        #: Whether there are edges of order.
        state = self._state
        self._orders = state.grad and len(batches) > 1 and not state.transformed
        #: By partition, the phony to which the output of the next micro-batch is tied.
        self._earlier: dict[int, Tensor] = {}
        #: By partition, phonies for the output of the first micro-batch, the last in backward.
        self._last: dict[int, list[Tensor]] = {}

    def _run_cells(self) -> None:
        """Run all cells: concurrently, or one after the other where their order matters."""
        engine = self._engine
        m = len(self._batches)
        start = 0
        # No two cells could run concurrently, user code may see when a cell runs, or a partition
        # communicates or shares a module that may change.
        in_order = (
            engine.one_worker
            or m == 1
            or self._state.is_serialized
            or any(partition.serialized for partition in engine.partitions)
        )
        if not in_order:
            if any(run.cells.draws is Drawing.UNKNOWN for run in self._runs):
                self._run_at_once(0, 1)  # which shows whether cells draw
                start = 1
            if not any(run.cells.draws is Drawing.YES for run in self._runs):
                self._run_at_once(start, m)
                return
        if engine.one_worker:
            self._run_in_order(start, m)
        else:
            self._as_worker(partial(self._run_in_order, start, m), self._state.num_threads)

    def _run_at_once(self, start: int, stop: int) -> None:
        """Run the cells on their workers, each as soon as its predecessors are done."""
        workers = self._engine.workers
        devices = tuple([partition.device for partition in self._engine.partitions])
        plan = WorkerPlan.of_forward(start, stop, devices)
        function = partial(interpret, plan, self._act, workers, self._act_here)
        self._as_worker(function, self._worker_threads)

    def _act(self, action: Action) -> None:
        self._state.run(partial(self._act_here, action), self._worker_threads)

    def _act_here(self, action: Action) -> None:
        outside = context.no_order
        context.no_order = partial(_undeclared, action.stage)
        try:
            with use_stream(self._runs[action.stage].stream):
                self._run_cell(action.micro_batch, action.stage)
        finally:
            context.no_order = outside

    def _run_in_order(self, start: int, stop: int) -> None:
        """Run one cell after the other in the calling thread: [Note: Order of draws]."""
        # Rule 3: Cells that draw from the CPU's random generator run in the order of the unwrapped
        # model on one micro-batch after the other. The same holds for cells whose order the user's
        # hooks or modes observe. In a step whose schedule does not allow this order, they run one
        # after the other in the order of the schedule's steps.
        for i in range(start, stop):
            for j, run in enumerate(self._runs):
                # If some cells draw, each cell that does not draw has its own monitor.
                monitor = self._monitor
                if monitor is None and run.cells.draws is Drawing.NO:
                    monitor = DrawMonitor()
                run.cells.monitor = monitor
                with use_stream(run.stream):
                    self._run_cell(i, j)
                if monitor is not None and monitor is not self._monitor:
                    self._check_monitor(monitor, [run])

    def _as_worker(
        self,
        function: Callable[[], None],
        num_threads: int,
    ) -> None:
        """Run a function as workers do.

        A layer that calls this pipeline again would wait for a worker that waits for the layer.
        The pipeline finds itself among the workers of the thread then, and raises.
        """
        outside = context.workers
        context.workers = outside | {id(self._engine.workers)}
        try:
            if num_threads != self._state.num_threads:
                torch.set_num_threads(num_threads)
            function()
        finally:
            context.workers = outside
            if num_threads != self._state.num_threads:
                torch.set_num_threads(self._state.num_threads)

    # The transport.

    def _bring(
        self,
        i: int,
        j: int,
        popped: Sequence[Skip],
    ) -> list[Tensor]:
        run = self._runs[j]
        tensors = [*self._batches[i].tensors]
        # Skips first: they are ready. Behind the batch, they would wait for its computation.
        skips: list[Tensor] = []
        for skip in popped:
            if skip.tensor is not None:
                skips += self._copy(i, skip.j, j, [skip.tensor])
        if run.partition.moves:
            copy = partial(self._copy, i, j - 1, j)
            tensors = self.aliasing.cross(i, tensors, copy)
        tensors += skips
        if run.partition.arrives:
            return _wait(run.copy_streams[i], run.stream, tensors)  # 1
        return tensors

    def _copy(
        self,
        i: int,
        prev_j: int,
        next_j: int,
        tensors: list[Tensor],
    ) -> list[Tensor]:
        """Return tensors in the memory of another partition."""
        if not self._engine.apart(prev_j, next_j):
            return tensors
        prev_run = self._runs[prev_j]
        next_run = self._runs[next_j]
        # `Copy` keeps the current stream of the source as the one that reads the gradient. In this
        # thread, that is not the compute stream of the other partition.
        with use_stream(prev_run.stream):
            return [
                *Copy.apply(  # type: ignore[no-untyped-call]
                    prev_run.copy_streams[i], next_run.copy_streams[i], *tensors
                )
            ]

    def _send(
        self,
        i: int,
        j: int,
        cell: Cell,
        output: list[Tensor],
        recomputation: Recomputation | None,
    ) -> None:
        """Add the nodes that backward runs first to an output, in place."""
        partition = self._runs[j].partition
        departs = partition.departs
        if recomputation is not None:
            phonies: Tensors = ()
            if not departs:
                # There is no copy to overlap with, so `Checkpoint` recomputes. `Recompute` runs
                # after it, and does nothing. It is there because a graph of torchgpipe has one
                # such node for each checkpointed cell since 0.0.7.
                phonies = _recompute_node(output[0], recomputation), *self._phonies(i, j)
            phony = recomputation.mark(output, phonies)
            if phony is not None and not departs:
                self._earlier[j] = phony
        if departs:
            self._depart(i, j, output, recomputation)
        elif recomputation is None and self._orders and partition.is_last:
            # Other outputs have no edge: [Note: Unchanged outputs].
            self._tie(i, j, output, None)
        self._keep_output(i, j, cell, output)

    def _depart(
        self,
        i: int,
        j: int,
        output: list[Tensor],
        recomputation: Recomputation | None,
    ) -> None:
        """Add the nodes of an output that goes to another memory, in place.

        [Note: Stream of the nodes behind a cell]
        When autograd passes a gradient on, the next node's stream waits at once for all work
        queued on this node's stream. These nodes belong to the copy stream, so that the compute
        stream waits only at `Wait`. The recomputation is queued before, so it overlaps with the
        computation of the gradient and its copy.
        """
        run = self._runs[j]
        for k, x in enumerate(output):
            # A leaf, such as an input that is passed on, gets a node on the compute stream. Its
            # gradients are added up there, not on the copy stream of each micro-batch.
            if x.is_leaf and x.requires_grad:
                output[k], _ = fork(x)
        with use_stream(run.copy_streams[i]):
            output[:] = _wait(run.stream, run.copy_streams[i], output)  # 2
            self._tie(i, j, output, recomputation)

    def _tie(
        self,
        i: int,
        j: int,
        output: list[Tensor],
        recomputation: Recomputation | None,
    ) -> None:
        """Tie an output to the nodes that run before or after the rest of its backward."""
        k = find_grad(output)
        if k is None:
            return
        # Rule 1: In the backward of the plain call, a partition starts micro-batch `i` only after
        # it has started micro-batch `i + 1`. An edge without data ensures it, except where a batch
        # is passed on unchanged. In a step, the schedule gives the order.
        phonies = self._phonies(i, j)  # 4
        if recomputation is not None:
            # Rule 2: A recomputation is queued before the wait for its gradient. It therefore
            # overlaps with the transfer of the gradient.
            phonies = _recompute_node(output[k], recomputation), *phonies  # 3
        if phonies or self._orders:
            output[k], self._earlier[j] = tie(output[k], *phonies)

    def _phonies(self, i: int, j: int) -> Tensors:
        """Return the phonies of nodes that run later in backward than the output of a cell."""
        if not self._orders:
            return ()
        phonies = []
        if j in self._earlier:
            phonies.append(self._earlier[j])
        if i == 0:
            phonies += self._last.get(j, ())
        return tuple(phonies)

    def _put_last(self, j: int, phony: Tensor) -> None:
        self._last.setdefault(j, []).append(phony)


def _recompute_node(output: Tensor, recomputation: Recomputation) -> Tensor:
    """Return the phony of a node that ensures in backward that a cell has run again."""
    phony = get_phony(output.device, requires_grad=True)
    return Recompute.apply(phony, recomputation)  # type: ignore[no-any-return,no-untyped-call]


def _wait(
    prev_stream: AbstractStream,
    next_stream: AbstractStream,
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    return [*Wait.apply(prev_stream, next_stream, *tensors)]  # type: ignore[no-untyped-call]


def _undeclared(j: int) -> str:
    return (
        f'a layer of partition {j} communicates with other processes, while other partitions '
        'run: the ranks would not come to their collectives in the same order. Let the module '
        'say so, as layers of torchgpipe.shard do: communicates = True; then cells run one '
        'after the other. Or put all partitions on one device'
    )
