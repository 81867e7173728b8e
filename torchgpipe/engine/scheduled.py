"""A step: forward and backward of separate cells, in the order of a schedule.

Every cell has its own graph. Between cells, :class:`Step` moves the tensors and gradients that
autograd moves in the plain call::

    cell (i, j)                                              cell (i, j+1)
    leaves ─▶ layers ─▶ y ──(Wait)──▶ detach ─▶ copy ─▶ leaf ─▶ layers ─▶ …       forward
    leaves ◀─ layers ◀─ y ◀─(Wait)── gradient ◀─ copy ◀─ leaf.grad ◀─ layers      backward

Ownership: an output's graph and the leaf own its memory until the next cell has run. Afterwards,
only tensors that layers have saved keep it alive. The graph of a cell, its leaves and
its gradient are freed with its backward. Copies are recorded with the allocator on the stream that
reads them, as in :mod:`torchgpipe.engine.streams`.

:class:`Unordered` checks that modules which run out of order have not changed. :func:`beside`
returns the error message for [Note: Collectives] of :mod:`torchgpipe.base.context`.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from torchgpipe.base.context import context
from torchgpipe.base.errors import add_note
from torchgpipe.base.locks import layer_lock, step_lock, together
from torchgpipe.base.private import backward_from
from torchgpipe.engine.backward_order import Wait, copy_tensor
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.checkpoint.observation import are_same, state_of
from torchgpipe.engine.checkpoint.random import Recorder
from torchgpipe.engine.checkpoint.recomputation import Recomputation
from torchgpipe.engine.checkpoint.swaps import Swap, substituted
from torchgpipe.engine.gradients import DeferredWork, Leaves, edge_of, give, leaf_of, within
from torchgpipe.engine.microbatches import Chunk
from torchgpipe.engine.partition import Engine, Partition, has_compiled
from torchgpipe.engine.run import Run
from torchgpipe.engine.streams import CPUStream, no_context, use_stream, wait_stream
from torchgpipe.engine.workers import WorkerPlan, interpret
from torchgpipe.schedule.schedule import Action
from torchgpipe.skip.transfer import Skip


def beside(j: int) -> str:
    """Return an error message for a collective in partition ``j``."""
    return (
        f'partition {j} communicates with other processes, or the loss does, while other '
        'workers may do so beside it: the ranks would not come to their collectives in the '
        'same order. Let modules that do so say it, communicates = True, and put them into '
        'partitions on one device, that of the last one if the loss does so, too; or use the '
        'plain call, model(input) and loss.backward()'
    )


_CHANGED = (
    'If a layer writes to its parameter or buffer in forward, another micro-batch changes '
    "what this one has saved. Use checkpoint='always', which keeps the values of each "
    'micro-batch, or let the layer use a copy: tensor.clone()'
)


class Unordered:
    """The present state of layers that do not run one micro-batch after the other."""

    def __init__(self, engine: Engine, rows: Sequence[Sequence[Action]]) -> None:
        modules = [*engine.changing]
        for j, partition in enumerate(engine.partitions):
            order = [
                action.micro_batch
                for row in rows
                for action in row
                if action.kind == 'F' and action.stage == j
            ]
            if order != sorted(order):
                modules += partition.layers.modules()
        self._before = [(module, state_of(module)) for module in modules]

    def check(self) -> None:
        """Check that no layer has changed since.

        Raises:
            RuntimeError: Some layers have changed.
        """
        names = sorted(
            {
                type(module).__name__
                for module, before in self._before
                if not are_same(before, state_of(module))
            }
        )
        if names:
            raise RuntimeError(
                f'layers that change when they are called ({", ".join(names)}) run in another '
                'order here than in the model: they stand in several partitions, or the schedule '
                "takes micro-batches in another order. Use schedule='1f1b' or 'gpipe', put all "
                'places of a layer into one partition, or give each place a layer of its own'
            )


class Loss(Protocol):
    """The loss, from which backward starts."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules whose parameters the loss uses."""

    def __call__(self, i: int, output: Any) -> Tensor:
        """Return the loss of micro-batch ``i``."""

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return other tensors that have a gradient in the end, each with its gradient."""


class _Graph(NamedTuple):
    """The graph of a cell.

    Args:
        roots: The edges where gradients enter, each with the index of the cell's output.
        leaves: The leaves where gradients come out, each with its source partition and its index
            in the source's output. The source of the model's input is -1.
    """

    roots: list[tuple[int, GradientEdge]]
    leaves: list[tuple[int, int, Tensor]]


class Step(Run):
    """Forward and backward of a mini-batch."""

    has_backward = True
    #: Whether the outputs of all micro-batches are kept until the end.
    keeps_output = True
    _give = staticmethod(give)

    def __init__(
        self,
        engine: Engine,
        batches: list[Chunk],
        rows: tuple[tuple[Action, ...], ...],
        loss: Loss,
        **options: Any,
    ) -> None:
        super().__init__(engine, batches, **options)
        self._losses = loss
        self._rows = rows
        #: The only worker that may communicate with other processes.
        self._communicating: Hashable = None
        self._leaves = Leaves()
        self._loss: Callable[..., Any] = loss
        #: Swaps of partitions whose modules have leaves only while their actions run.
        self._swaps: dict[int, list[Swap]] = {}
        modules = {*loss.modules}
        with_loss = [
            partition
            for partition in engine.partitions
            if not modules.isdisjoint(partition.layers.modules())
        ]
        #: Held while the loss has leaves in place of its parameters.
        self._loss_lock = (
            together(layer_lock(modules), *(partition.lock for partition in with_loss))
            if modules
            else no_context
        )
        #: Partitions whose modules are also in another partition, or in the loss.
        self._apart = {
            partition.j
            for partition in engine.partitions
            if partition.shares_modules or partition in with_loss
        }
        self._steps = (
            together(engine.step_lock, step_lock(modules)) if modules else engine.step_lock
        )
        self._input = [batch.tensors for batch in batches]
        batches[:] = [Chunk(tuple(map(leaf_of, batch.tensors)), batch.kind) for batch in batches]
        #: Graphs, gradients and recomputations, by micro-batch and partition.
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._grads: dict[tuple[int, int], dict[int, Tensor]] = {}
        self._recomputations: dict[tuple[int, int], Recomputation] = {}
        #: The second halves of backwards; and the lists to which layers defer them, by partition.
        self._work: dict[tuple[int, int], list[Callable[[], None]]] = {}
        #: Held by forwards that draw from the generator of the CPU, and by backwards. In backward,
        #: a layer may restore an earlier state of the generator, as `torch.utils.checkpoint` does.
        #: Then concurrent draws would be lost or repeated. Held by all actions if modes see them.
        self._generator_lock = (
            engine.generator_lock
            if not engine.one_worker
            and (
                self._state.has_modes
                or engine.backward_draws is not False
                or any(map(self._may_draw, range(len(self._cells))))
            )
            else no_context
        )
        #: Watches backwards, as long as it is not known whether they draw.
        self._recorder = (
            Recorder() if not engine.one_worker and engine.backward_draws is None else None
        )
        split = {action.stage for row in rows for action in row if action.kind == 'W'}
        self._deferred = {
            j: DeferredWork() for j in split if not has_compiled(engine.partitions[j].layers)
        }

    def run(self) -> None:
        """Run all actions; then accumulate the gradients of parameters and of the input.

        Raises:
            BaseException: The first error that an action raised. Then no gradient was added.
        """
        self._communicating = self._engine.communicating_worker
        try:
            super().run()
            self._give(self._gradients())
        finally:
            self._leaves.freeze()

    def _run_cells(self) -> None:
        """Run all actions."""
        engine = self._engine
        # Whether user code may see when cells run, even if they do not draw.
        all_ordered = engine.one_worker or self._state.is_serialized
        ordered = frozenset(
            [
                j
                for j, partition in enumerate(engine.partitions)
                if all_ordered or partition.serialized or self._may_draw(j)
            ]
        )
        devices = tuple([partition.device for partition in engine.partitions])
        plan = WorkerPlan.of(self._rows, devices, ordered)
        run = self._act if engine.observer is None else partial(engine.observer.act, self._act)
        watch = None if plan.in_order else Unordered(engine, self._rows)
        try:
            with substituted(self._put_leaves(engine.partitions)):
                interpret(plan, run, engine.workers)
        finally:
            for partition in engine.partitions:
                self._leaves.put_back(partition.layers.modules())
        if watch is not None:
            watch.check()
        if self._recorder is not None:
            engine.backward_draws = self._recorder.draws

    def _put_leaves(self, partitions: Sequence[Partition], each: bool = False) -> list[Swap]:
        """Make leaves of the parameters.

        Args:
            partitions: The partitions. The last partition includes the parameters of the loss.
            each: Whether each action sets its leaves itself. Actions also do so if modules of
                their partition are elsewhere, or the partition has copies of tensors.

        Returns:
            The swaps that set the other leaves.
        """
        found = []
        for partition in partitions:
            copies = {} if self._shared is None else self._shared.copies(partition.j)
            swaps = self._leaves.swaps(
                partition.layers.modules(), copies, self._deferred.get(partition.j)
            )
            if each or copies or partition.j in self._apart:
                self._layers[partition.j] = within(swaps, self._layers[partition.j])
                self._swaps[partition.j] = swaps
            else:
                found += swaps
        if partitions[-1].j == len(self._cells) - 1:
            swaps = self._leaves.swaps(self._losses.modules, {})
            if swaps:
                self._loss = within(swaps, self._losses)
                self._swaps.setdefault(partitions[-1].j, []).extend(swaps)
        return found

    def _gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Return tensors with their accumulated gradients, and release these here."""
        gradients = [*self._leaves.take(), *self._losses.gradients()]
        # All others have been used. Only the list may refer to these gradients.
        gradients += [
            (self._input[i][k], grad)
            for (i, _), grads in self._grads.items()
            for k, grad in grads.items()
        ]
        self._grads.clear()
        return gradients

    def _act(self, action: Action) -> None:
        """Run an action."""
        j, kind, i = action
        deferred = self._deferred.get(j)
        before = context.no_order
        if deferred is not None:
            # The list to which layers defer gradients of weights, for `W`.
            deferred.work = self._work.setdefault((i, j), [])
        if self._communicating not in (None, self._engine.partitions[j].worker):
            context.no_order = partial(beside, j)
        alone = kind != 'F' or self._state.has_modes or self._may_draw(j)
        try:
            with use_stream(self._streams[j]), self._generator_lock if alone else no_context:
                if kind != 'F':
                    self._state.run_backward(partial(self._ACTIONS[kind], self, i, j))
                elif self._engine.one_worker:
                    self._run_cell(i, j)
                else:
                    self._state.run(partial(self._run_cell, i, j), self._share)
        except Exception as error:
            if kind != 'F':
                add_note(
                    error,
                    f'in backward of partition {j} on '
                    f'{self._engine.partitions[j].device}, micro-batch {i} of '
                    f'{len(self._batches)}',
                )
                if 'modified by an inplace operation' in str(error):
                    add_note(error, _CHANGED)
            raise
        finally:
            context.no_order = before
            if deferred is not None:
                deferred.work = None

    def _bring(self, i: int, j: int, popped: Sequence[Skip]) -> list[Tensor]:
        batch = self._batches[i].tensors
        sources = [(j - 1, k) for k in range(len(batch))] + [(skip.j, skip.k) for skip in popped]
        tensors = [*batch, *(skip.tensor for skip in popped if skip.tensor is not None)]
        if len(tensors) == 1 and i not in self.aliasing.watched:  # as mostly
            return self._carry(i, j, sources, tensors)
        return self.aliasing.cross(i, tensors, partial(self._carry, i, j, sources))

    def _carry(
        self, i: int, j: int, sources: Sequence[tuple[int, int]], tensors: list[Tensor]
    ) -> list[Tensor]:
        """Return tensors in the graph of a cell, and keep its leaves for their gradients."""
        if self._engine.partitions[j].arrives:
            tensors = [self._copied(i, j, prev_j, x) for (prev_j, _), x in zip(sources, tensors)]
            wait_stream(self._streams[j], self._copy_streams[j][i])
        self._graphs[i, j] = _Graph(
            [], [(*source, x) for source, x in zip(sources, tensors) if x.requires_grad]
        )
        # A leaf could not be changed in place.
        return [*Wait.apply(CPUStream, CPUStream, *tensors)]  # type: ignore[no-untyped-call]

    def _copied(self, i: int, j: int, prev_j: int, x: Tensor) -> Tensor:
        if not self._engine.apart(prev_j, j):
            return x
        prev_stream = self._copy_streams[prev_j][i]
        next_stream = self._copy_streams[j][i]
        copy = copy_tensor(x.detach(), prev_stream, next_stream, self._streams[j])
        return copy.requires_grad_(x.requires_grad)

    def _send(
        self, i: int, j: int, cell: Cell, output: list[Tensor], recomputation: Recomputation | None
    ) -> None:
        """Keep the output of a cell as leaves, and the edges for gradients into its graph."""
        if self._engine.partitions[j].departs:
            stream = self._streams[j]
            departure = self._copy_streams[j][i]
            output = [*Wait.apply(stream, departure, *output)]  # type: ignore[no-untyped-call]
        if recomputation is not None:
            self._recomputations[i, j] = recomputation
        roots = self._graphs[i, j].roots
        own_node = j in self._deferred
        if j < len(self._cells) - 1:
            self._keep(i, j, cell, [leaf_of(y) for y in output])
            roots += [(k, edge_of(y, own_node)) for k, y in enumerate(output) if y.requires_grad]
        else:
            self._keep(i, j, cell, [y.detach() for y in output if self.keeps_output])
            loss = self._loss_of(i, cell.kind(output))
            roots.append((0, edge_of(loss, own_node and not loss.is_leaf)))
            self._grads[i, j] = {0: torch.ones_like(loss)}

    def _may_draw(self, j: int) -> bool:
        is_last = j == len(self._cells) - 1  # The loss draws when its cell has run.
        return self._cells[j].draws is not False or (
            is_last and self._engine.loss_draws is not False
        )

    def _loss_of(self, i: int, output: Any) -> Tensor:
        """Return the loss of micro-batch ``i``.

        Record whether it draws, if this is not known yet, or if no monitor covers the loss.
        """
        with self._loss_lock:
            seen = self._engine.loss_draws  # The monitor of all cells also covers the loss.
            if self._engine.one_worker or seen or (seen is False and self._monitor is not None):
                return self._loss(i, output)  # type: ignore[no-any-return]
            recorder = Recorder()
            loss: Tensor = recorder.run(partial(self._loss, i, output))
            self._engine.loss_draws = recorder.draws
            return loss

    def _recompute(self, i: int, j: int) -> None:
        """Run a checkpointed cell again, unless it was done before."""
        if (i, j) in self._recomputations:
            self._recomputations[i, j].prefetch()

    def _backward(self, i: int, j: int) -> None:
        """Run backward through the graph of a cell, and pass the gradients of its leaves on."""
        graph = self._graphs.pop((i, j))
        grads = self._grads.pop((i, j), {})
        roots = [(edge, grads[k]) for k, edge in graph.roots if k in grads]
        if roots:
            self._recompute(i, j)  # unless the schedule has done so before
            run: Callable[[], object] = partial(backward_from, *zip(*roots))
            if j in self._swaps:
                run = partial(self._run_with_leaves, j, run)
            run() if self._recorder is None else self._recorder.run(run)
        if (i, j) in self._recomputations:
            self._recomputations.pop((i, j)).drop()
        for prev_j, k, leaf in graph.leaves:
            if leaf.grad is not None:
                self._grads.setdefault((i, prev_j), {})[k] = (
                    self._send_back(i, j, prev_j, leaf.grad)
                    if self._engine.partitions[j].arrives
                    else leaf.grad
                )

    def _run_with_leaves(self, j: int, run: Callable[[], object]) -> None:
        """Run backward with leaves in the modules, as layers may call them in their backward."""
        loss_lock = self._loss_lock if j == len(self._cells) - 1 else no_context
        with self._held[j], loss_lock, substituted(self._swaps[j]):
            run()

    def _split_backward(self, i: int, j: int) -> None:
        """Run the first half of backward, which defers gradients of weights."""
        if j in self._deferred:
            for _, edge in self._graphs[i, j].roots:
                edge.node.register_prehook(self._deferred[j].begin)
        self._backward(i, j)

    def _finish(self, i: int, j: int) -> None:
        """Compute the gradients of weights that backward has deferred."""
        work = self._work.pop((i, j), [])
        with torch.no_grad():
            while work:
                work.pop()()

    _ACTIONS = {'R': _recompute, 'B': _backward, 'I': _split_backward, 'W': _finish}

    def _send_back(self, i: int, j: int, prev_j: int, grad: Tensor) -> Tensor:
        """Copy a gradient to the source partition of its tensor."""
        if not self._engine.apart(prev_j, j):
            return grad
        prev_stream = self._copy_streams[prev_j][i]
        next_stream = self._copy_streams[j][i]
        wait_stream(next_stream, self._streams[j])  # rule 12
        return copy_tensor(grad, next_stream, prev_stream, self._streams[prev_j])
