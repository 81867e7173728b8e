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

:class:`Aliasing` follows tensors with a common memory (rule 8). Without a pipeline, a change in
place reaches all tensors in the same memory. In a pipeline it may not reach all, or too many, and
then the plain call and the step raise::

    a tensor of the batch and           without a pipeline       here
    a skip                              both change              the skip may be a copy by now
    another tensor, before a boundary   both change              each has a history of its own
    itself in other micro-batches       changes once             changes for each micro-batch
    one that the layer keeps            changes in turn          may change before it was used

A change of a skip raises as well if another skip lies in its memory.

Tensors that all micro-batches share are detected in the output by their place in memory. Therefore
:class:`Aliasing` follows them through copies, and into and out of skips.
"""

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchgpipe.base.context import (
    MicroBatch,
    MiniBatch,
    ThreadState,
    context,
    generator_lock,
    is_held,
    released_generator,
)
from torchgpipe.base.errors import add_note
from torchgpipe.base.private import versions
from torchgpipe.base.structure import is_among, share_memory
from torchgpipe.engine.cell import Cell, Cells
from torchgpipe.engine.checkpoint.random import DrawMonitor
from torchgpipe.engine.checkpoint.recomputation import Recomputation
from torchgpipe.engine.microbatches import Chunk
from torchgpipe.engine.partition import Engine, Partition, part_contexts
from torchgpipe.engine.shared import SharedTensors
from torchgpipe.engine.streams import AbstractStream, CPUStream, current_stream, no_context
from torchgpipe.schedule.schedule import Action
from torchgpipe.skip.transfer import Key, Skip, changed_in_place, keep, take

# Aliasing: changes in place of tensors with a common memory.


class _Before(NamedTuple):
    """The input of a cell, before it runs.

    Args:
        aliased: The skips in whose memory other tensors lie.
        watched: Tensors that the cell may not change, their versions, and the error if it does.
    """

    batch: list[Tensor]
    common: list[Tensor]
    aliased: dict[Key, Tensor]
    watched: list[tuple[Sequence[Tensor], list[int], str]]


class Aliasing:
    """Tensors with a common memory in the micro-batches of one forward pass."""

    def __init__(
        self, batches: Sequence[Chunk], common: Sequence[int], transformed: bool = False
    ) -> None:
        self._several = len(batches) > 1
        #: Whether to check outputs. Tensors of a ``torch.func`` transform do not have a memory.
        self._follows = self._several and not transformed
        #: The tensors that all micro-batches share. A change of a view changes them.
        self._shared = [batches[0].tensors[k] for k in common]
        #: By micro-batch, its tensors that are shared, or copies of shared ones.
        self._common = (
            {i: [batch.tensors[k] for k in common] for i, batch in enumerate(batches)}
            if common
            else {}
        )
        #: By micro-batch, the skips that are such tensors.
        self._common_skips: defaultdict[int, set[Key]] = defaultdict(set)
        #: By micro-batch, the tensors that shared a memory before a boundary.
        self._once_shared: dict[int, list[Tensor]] = {}
        #: By micro-batch, the skips in whose memory the batch lies, or lay before a copy.
        self._with_batch: defaultdict[int, set[Key]] = defaultdict(set)
        #: By micro-batch and skip, the other skips in whose memory it lies.
        self._with_skips: defaultdict[int, dict[Key, set[Key]]] = defaultdict(dict)
        #: By partition and place in memory, the storage and version of an output.
        self._handed_on: defaultdict[int, dict[Any, tuple[Any, int]]] = defaultdict(dict)
        #: The micro-batches with tensors to follow, even in cells without skips.
        self.watched = {*self._common}

    def common(self, i: int) -> list[Tensor]:
        """Return the tensors of a micro-batch that all micro-batches share, or copies of them."""
        return self._common.get(i, [])

    def cross(
        self, i: int, tensors: list[Tensor], copy: Callable[[list[Tensor]], list[Tensor]]
    ) -> list[Tensor]:
        """Copy tensors over a boundary between partitions, and follow those that share memory."""
        common = self.common(i)
        where = [k for k, x in enumerate(tensors) if is_among(x, common)] if common else []
        shares = i in self._once_shared or (
            len(tensors) > 1
            and any(share_memory([x], tensors[k + 1 :]) for k, x in enumerate(tensors))
        )
        copied = copy(tensors)
        if self._shared:
            self._common[i] = [copied[k] for k in where]
        if shares:
            self._once_shared[i] = [*copied]  # The cell takes skips out of that list.
            self.watched.add(i)
        return copied

    def leave(self, i: int, tensors: Sequence[Tensor]) -> list[bool]:
        """Return for each tensor that a cell passes on whether another one shares its memory.

        A memory that was shared before a boundary counts as well.
        """
        if len(tensors) == 1 and i not in self.watched:
            return [False]
        before = self._once_shared.get(i, [])
        return [
            bool(self._with_batch[i])
            or share_memory([x], [*before, *tensors[:k], *tensors[k + 1 :]])
            for k, x in enumerate(tensors)
        ]

    def is_common(self, i: int, x: Tensor) -> bool:
        """Return whether all micro-batches share a tensor, or it is a copy of such a tensor."""
        return bool(self._shared) and is_among(x, self.common(i))

    def arrive(self, i: int, aliased: list[Tensor], common: list[Tensor], skips: set[Key]) -> None:
        """Record tensors that come from another process.

        Args:
            aliased: The tensors for which :meth:`leave` returned ``True`` in that process.
        """
        if aliased:
            self._once_shared[i] = [*self._once_shared.get(i, []), *aliased]
        if common:
            self._common[i] = common
            self._shared = self._shared or common
        self._common_skips[i] |= skips
        if aliased or common:
            self.watched.add(i)

    def before(self, i: int, j: int, cell: Cell, tensors: list[Tensor]) -> '_Before':
        """Record the input of a cell in partition ``j``."""
        number = len(tensors) - len(cell.popped)
        batch = tensors[:number]
        common_skips = self._common_skips[i]
        with_others = self._with_batch[i] | self._with_skips[i].keys()
        common = self.common(i)
        aliased = {}
        # Other skips are not kept, because they live no longer than the layers need them.
        for key, x in zip(cell.popped, tensors[number:]):
            if key in common_skips:
                common = [*common, x]
            if key in with_others:
                aliased[key] = x
        return _Before(
            batch,
            common,
            aliased,
            [
                (watched, versions(watched), error)
                for watched, error in self._watched(i, j, batch, common, aliased)
                if watched
            ],
        )

    def after(
        self, i: int, partition: Partition, cell: Cell, before: '_Before', output: Sequence[Tensor]
    ) -> None:
        """Check whether a cell changed watched tensors, and record its output.

        Raises:
            RuntimeError: The cell changed a tensor that is also used elsewhere.
        """
        batch, common, aliased, watched = before
        for tensors, version, error in watched:
            if versions(tensors) != version:
                raise RuntimeError(error)
        number = len(output) - len(cell.stashed)
        given = output[:number]
        stashed = dict(zip(cell.stashed, output[number:]))
        if self._shared:
            self._common[i] = [y for y in given if is_among(y, common)]
            self._common_skips[i] |= {key for key, x in stashed.items() if is_among(x, common)}
        if not share_memory(self._once_shared.get(i, []), given):
            self._once_shared.pop(i, None)
        self._follow_skips(
            i, batch, given, {key for _, key in partition.incoming}, aliased, stashed
        )
        self.hand_on(partition.j, output)

    def hand_on(self, j: int, tensors: Iterable[Tensor]) -> None:
        """Raise if a partition modified a tensor after passing it on in another micro-batch.

        Raises:
            RuntimeError: It did, such as by returning a buffer that it changes in place.
        """
        handed_on = self._handed_on[j]
        for x in tensors if self._follows else ():
            # Other tensors do not have their own memory, or no versions.
            if (
                type(x) not in (Tensor, nn.Parameter)
                or x.layout is not torch.strided
                or x.is_inference()
            ):
                continue
            storage = x.untyped_storage()
            now = x._version
            place = id(storage), x.storage_offset()
            # Another memory may have the same `id` after this one is freed.
            found, version = handed_on.get(place, (_gone, now))
            if version != now and found() is storage:
                raise RuntimeError(
                    f'partition {j} hands on a tensor that was changed in place since it did so '
                    'for another micro-batch, such as a buffer: the next partition may see the '
                    'change of a later one. Let the layer return a copy: tensor.clone().'
                )
            handed_on[place] = weakref.ref(storage), now

    def _watched(
        self,
        i: int,
        j: int,
        batch: Sequence[Tensor],
        common: list[Tensor],
        aliased: dict[Key, Tensor],
    ) -> Iterator[tuple[Sequence[Tensor], str]]:
        """Yield tensors that partition ``j`` may not change, and the error message if it does."""
        if self._shared and self._several:
            yield (
                [*self._shared, *common],
                (
                    f'partition {j} changed a tensor in place that all micro-batches share (a '
                    'scalar, or in NoChunk). Without a pipeline it would change once. Use an '
                    'operation that is not in place.'
                ),
            )
        yield (
            self._once_shared.get(i, []),
            (
                f'a tensor of the input of partition {j} was changed in place, and another one '
                'lay in its memory before both came from the partition before. Without a '
                'pipeline, both would change. Use an operation that is not in place, or let the '
                'partition before return a copy: tensor.clone().'
            ),
        )
        if self._with_batch[i]:
            names = ', '.join(sorted(f"'{name}'" for _, name in self._with_batch[i]))
            yield (
                batch,
                changed_in_place(
                    f'the input of partition {j}, which is also the skip tensor {names},'
                ),
            )
        for key, tensor in aliased.items():
            yield (
                [tensor],
                changed_in_place(
                    f"the skip tensor '{key[1]}', whose memory is also that of the batch or of "
                    'another skip,'
                ),
            )

    def _follow_skips(
        self,
        i: int,
        batch: Sequence[Tensor],
        output: Sequence[Tensor],
        popped: set[Key],
        aliased: dict[Key, Tensor],
        stashed: dict[Key, Tensor],
    ) -> None:
        """Record the skips that share memory with the output of a cell or with other skips."""
        with_batch = self._with_batch[i]
        with_skips = self._with_skips[i]
        with_batch -= popped if share_memory(batch, output) else {*with_batch}
        for key, x in aliased.items():
            if share_memory([x], output):
                with_batch |= with_skips.get(key, set())
                self.watched.add(i)
        for key, x in stashed.items():
            if share_memory([x], output):
                with_batch.add(key)
                self.watched.add(i)
            others = {
                other for other, y in stashed.items() if other != key and share_memory([x], [y])
            }
            if others:
                with_skips[key] = others


def _gone() -> None:
    """Return ``None``, as a dead weak reference does."""


# The run: cells of all micro-batches in all partitions.

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
