"""The plain call: autograd carries tensors between cells, over edges of one graph.

::

    batch ─(Copy)─(Wait)─▶ cell ─(Wait)─▶ Recompute ─▶ order ─▶ batch
                     1               2         3          4

1. The compute stream waits for the copy stream that brought the batch from another memory.
2. The copy stream that takes the batch to another memory waits for the compute stream.
3. In backward the recomputation is queued before the wait of step 2 lets the gradient in.
4. An edge to the micro-batch before: [Note: Order of backward].

Skips that come from another partition, or go to one, pass through all of this beside the batch. A
skip is copied once, from its source straight to its destination.

With four micro-batches and three partitions whose cells take equally long::

    partition 0   0,0   1,0   2,0   3,0
    partition 1         0,1   1,1   2,1   3,1
    partition 2               0,2   1,2   2,2   3,2

[Note: Order of backward]
Nothing in the graph alone keeps autograd from going through all micro-batches of a partition side
by side, which would hold the recomputed activations of all of them at once. So each output carries
an edge to the output of the micro-batch before::

    forward     output 0 ◀──phony── output 1 ◀──phony── output 2
    backward    3. last             2.                  1. first

Micro-batch ``i`` thus starts no earlier than ``i+1`` has started, and it does not overtake it:
autograd takes the ready node that was made last, by a number that each thread counts for itself,
and the nodes of one partition are all made by one thread, in order. So are the copies to it: the
worker makes them that runs the cell. With numbers of another thread, autograd may leave them until
nothing else is left to do on the device, and the partition before would get no gradient until this
one has computed all of them. The edge hangs on outputs, not on inputs, because a join makes its
tensor require grad, and the first partition would go on to compute a gradient for data that needs
none.

[Note: Unchanged outputs] An edge makes another tensor of an output, with a history of
its own. Whatever else lies in the output's memory (another output, a view, what a layer keeps for
itself) would not see in its history that a later partition changes it in place. So there is no
edge between two partitions where the batch would stay as it is otherwise, since it neither goes to
another memory nor comes out of a checkpoint. Micro-batches reach such a partition in the order in
which they leave the next one.

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

[Note: Work of the calling thread]
The calling thread would have nothing to do but to wait, so it does the work of the last device
itself: one thread less has to be woken up, which takes as long as a small layer. It does that for
all micro-batches, since autograd goes by numbers that each thread counts for itself, see
[Note: Order of backward].

So it does with cells that run one after the other. Only these may have all intra-op threads. A
worker with more than its share would get a team of OpenMP's of its own; as soon as all teams
together have more threads than there are cores, each goes to sleep between any two kernels, for
the rest of the process, and small kernels take twice as long.
"""
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchgpipe.base.context import context
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.checkpoint.random import DrawMonitor
from torchgpipe.engine.checkpoint.recomputation import Recomputation
from torchgpipe.engine.microbatches import Batch
from torchgpipe.engine.partition import Engine
from torchgpipe.engine.run import Run, Skip
from torchgpipe.engine.streams import (AbstractStream, Copy, Recompute, Wait, find_grad, fork,
                                       get_phony, tie, use_stream)
from torchgpipe.engine.workers import Plan, interpret
from torchgpipe.schedule.schedule import Action

__all__ = ['Pipeline']


class Pipeline(Run):
    """A forward pass, whose graph lays the way back.

    >>> from torch import nn
    >>> from torchgpipe.engine.microbatches import gather
    >>> from torchgpipe.engine.microbatches import cut
    >>> batches, _, _ = cut(torch.ones(4, 2), chunks=2)
    >>> Pipeline(Engine([nn.Sequential(nn.Flatten()), nn.Sequential(nn.ReLU())]), batches).run()
    >>> gather(batches).shape
    torch.Size([4, 2])

    Args:
        engine: The partitions, and what runs them.
        batches: The micro-batches; :meth:`run` replaces each by its output.
        options: Those of :class:`~torchgpipe.engine.run.Run`.
    """

    def __init__(self, engine: Engine, batches: list[Batch], *args: Any, **options: Any) -> None:
        super().__init__(engine, batches, *args, **options)
        #: Whether there are edges of order.
        self._orders = self._state.grad and len(batches) > 1 and not self._state.transformed
        #: By partition, the phony to which the output of the next micro-batch is tied.
        self._before: dict[int, list[Tensor]] = {}
        #: And that of the first micro-batch, which comes last in backward.
        self._last: dict[int, list[Tensor]] = {}

    def _run_cells(self) -> None:
        """Run all cells: at the same time, or one after the other where their order matters."""
        m, known = len(self._batches), 0
        # No two could run at the same time, or anyone may see when a cell runs.
        in_order = self._engine.one_worker or m == 1 or self._state.is_serialized or any(
            partition.serialized for partition in self._engine.partitions)
        if not in_order:
            if any(cells.draws is None for cells in self._cells):
                self._run_at_once(0, 1)  # which tells
                known = 1
            if not any(cells.draws for cells in self._cells):
                self._run_at_once(known, m)
                return
        if self._engine.one_worker:
            self._run_in_order(known, m)
        else:
            self._as_worker(partial(self._run_in_order, known, m), self._state.num_threads)

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
        before, context.no_order = context.no_order, partial(_undeclared, action.stage)
        try:
            with use_stream(self._streams[action.stage]):
                self._run_cell(action.micro_batch, action.stage)
        finally:
            context.no_order = before

    def _run_in_order(self, start: int, stop: int) -> None:
        """Run one cell after the other in the calling thread: [Note: Order of draws]."""
        for i in range(start, stop):
            for j, cells in enumerate(self._cells):
                # Beside one that draws, nobody could tell whether another one begins to.
                alone = self._monitor is None and cells.draws is False
                cells.monitor = monitor = DrawMonitor() if alone else self._monitor
                with use_stream(self._streams[j]):
                    self._run_cell(i, j)
                if alone and monitor is not None:
                    self._check_monitor(monitor, [j])

    def _as_worker(self, function: Callable[[], None], num_threads: int) -> None:
        """Let the calling thread do the work of workers, which may wait for a lock that it has."""
        before = context.workers
        context.workers = before | {id(self._engine.workers)}
        try:
            if num_threads != self._state.num_threads:
                torch.set_num_threads(num_threads)
            function()
        finally:
            context.workers = before
            if num_threads != self._state.num_threads:
                torch.set_num_threads(self._state.num_threads)

    # --- transport
    # ------------------------------------------------------------------------------------

    def _bring(self, i: int, j: int, popped: Sequence[Skip]) -> list[Tensor]:
        partition, tensors = self._engine.partitions[j], [*self._batches[i].tensors]
        # First what is there for long: it would be copied behind what has to be computed yet.
        skips = [self._copy(i, skip.j, j, [skip.tensor])[0] for skip in popped
                 if skip.tensor is not None]
        if partition.moves:
            tensors = self.aliasing.cross(i, tensors, partial(self._copy, i, j - 1, j))
        tensors += skips
        if partition.arrives:
            return _wait(self._copy_streams[j][i], self._streams[j], tensors)  # 1
        return tensors

    def _copy(self, i: int, prev_j: int, next_j: int, tensors: list[Tensor]) -> list[Tensor]:
        """Return tensors in the memory of another partition."""
        if not self._engine.apart(prev_j, next_j):
            return tensors
        with use_stream(self._streams[prev_j]):  # On that device it is not current here.
            return [*Copy.apply(  # type: ignore[no-untyped-call]
                self._copy_streams[prev_j][i], self._copy_streams[next_j][i], *tensors)]

    def _send(self, i: int, j: int, cell: Cell, output: list[Tensor],
              recomputation: Recomputation | None) -> None:
        """Add to an output, in place, what backward runs first."""
        departs = self._engine.partitions[j].departs
        if recomputation is not None:
            # Where it does not depart, one node does it all.
            before = () if departs else self._phonies(i, j)
            phony = recomputation.mark(output, before)
            if phony is not None and not departs:
                self._before[j] = [phony]
        if departs:
            # [Note: Stream of the nodes behind a cell]
            # When autograd hands a gradient on, it lets the stream of the next node wait at once
            # for all that is queued on the stream of this one. These nodes belong to the copy
            # stream, so that the compute stream does not wait until `Wait` says so, and the
            # recomputation, queued before, overlaps with the computation of the gradient and with
            # its copy.
            # A leaf, such as an input that is handed on, gets a node that belongs to the compute
            # stream: its gradients are added up there, not on the copy stream of each micro-batch.
            output[:] = [fork(x)[0] if x.is_leaf and x.requires_grad else x for x in output]
            with use_stream(self._copy_streams[j][i]):
                output[:] = _wait(self._streams[j], self._copy_streams[j][i], output)  # 2
                self._tie(i, j, output, recomputation)
        elif recomputation is None and self._orders and j == len(self._cells) - 1:
            self._tie(i, j, output, None)
        self._keep(i, j, cell, output)

    def _tie(self, i: int, j: int, output: list[Tensor], recomputation: Recomputation | None
             ) -> None:
        """Tie an output to what has to come before the rest of its backward, or after that."""
        k = find_grad(output)
        if k is None:
            return
        phonies = self._phonies(i, j)  # 4
        if recomputation is not None:
            phonies = (Recompute.apply(  # type: ignore[no-untyped-call]
                get_phony(output[k].device, requires_grad=True), recomputation), *phonies)  # 3
        if phonies or self._orders:
            output[k], phony = tie(output[k], *phonies)
            self._before[j] = [phony]

    def _phonies(self, i: int, j: int) -> tuple[Tensor, ...]:
        """Return the phonies to which the output of a cell is tied: later in backward."""
        if not self._orders:
            return ()
        return (*self._before.get(j, ()), *(self._last.get(j, ()) if i == 0 else ()))

    def _put_last(self, j: int, phony: Tensor) -> None:
        self._last.setdefault(j, []).append(phony)


def _wait(prev_stream: AbstractStream, next_stream: AbstractStream, tensors: Sequence[Tensor]
          ) -> list[Tensor]:
    return [*Wait.apply(prev_stream, next_stream, *tensors)]  # type: ignore[no-untyped-call]


def _undeclared(j: int) -> str:
    return (f'a layer of partition {j} communicates with other processes, while other partitions '
            'run: the ranks would not come to their collectives in the same order. Let the module '
            'say so, as layers of torchgpipe.shard do: communicates = True; then cells run one '
            'after the other. Or put all partitions on one device')
