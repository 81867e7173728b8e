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

A module that changes when it is called has to run in the order of the model. The step raises at
its end if another one has changed.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from torchgpipe.base.context import context
from torchgpipe.base.errors import add_note
from torchgpipe.base.locks import Lock, layer_lock, step_lock, together
from torchgpipe.base.private import backward_from
from torchgpipe.base.structure import Gradients
from torchgpipe.engine.backward_order import Wait, copy_tensor
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.checkpoint.observation import are_same, state_of
from torchgpipe.engine.checkpoint.random import Drawing, Recorder
from torchgpipe.engine.checkpoint.recomputation import Recomputation
from torchgpipe.engine.checkpoint.swaps import Swap, substituted
from torchgpipe.engine.gradients import DeferredWork, Leaves, edge_of, give, leaf_of, within
from torchgpipe.engine.microbatches import Chunk
from torchgpipe.engine.partition import Engine, Partition, all_modules, has_compiled
from torchgpipe.engine.run import Run
from torchgpipe.engine.streams import CPUStream, no_context, use_stream, wait_stream
from torchgpipe.engine.workers import WorkerPlan, interpret
from torchgpipe.schedule.schedule import Action
from torchgpipe.skip.transfer import Skip


def _without_order(j: int) -> str:
    """Return the error message for a collective in partition ``j``: [Note: Collectives]."""
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


def _states_out_of_order(
    engine: Engine, rows: Sequence[Sequence[Action]]
) -> list[tuple[nn.Module, list[Any]]]:
    """Return modules that do not run one micro-batch after the other, with their states."""
    modules = [*engine.changing]
    orders: dict[int, list[int]] = {}
    for row in rows:
        for action in row:
            if action.kind == 'F':
                orders.setdefault(action.stage, []).append(action.micro_batch)
    for stage, order in orders.items():
        if order != sorted(order):
            modules += engine.partitions[stage].layers.modules()
    return [(module, state_of(module)) for module in modules]


def _check_unchanged(states: Sequence[tuple[nn.Module, list[Any]]]) -> None:
    """Check that modules are in these states.

    Raises:
        RuntimeError: Some modules have changed.
    """
    changed = set()
    for module, state in states:
        if not are_same(state, state_of(module)):
            changed.add(type(module).__name__)
    if changed:
        names = ', '.join(sorted(changed))
        raise RuntimeError(
            f'layers that change when they are called ({names}) run in another '
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

    def gradients(self) -> Gradients:
        """Return other tensors that have a gradient in the end, each with its gradient."""


#: A micro-batch and a partition.
CellIndex = tuple[int, int]


@dataclass(slots=True, eq=False)
class _Graph:
    """The graph of a cell."""

    #: The edges where gradients enter, each with the index of the cell's output.
    roots: list[tuple[int, GradientEdge]]
    #: The leaves where gradients come out, each with its source partition and its index in the
    #: source's output. The source of the model's input is -1.
    leaves: list[tuple[int, int, Tensor]]
    recomputation: Recomputation | None = None


class Step(Run):
    """Forward and backward of a mini-batch."""

    has_backward = True
    #: Whether the outputs of all micro-batches are kept until the end.
    keeps_output = True
    #: The only worker that may communicate with other processes.
    _communicating: Hashable = None
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
        self._rows = rows
        self._loss = loss
        self._compute_loss: Callable[..., Any] = loss
        self._leaves = Leaves()
        #: Swaps of partitions whose modules have leaves only while their actions run. Those of the
        #: loss are in the last partition.
        self._swaps: dict[int, list[Swap]] = {}
        # The graph of the first cells ends at the input, which may have a graph of its own.
        self._input = [batch.tensors for batch in batches]
        for i, batch in enumerate(batches):
            leaves = tuple(map(leaf_of, batch.tensors))
            batches[i] = Chunk(leaves, batch.kind)

        # By micro-batch and partition.
        self._graphs: dict[CellIndex, _Graph] = {}
        #: The gradients of a cell's outputs, by their indices.
        self._grads: dict[CellIndex, dict[int, Tensor]] = {}
        #: The second halves of backwards.
        self._work: dict[CellIndex, list[Callable[[], None]]] = {}
        #: By partition, where its layers find the list of the current action.
        self._deferred: dict[int, DeferredWork] = {}
        for row in rows:
            for action in row:
                partition = engine.partitions[action.stage]
                if action.kind == 'W' and not has_compiled(partition.layers):
                    self._deferred.setdefault(action.stage, DeferredWork())

        self._set_locks({*loss.modules})
        #: Watches backwards, as long as it is not known whether they draw.
        self._recorder: Recorder | None = None
        if not engine.one_worker and engine.backward_draws is Drawing.UNKNOWN:
            self._recorder = Recorder()

    def _set_locks(self, modules: set[nn.Module]) -> None:
        """Set the locks of the step, whose loss has these modules."""
        engine = self._engine
        #: Partitions whose modules are also in another partition, or in the loss.
        self._sharing: set[int] = set()
        locks = []
        for partition in engine.partitions:
            if modules and not modules.isdisjoint(all_modules(partition.layers)):
                self._sharing.add(partition.j)
                locks.append(partition.lock)
            elif partition.shares_modules:
                self._sharing.add(partition.j)
        #: Held while the loss has leaves in place of its parameters.
        self._loss_lock = no_context
        self._steps = engine.step_lock
        if modules:
            self._loss_lock = together(layer_lock(modules), *locks)
            self._steps = together(engine.step_lock, step_lock(modules))

        #: Held by forwards that draw from the generator of the CPU, and by backwards. In backward,
        #: a layer may restore an earlier state of the generator, as `torch.utils.checkpoint` does.
        #: Then concurrent draws would be lost or repeated. Held by all actions if modes see them.
        self._generator_lock: Lock = no_context
        if not engine.one_worker and (
            self._state.has_modes
            or engine.backward_draws is not Drawing.NO
            or any(map(self._may_draw, range(len(self._runs))))
        ):
            self._generator_lock = engine.generator_lock

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
        ordered = set()
        for j, partition in enumerate(engine.partitions):
            if all_ordered or partition.serialized or self._may_draw(j):
                ordered.add(j)
        devices = tuple([partition.device for partition in engine.partitions])
        plan = WorkerPlan.of(self._rows, devices, frozenset(ordered))

        act: Callable[[Action], None] = self._act
        if engine.observer is not None:
            act = partial(engine.observer.act, self._act)
        states = []
        if not plan.in_order:
            states = _states_out_of_order(engine, self._rows)
        try:
            with substituted(self._make_leaves(engine.partitions)):
                interpret(plan, act, engine.workers)
        finally:
            for partition in engine.partitions:
                self._leaves.put_back(all_modules(partition.layers))
        if states:
            _check_unchanged(states)
        if self._recorder is not None:
            engine.backward_draws = Drawing.of(self._recorder.draws)

    def _make_leaves(
        self,
        partitions: Sequence[Partition],
        by_action: bool = False,
    ) -> list[Swap]:
        """Make leaves of the parameters.

        Args:
            partitions: The partitions. The last partition includes the parameters of the loss.
            by_action: Whether each action sets its leaves itself. Actions also do so if modules of
                their partition are elsewhere, or the partition has copies of tensors.

        Returns:
            The swaps that set the other leaves.
        """
        swaps_of_step: list[Swap] = []
        for partition in partitions:
            j = partition.j
            modules = all_modules(partition.layers)
            copies = {} if self._shared is None else self._shared.copies(j)
            swaps = self._leaves.swaps(modules, copies, self._deferred.get(j))
            if by_action or copies or j in self._sharing:
                run = self._runs[j]
                run.function = within(swaps, run.function)
                self._swaps[j] = swaps
            else:
                swaps_of_step += swaps

        last = partitions[-1]
        if last.is_last:
            swaps = self._leaves.swaps(self._loss.modules, {})
            if swaps:
                self._compute_loss = within(swaps, self._loss)
                self._swaps.setdefault(last.j, []).extend(swaps)
        return swaps_of_step

    def _gradients(self) -> Gradients:
        """Return tensors with their accumulated gradients, and release these here."""
        gradients = [*self._leaves.take(), *self._loss.gradients()]
        # All others have been used: these are of the input. Only the list may refer to gradients,
        # so that autograd need not copy them.
        for (i, _), grads in self._grads.items():
            for k, grad in grads.items():
                gradients.append((self._input[i][k], grad))
        self._grads.clear()
        return gradients

    # Actions.

    def _act(self, action: Action) -> None:
        """Run an action."""
        j, kind, i = action
        outside = context.no_order
        run = self._runs[j]
        deferred = self._deferred.get(j)
        if deferred is not None:
            # The list to which layers defer gradients of weights, for `W`.
            deferred.work = self._work.setdefault((i, j), [])
        if self._communicating not in (None, run.partition.worker):
            context.no_order = partial(_without_order, j)
        # A forward draws if a cell was seen to, or was not seen yet. Any backward may restore a
        # generator.
        draws = kind != 'F' or self._state.has_modes or self._may_draw(j)
        lock = self._generator_lock if draws else no_context
        try:
            with use_stream(run.stream), lock:
                if kind != 'F':
                    self._state.run_backward(partial(self._ACTIONS[kind], self, i, j))
                elif self._engine.one_worker:
                    self._run_cell(i, j)
                else:
                    self._state.run(partial(self._run_cell, i, j), self._worker_threads)
        except Exception as error:
            if kind != 'F':
                device = run.partition.device
                m = len(self._batches)
                note = f'in backward of partition {j} on {device}, micro-batch {i} of {m}'
                add_note(error, note)
                if 'modified by an inplace operation' in str(error):
                    add_note(error, _CHANGED)
            raise
        finally:
            context.no_order = outside
            if deferred is not None:
                deferred.work = None

    def _may_draw(self, j: int) -> bool:
        run = self._runs[j]
        if run.cells.draws is not Drawing.NO:
            return True
        # The loss runs after the last cell, in the same action.
        return run.partition.is_last and self._engine.loss_draws is not Drawing.NO

    def _loss_of(self, i: int, output: Any) -> Tensor:
        """Return the loss of micro-batch ``i``.

        Record whether it draws, if this is not known yet, or if no monitor covers the loss.
        """
        engine = self._engine
        with self._loss_lock:
            # The monitor of all cells also covers the loss.
            is_covered = engine.loss_draws is Drawing.NO and self._monitor is not None
            if engine.one_worker or is_covered or engine.loss_draws is Drawing.YES:
                return self._compute_loss(i, output)  # type: ignore[no-any-return]
            recorder = Recorder()
            loss: Tensor = recorder.run(partial(self._compute_loss, i, output))
            engine.loss_draws = Drawing.of(recorder.draws)
            return loss

    def _recompute(self, i: int, j: int) -> None:
        """Run a checkpointed cell again, unless it was done before."""
        recomputation = self._graphs[i, j].recomputation
        if recomputation is not None:
            recomputation.prefetch()

    def _backward(self, i: int, j: int) -> None:
        """Run backward through the graph of a cell, and pass the gradients of its leaves on."""
        grads = self._grads.pop((i, j), {})
        edges = []
        grads_of_edges = []
        for k, edge in self._graphs[i, j].roots:
            if k in grads:
                edges.append(edge)
                grads_of_edges.append(grads[k])
        if edges:
            self._recompute(i, j)  # unless the schedule has done so before
            run: Callable[[], object] = partial(
                backward_from,
                tuple(edges),
                tuple(grads_of_edges),
            )
            if j in self._swaps:
                run = partial(self._run_with_leaves, j, run)
            if self._recorder is not None:
                run = partial(self._recorder.run, run)
            run()

        graph = self._graphs.pop((i, j))
        if graph.recomputation is not None:
            graph.recomputation.drop()
        for prev_j, k, leaf in graph.leaves:
            grad = leaf.grad
            if grad is None:
                continue
            if self._runs[j].partition.arrives:
                grad = self._send_back(i, j, prev_j, grad)
            # Not added up: an output goes to one cell, as a batch or as a skip. A tensor in
            # several places is one output.
            self._grads.setdefault((i, prev_j), {})[k] = grad

    def _run_with_leaves(
        self,
        j: int,
        run: Callable[[], object],
    ) -> None:
        """Run backward with leaves in the modules, as layers may call them in their backward."""
        partition_run = self._runs[j]
        loss_lock = self._loss_lock if partition_run.partition.is_last else no_context
        with partition_run.held, loss_lock, substituted(self._swaps[j]):
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
                work.pop()()  # Its tensors are freed then.

    _ACTIONS = {'R': _recompute, 'B': _backward, 'I': _split_backward, 'W': _finish}

    # The transport.

    def _bring(
        self,
        i: int,
        j: int,
        popped: Sequence[Skip],
    ) -> list[Tensor]:
        tensors = [*self._batches[i].tensors]
        sources = [(j - 1, k) for k in range(len(tensors))]
        for skip in popped:
            if skip.tensor is not None:
                sources.append((skip.j, skip.k))
                tensors.append(skip.tensor)
        if len(tensors) == 1 and i not in self.aliasing.watched:  # as mostly
            return self._carry(i, j, sources, tensors)
        carry = partial(self._carry, i, j, sources)
        return self.aliasing.cross(i, tensors, carry)

    def _carry(
        self,
        i: int,
        j: int,
        sources: Sequence[tuple[int, int]],
        tensors: list[Tensor],
    ) -> list[Tensor]:
        """Return tensors in the graph of a cell, and keep its leaves for their gradients."""
        run = self._runs[j]
        if run.partition.arrives:
            for k, (prev_j, _) in enumerate(sources):
                tensors[k] = self._copied(i, j, prev_j, tensors[k])
            wait_stream(run.stream, run.copy_streams[i])
        graph = _Graph([], [])
        self._graphs[i, j] = graph
        for (prev_j, k), x in zip(sources, tensors):
            if x.requires_grad:
                graph.leaves.append((prev_j, k, x))
        if not graph.leaves:
            return [x.detach() for x in tensors]  # as `Wait` does, without a node
        # A leaf could not be changed in place.
        return [*Wait.apply(CPUStream, CPUStream, *tensors)]  # type: ignore[no-untyped-call]

    def _copied(
        self,
        i: int,
        j: int,
        prev_j: int,
        x: Tensor,
    ) -> Tensor:
        if not self._engine.apart(prev_j, j):
            return x
        run = self._runs[j]
        prev_stream = self._runs[prev_j].copy_streams[i]
        copy = copy_tensor(
            x.detach(),
            prev_stream,
            run.copy_streams[i],
            run.stream,
        )
        return copy.requires_grad_(x.requires_grad)

    def _send(
        self,
        i: int,
        j: int,
        cell: Cell,
        output: list[Tensor],
        recomputation: Recomputation | None,
    ) -> None:
        """Keep the output of a cell as leaves, and the edges for gradients into its graph."""
        run = self._runs[j]
        if run.partition.departs:
            departure = run.copy_streams[i]
            output = [*Wait.apply(run.stream, departure, *output)]  # type: ignore[no-untyped-call]
        graph = self._graphs[i, j]
        graph.recomputation = recomputation
        # `DeferredWork.begin` is a hook of the root, so no layer may reach this node.
        own_node = j in self._deferred
        if run.partition.is_last:
            kept = output if self.keeps_output else []
            self._keep_output(i, j, cell, [y.detach() for y in kept])
            loss = self._loss_of(i, cell.kind(output))
            self._grads[i, j] = {0: torch.ones_like(loss)}
            output = [loss]
            # A loss that is a leaf has no graph to run through.
            own_node = own_node and not loss.is_leaf
        else:
            self._keep_output(i, j, cell, [leaf_of(y) for y in output])
        for k, y in enumerate(output):
            if y.requires_grad:
                graph.roots.append((k, edge_of(y, own_node)))

    def _send_back(
        self,
        i: int,
        j: int,
        prev_j: int,
        grad: Tensor,
    ) -> Tensor:
        """Copy a gradient to the source partition of its tensor."""
        if not self._engine.apart(prev_j, j):
            return grad
        run = self._runs[j]
        prev_run = self._runs[prev_j]
        wait_stream(run.copy_streams[i], run.stream)  # rule 12
        return copy_tensor(
            grad,
            run.copy_streams[i],
            prev_run.copy_streams[i],
            prev_run.stream,
        )
