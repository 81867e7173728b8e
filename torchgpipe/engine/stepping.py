"""A step: forward and backward of cells, each by itself, in the order of a schedule.

Every cell has a graph of its own. Between two of them the step carries what autograd carries in
the plain call::

    cell (i, j)                                              cell (i, j+1)
    leaves ─▶ layers ─▶ y ──(Wait)──▶ detach ─▶ copy ─▶ leaf ─▶ layers ─▶ …       forward
    leaves ◀─ layers ◀─ y ◀─(Wait)── gradient ◀─ copy ◀─ leaf.grad ◀─ layers      backward

Skips are more outputs of the cell that stashes them, and more inputs of the cell that pops them.

Who owns what: an output's memory belongs to its graph, and to the leaf until the next cell ran;
from then on to whatever layers have saved. The graph of a cell, its leaves and its gradient end
with its backward. What is copied is recorded with the allocator on the stream that reads it, as in
:mod:`torchgpipe.engine.copy`.
"""
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from torchgpipe.communication import without_order
from torchgpipe.engine.batch import Batch
from torchgpipe.engine.checkpoint.draws import Recorder
from torchgpipe.engine.checkpoint.recomputation import Recomputation
from torchgpipe.engine.compiled import has_compiled
from torchgpipe.engine.compute import Compute
from torchgpipe.engine.copy import Wait, copy_tensor
from torchgpipe.engine.halves import PutOff
from torchgpipe.engine.interpreter import Plan, interpret
from torchgpipe.engine.leaves import Leaves, give
from torchgpipe.engine.memory import versions
from torchgpipe.engine.partition import Engine, Partition
from torchgpipe.engine.pipeline import Pipeline
from torchgpipe.engine.stream import CPUStream, use_stream, wait_stream
from torchgpipe.errors import add_note
from torchgpipe.locks import layer_lock, together
from torchgpipe.schedule.action import Action
from torchgpipe.skip.namespace import Key
from torchgpipe.skip.portal import changed_in_place
from torchgpipe.skip.tracker import SkipTracker
from torchgpipe.structure import Kind

__all__ = ['Loss', 'Step', 'leaf_of']


class Loss(Protocol):
    """What backward starts from."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The modules whose parameters it uses."""

    def __call__(self, i: int, output: Any) -> Tensor:
        """Give that of micro-batch ``i``."""

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Give what else has a gradient in the end, each with that."""


class _Value(NamedTuple):
    """What goes from one cell to another: number ``k`` of what partition ``j`` gave; -1 the input.

    ``tensor`` is a leaf of the graph of the cell that takes it, if both are in one memory.
    """

    j: int
    k: int
    tensor: Tensor


class _Skip(NamedTuple):
    """A skip on its way, ``None`` if that is what was stashed, and its version then."""

    value: _Value | None
    version: int = 0


class _Graph(NamedTuple):
    """The graph of a cell: where gradients enter it, by numbers, and where they come out."""

    roots: list[tuple[int, GradientEdge]]
    leaves: list[tuple[_Value, Tensor]]


class Step(Pipeline):
    """Forward and backward of a mini-batch.

    Args:
        engine: The partitions, and what runs them.
        batches: The micro-batches; :meth:`run` replaces each by its output.
        rows: Those of the schedule, whose stages are the partitions.
        loss: Gives what backward starts from, for each micro-batch.
        options: Those of :class:`~torchgpipe.engine.pipeline.Pipeline`.
    """

    def __init__(self, engine: Engine, batches: list[Batch], rows: tuple[tuple[Action, ...], ...],
                 loss: Loss, **options: Any) -> None:
        super().__init__(engine, batches, **options)
        self._losses = loss
        self._held = [self._hold(partition.j, self._lock_of(partition))
                      for partition in engine.partitions]
        self._trackers = []  # Skips are values as others are.
        self._rows = rows
        #: The one worker that may communicate with other processes, if there are others.
        self._speaker: Hashable = None
        self._leaves = Leaves()
        self._computes: list[Callable[..., Any]] = []
        self._loss: Callable[..., Any] = loss
        self._input = [tuple(batch) for batch in batches]
        #: What the cell of each micro-batch takes, or has given.
        self._values = [[_Value(-1, k, leaf_of(x)) for k, x in enumerate(batch)]
                        for batch in batches]
        self._skips: list[dict[Key, _Skip]] = [{} for _ in batches]
        #: By micro-batch and partition.
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._grads: dict[tuple[int, int], dict[int, Tensor]] = {}
        self._recomputations: dict[tuple[int, int], Recomputation] = {}
        #: What the second halves of backwards do; and where layers put it, by partition.
        self._work: dict[tuple[int, int], list[Callable[[], None]]] = {}
        split = {action.stage for row in rows for action in row if action.kind == 'W'}
        self._put_off = {j: PutOff() for j in split
                         if not has_compiled(engine.partitions[j].layers)}

    def run(self) -> None:
        """Run all actions; then add the gradients to those of parameters and of the input.

        Raises:
            BaseException: What an action raised, the first one. Then no gradient was added.
        """
        if not self._engine.one_worker:
            self._speaker = _speaker(self._engine.partitions)
        super().run()
        try:
            self._give()
        finally:
            self._state.repair()

    def _run_cells(self) -> None:
        """Run all actions."""
        engine = self._engine
        plan = Plan.of(self._rows, tuple([partition.device for partition in engine.partitions]),
                       frozenset(filter(self._is_ordered, range(len(self._cells)))))
        self._put_leaves()
        run = self._act if engine.observer is None else partial(engine.observer.act, self._act)
        interpret(plan, run, engine.workers)

    def _lock_of(self, partition: Partition) -> AbstractContextManager[Any]:
        """Return the lock of all modules that have leaves in a cell, and in the loss after it."""
        locks, modules = [partition.lock_alone], {*self._losses.modules}
        if modules and partition.j == len(self._engine.partitions) - 1:
            locks += [layer_lock(modules), *(
                other.lock for other in self._engine.partitions
                if not modules.isdisjoint(other.layers.modules()))]
        return together(*locks)

    def _put_leaves(self) -> None:
        """Make leaves of the parameters, as they are when no cell has put others there."""
        for partition in self._engine.partitions:
            copies = {} if self._shared is None else self._shared.copies(partition.j)
            with self._lock_of(partition):
                self._computes.append(self._leaves.within(
                    partition.layers.modules(), partition.compute, copies,
                    self._put_off.get(partition.j)))
        with self._lock_of(partition):
            self._loss = self._leaves.within(self._losses.modules, self._losses, {})

    def _give(self) -> None:
        gradients = [*self._leaves.take(), *self._losses.gradients()]
        for (i, _), grads in self._grads.items():  # All others have been taken.
            gradients += [(self._input[i][k], grad) for k, grad in grads.items()]
        self._grads.clear()
        give(gradients)

    def _act(self, action: Action) -> None:
        """Run an action."""
        j, kind, i = action
        beside = self._speaker not in (None, self._engine.partitions[j].worker)
        put_off = self._put_off.get(j)
        if put_off is not None:
            # Where layers put gradients of weights off to, and `W` finds them.
            put_off.work, put_off.goes_back = self._work.setdefault((i, j), []), kind == 'I'
        try:
            with without_order(partial(_beside, j) if beside else None), \
                    use_stream(self._edges[j].stream):
                self._run_action(i, j, kind)
        finally:
            if put_off is not None:
                put_off.work, put_off.goes_back = None, False

    def _run_action(self, i: int, j: int, kind: str) -> None:
        if kind != 'F':
            self._state.run_backward(partial(self._go_back, i, j, kind))
        elif self._engine.one_worker:
            self._run_cell(i, j)
        else:
            self._state.run(partial(self._run_cell, i, j), self._share)

    # --- forward
    # ------------------------------------------------------------------------------------

    def _bring(self, i: int, j: int) -> None:
        """Let a cell have its batch, and the skips that it pops beside that, in its own graph."""
        values, kind = self._values[i], self._batches[i].kind
        number = len(values)
        for _, key in self._engine.partitions[j].incoming:
            value, version = self._skips[i][key]
            if value is not None:
                if versions([value.tensor]) != [version]:
                    raise RuntimeError(changed_in_place(f"the skip tensor '{key[1]}'"))
                values.append(value)
        batch = Batch.of(tuple([value.tensor for value in values]), kind)
        self.aliasing.copy(i, batch, partial(self._carry, i, j, values))
        self._batches[i] = batch
        skips = iter(tuple(batch)[number:])
        for _, key in self._engine.partitions[j].incoming:
            skip = self._skips[i][key]
            if skip.value is not None:
                self._skips[i][key] = _Skip(skip.value._replace(tensor=next(skips)))

    def _skips_of(self, i: int, keys: Iterable[Key]) -> dict[Key, Tensor]:
        skips = self._skips[i]
        return {key: value.tensor for key in keys if (value := skips[key].value) is not None}

    def _carry(self, i: int, j: int, values: Sequence[_Value], batch: Batch) -> None:
        """Let values arrive at a cell, in place, and keep where their gradients come out."""
        compute = self._edges[j].stream
        arrived = [self._copied(i, j, value) for value in values]
        if self._engine.partitions[j].arrives:
            wait_stream(compute, self._copy_streams[j][i])
        self._graphs[i, j] = _Graph([], [
            (value, x) for value, x in zip(values, arrived) if x.requires_grad])
        # A leaf could not be changed in place.
        batch[:] = Wait.apply(CPUStream, CPUStream, *arrived)  # type: ignore[no-untyped-call]

    def _copied(self, i: int, j: int, value: _Value) -> Tensor:
        if not self._is_apart(value, j):
            return value.tensor
        prev_stream, next_stream = self._copy_streams[value.j][i], self._copy_streams[j][i]
        copy = copy_tensor(value.tensor.detach(), prev_stream, next_stream, self._edges[j].stream)
        return copy.requires_grad_(value.tensor.requires_grad)

    def _is_apart(self, value: _Value, j: int) -> bool:
        return value.j >= 0 and self._engine.apart(value.j, j)

    def _run(self, i: int, j: int, batch: Batch) -> Batch:
        """Run a cell, and keep where gradients enter its graph."""
        partition, skips, m = self._engine.partitions[j], self._skips[i], len(self._batches)
        popped = {key: skips.pop(key).value is not None for _, key in partition.incoming}
        stashed = [key for _, key in partition.outgoing]
        cell = _Cell(partial(self._computes[j], i, m), batch.kind, popped, stashed)
        blame = None if popped else partial(_blame, partition.compute, batch.kind)
        output, recomputation = self._cells[j].run(i, cell, Batch.of(tuple(batch)), blame=blame)
        if partition.departs:
            stream, departure = self._edges[j].stream, self._copy_streams[j][i]
            output[:] = Wait.apply(stream, departure, *output)  # type: ignore[no-untyped-call]
        if recomputation is not None:
            recomputation.join(output)
            self._recomputations[i, j] = recomputation
        return self._keep(i, j, output, cell)

    def _keep(self, i: int, j: int, output: Batch, cell: '_Cell') -> Batch:
        """Keep what a cell gave for the cells that take it, and where its gradient enters."""
        roots = self._graphs[i, j].roots
        number = len(output) - sum(cell.stashed.values())
        values = [_Value(j, k, leaf_of(y)) for k, y in enumerate(output)]
        rest = iter(values[number:])
        for key, is_there in cell.stashed.items():
            value = next(rest) if is_there else None
            self._skips[i][key] = _Skip(value, versions([value.tensor])[0] if value else 0)
        if j < len(self._cells) - 1:
            roots += [(k, _edge_of(y)) for k, y in enumerate(output) if y.requires_grad]
        else:
            loss = self._loss_of(i, cell.kind(tuple(output)))
            roots.append((0, get_gradient_edge(loss)))
            self._grads[i, j] = {0: torch.ones_like(loss)}
        self._values[i] = values[:number]
        return Batch.of(tuple(value.tensor.detach() for value in values[:number]), cell.kind)

    def _is_ordered(self, j: int) -> bool:
        is_last = j == len(self._cells) - 1  # The loss draws when its cell has run.
        return super()._is_ordered(j) or is_last and self._engine.loss_draws is not False

    def _loss_of(self, i: int, output: Any) -> Tensor:
        """Return the loss of micro-batch ``i``; where others draw, look whether it draws, too."""
        if self._engine.loss_draws or self._witness is not None:
            return self._loss(i, output)  # type: ignore[no-any-return]
        recorder = Recorder()
        loss: Tensor = recorder.run(partial(self._loss, i, output))
        self._engine.loss_draws = bool(recorder.draws)
        return loss

    # --- backward
    # ------------------------------------------------------------------------------------

    def _go_back(self, i: int, j: int, kind: str) -> None:
        try:
            self._ACTIONS[kind](self, i, j)
        except Exception as error:
            add_note(error, f'in backward of partition {j} on '
                            f'{self._engine.partitions[j].device}, micro-batch {i} of '
                            f'{len(self._batches)}')
            raise

    def _recompute(self, i: int, j: int) -> None:
        """Run a checkpointed cell again, while its gradient is on its way."""
        if (i, j) in self._recomputations:
            self._recomputations.pop((i, j)).fill_ahead()

    def _backward(self, i: int, j: int) -> None:
        """Take the gradients of what a cell gave through its graph, and send on what comes out."""
        graph = self._graphs.pop((i, j))
        self._recomputations.pop((i, j), None)
        grads = self._grads.pop((i, j), {})
        roots = [(edge, grads[k]) for k, edge in graph.roots if k in grads]
        torch.autograd.backward([edge for edge, _ in roots], [grad for _, grad in roots])
        for value, leaf in graph.leaves:
            if leaf.grad is not None:
                self._send(i, j, value, leaf.grad)

    def _finish(self, i: int, j: int) -> None:
        """Compute the gradients of weights that backward has put off."""
        work = self._work.pop((i, j), [])
        with torch.no_grad():
            while work:
                work.pop()()

    _ACTIONS = {'R': _recompute, 'B': _backward, 'I': _backward, 'W': _finish}

    def _send(self, i: int, j: int, value: _Value, grad: Tensor) -> None:
        """Let a gradient arrive where the value came from."""
        if self._is_apart(value, j):
            prev_stream, next_stream = self._copy_streams[value.j][i], self._copy_streams[j][i]
            wait_stream(next_stream, self._edges[j].stream)
            grad = copy_tensor(grad, next_stream, prev_stream, self._edges[value.j].stream)
        self._grads.setdefault((i, value.j), {})[value.k] = grad


def _speaker(partitions: Sequence[Partition]) -> Hashable:
    """Give the worker that communicates with other processes, or may do so for the loss.

    Raises:
        RuntimeError: There are several.
    """
    found = [partition for partition in partitions if partition.communicates]
    if len({partition.worker for partition in found}) > 1:
        names = ', '.join(f'{partition.j} on {partition.device}' for partition in found)
        raise RuntimeError(
            f'partitions {names} communicate with other processes, and each worker goes through '
            'its actions of a step by itself: the ranks would not come to their collectives in '
            'the same order. Put these partitions on one device; or use the plain call, '
            'model(input) and loss.backward(), which runs one cell after the other')
    return (found or partitions)[-1].worker


def _beside(j: int) -> str:
    return (f'partition {j} communicates with other processes, or the loss does, while other '
            'workers may do so beside it: the ranks would not come to their collectives in the '
            'same order. Let modules that do so say it, communicates = True, and put them into '
            'partitions on one device, that of the last one if the loss does so, too; or use the '
            'plain call, model(input) and loss.backward()')


def _edge_of(y: Tensor) -> GradientEdge:
    """Return where the gradient of a tensor enters its graph, and keep that graph alive."""
    # PyTorch does so by a view, of which a sparse tensor has none.
    return get_gradient_edge(y if y.layout is torch.strided or y.is_nested else y.clone())


def leaf_of(x: Tensor) -> Tensor:
    """Give a tensor as a leaf of another graph."""
    return x.detach().requires_grad_(x.requires_grad)


def _blame(compute: Compute, kind: Kind, tensors: Sequence[Tensor]) -> str:
    return compute.blame(kind(tensors))


class _Cell:
    """A cell's function from tensors to tensors, with skips beside its batch.

    A graph may own it, through a recomputation.

    Args:
        compute: Takes a tracker and a value.
        kind: Puts the value together.
        popped: The skips that come in, and whether each is a tensor; these are the last tensors.
        stashed: The skips that go out.
    """

    def __init__(self, compute: Callable[..., Any], kind: Kind, popped: dict[Key, bool],
                 stashed: Sequence[Key]) -> None:
        self._compute = compute
        self._value_kind = kind
        self._popped = popped
        #: What it gives, once it was called: skips, and whether each is a tensor.
        self.stashed = dict.fromkeys(stashed, False)
        #: And what puts its output together.
        self.kind: Kind = tuple

    def __call__(self, tensors: Sequence[Tensor]) -> Batch:
        number = len(tensors) - sum(self._popped.values())
        popped = iter(tensors[number:])
        tracker = SkipTracker()
        tracker.tensors = {key: next(popped) if is_there else None
                           for key, is_there in self._popped.items()}
        output = Batch.result(self._compute(tracker, self._value_kind(tuple(tensors[:number]))))
        skips = {key: tracker.tensors[key] for key in self.stashed}
        self.stashed = {key: x is not None for key, x in skips.items()}
        self.kind = output.kind
        return Batch.of((*output, *(x for x in skips.values() if x is not None)))
