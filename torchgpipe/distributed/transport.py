"""Transport between ranks: messages with metadata, and the cells of this rank's stages.

A receive needs memory of the right size. So the first time, a message carries a header, and its
receiver waits for that at the receive in its row. Later, both ranks know the header::

    first step      sender    header, tensors ──▶  receiver   waits for the header, then receives
    later ones      sender    tensors ─────────▶  receiver   receives at once, waits at the use

If all headers are known, each receive starts before the action that comes before it in the row. So
the message is on its way while the action runs. Nothing waits behind such a receive, because the
messages from one rank to another one have a process group of their own.

A header is reused in equal steps only. These have the same number and sizes of micro-batches, the
same modes of the layers, and the same further facts that ranks exchange before a step. A value
with plain numbers in it has a header each time, because these may change.

A tensor belongs to its message until the send has ended, so it must not be written to. The
receiver owns the tensors that it receives.

Stages on one rank pass on tensors as in one process. Tensors of other ranks are put in the same
places, from messages, before a cell begins::

    forward     Receive ──▶ batch, skips ──▶ cell ──▶ batch, skips ──▶ Send
    backward    Receive ──▶ gradients ─────▶ cell ──▶ gradients ─────▶ Send

So cells, order, aliases and errors are the same as in :mod:`torchgpipe.engine`. A rank knows all
stages, but has layers only in its own ones.
"""

import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from torchgpipe.base.devices import is_cpu
from torchgpipe.base.private import is_profiled, tree_leaves, versions
from torchgpipe.base.structure import Gradients, Kind, bare, is_plain, leaves_of
from torchgpipe.distributed.replicas import Replicas
from torchgpipe.engine.backward_order import graph_leaves
from torchgpipe.engine.cell import Cell
from torchgpipe.engine.checkpoint.recomputation import Recomputation
from torchgpipe.engine.checkpoint.swaps import substituted
from torchgpipe.engine.gradients import Leaves
from torchgpipe.engine.microbatches import Chunk
from torchgpipe.engine.partition import Engine, all_modules
from torchgpipe.engine.run import Run
from torchgpipe.engine.scheduled import Loss, Step
from torchgpipe.schedule import Action
from torchgpipe.schedule.messages import (
    AHEAD,
    Item,
    Message,
    Receive,
    Row,
    Send,
    UnitAction,
    last_backwards,
)
from torchgpipe.skip.transfer import Skip


class Outline(NamedTuple):
    """The metadata of a tensor that has not arrived yet.

    Args:
        k: The number of the tensor among the outputs of its cell.
        order: Its dimensions, from the largest stride to the smallest.
        aliased: Whether it shares memory with another tensor on the sender.
        common: Whether all micro-batches share it.
    """

    k: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    requires_grad: bool
    aliased: bool = False
    common: bool = False

    @property
    def is_contiguous(self) -> bool:
        """Whether the dimensions have their usual order in memory."""
        return self.order == (0, 1, 2, 3, 4, 5, 6, 7)[: len(self.order)]

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape in the order of memory, in which the tensor is sent."""
        if self.is_contiguous:
            return self.shape
        return tuple([self.shape[dim] for dim in self.order])

    def zeros(self, device: torch.device) -> Tensor:
        """Return a tensor of zeros in place of one that there is not."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


class Header(NamedTuple):
    """The metadata of the tensors in a message.

    Args:
        size: How many of the tensors, from the first one, are the batch; 0 if the message
            carries no batch.
        kind: Assembles the batch; ``None`` if it is a single tensor.
        skips: For each skip in the message, the number of its tensor, or ``None``.
        skip_kinds: The kinds of skips with attributes, by the number of their tensors.
        varies: Whether the header may differ each time.
    """

    outlines: tuple[Outline, ...]
    size: int = 0
    kind: Kind | None = None
    skips: tuple[int | None, ...] = ()
    skip_kinds: tuple[tuple[int, Kind], ...] = ()
    varies: bool = False


def outline_of(k: int, x: Tensor, aliased: bool = False, common: bool = False) -> Outline:
    """Return the outline of a tensor.

    Raises:
        TypeError: It is sparse, nested, or of a subclass.
    """
    if not is_plain(x) or x.is_nested:
        raise TypeError(
            f'a stage gave a {type(x).__name__} ({x.layout}) to a stage on another rank, but only '
            'plain dense tensors travel between ranks; make it one in the last layer of that '
            'stage, and what it was in the first layer of the next'
        )
    order = tuple(range(x.dim()))
    if not x.is_contiguous():  # A dimension of size 1 may have any stride.
        strides = x.stride()
        order = tuple(sorted(order, key=lambda dim: -strides[dim]))
    return Outline(k, tuple(x.shape), x.dtype, order, x.requires_grad, aliased, common)


def completed(x: Tensor) -> Tensor:
    """Return the plain tensor of a split layer's output, whose collective may be in flight."""
    wait: Callable[[], Tensor] | None = getattr(x, 'trigger_wait', None)
    return x if wait is None else wait()


class Messages:
    """The messages of one rank in one step.

    Args:
        headers: The headers of earlier equal steps, by message; new headers are added to it.
    """

    def __init__(
        self,
        groups: Mapping[tuple[int, int], dist.ProcessGroup],
        ranks: Sequence[int],
        device: torch.device,
        headers: dict[Message, Header],
    ) -> None:
        self._groups = groups
        #: The rank of each stage, among all processes.
        self._ranks = ranks
        self._device = device
        # Once in a step, not for each message. The number is this rank's among all processes.
        self._is_on_cpu = is_cpu(device)
        self._number = dist.get_rank()
        self._headers = headers
        #: By rank, the sends in flight to it: for each message, its tensors.
        self._sent: defaultdict[int, deque[list[tuple[Any, Tensor]]]] = defaultdict(deque)
        self._received: dict[Message, tuple[Header, list[Tensor], list[Any]]] = {}

    def send(self, message: Message, header: Header, tensors: Sequence[Tensor]) -> None:
        """Send a message.

        Raises:
            RuntimeError: The header differs from earlier steps.
        """
        rank = self._ranks[message.stage]
        expected = self._headers.get(message)
        self._make_room(self._sent[rank])
        self._sent[rank].append([])
        if expected is None or expected.varies:
            self._headers[message] = header
            data = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8)
            self._put(torch.tensor([len(data)]).to(self._device), rank)
            self._put(data.to(self._device), rank)
        elif message.action.kind != 'F' and not header.outlines:
            # A micro-batch with nothing to learn has no gradients: they are zero.
            tensors = []
            for outline in expected.outlines:
                tensors.append(outline.zeros(self._device))
            header = expected
        elif expected != header:
            raise RuntimeError(_other(message, expected, header))
        for x, outline in zip(tensors, header.outlines):
            if x.numel():
                x = x.detach().resolve_conj().resolve_neg()
                x = x if outline.is_contiguous else x.permute(outline.order)
                self._put(x.contiguous().view(-1).view(torch.uint8), rank)

    def receive(self, message: Message) -> None:
        """Start to receive a message."""
        rank = self._ranks[message.action.stage]
        header = self._headers.get(message)
        if header is None or header.varies:
            size = torch.zeros(1, dtype=torch.long, device=self._device)
            self._get(size, rank).wait()
            data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
            self._get(data, rank).wait()
            header = self._headers[message] = pickle.loads(data.cpu().numpy().tobytes())
        tensors = []
        works = []
        for outline in header.outlines:
            x = torch.empty(outline.stored, dtype=outline.dtype, device=self._device)
            tensors.append(x)
            if x.numel():
                works.append(self._get(x.view(-1).view(torch.uint8), rank))
        self._received[message] = header, tensors, works

    def wait(self, message: Message) -> tuple[Header, list[Tensor]]:
        """Wait for a message, and return its header and tensors."""
        header, tensors, works = self._received.pop(message)
        for work in works:
            work.wait()
        for k, outline in enumerate(header.outlines):
            if not outline.is_contiguous:
                tensors[k] = tensors[k].permute(_inverse(outline.order))
        return header, tensors

    def knows(self, row: Row) -> bool:
        """Return whether the headers of all messages that a row receives are known."""
        for item in row:
            if isinstance(item, Receive):
                header = self._headers.get(item)
                if header is None or header.varies:
                    return False
        return True

    def finish(self) -> None:
        """Wait until all sends have ended."""
        for sent in self._sent.values():
            while sent:
                _wait_for(sent.popleft())

    def _make_room(self, sent: 'deque[list[tuple[Any, Tensor]]]') -> None:
        """Release messages whose sends have ended, and wait for early sends on the CPU.

        Gloo reports the end of a send only to a thread that waits for it. A send ends without
        further actions of this rank, because its place in the row allows it to wait.
        """
        while sent:
            has_ended = all(work.is_completed() for work, _ in sent[0])
            is_full = self._is_on_cpu and len(sent) >= AHEAD
            if not has_ended and not is_full:
                return
            _wait_for(sent.popleft())

    def _put(self, x: Tensor, rank: int) -> None:
        group = self._groups[self._number, rank]
        self._sent[rank][-1].append((dist.isend(x, rank, group), x))

    def _get(self, x: Tensor, rank: int) -> Any:
        return dist.irecv(x, rank, self._groups[rank, self._number])


def _wait_for(message: list[tuple[Any, Tensor]]) -> None:
    for work, _ in message:
        work.wait()


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _other(message: Message, expected: Header, header: Header) -> str:
    return (
        f'what stage {message.action.stage} sends to stage {message.stage} for micro-batch '
        f'{message.action.micro_batch} is {_text(header)}, but in an earlier step with equal '
        f'inputs it was {_text(expected)}; the other rank has made room for that. Shapes that '
        'depend on values cannot cross to another rank: let layers pad to a size that the '
        'input decides, or put both layers into one stage'
    )


def _text(header: Header) -> str:
    tensors = []
    for outline in header.outlines:
        grad = ' with grad' if outline.requires_grad else ''
        tensors.append(f'{outline.dtype} {outline.shape}{grad}')
    text = f'({", ".join(tensors) or "nothing"})'
    if header.kind is None:
        return text
    places: Any = [None] * header.size
    return f'{text} in {header.kind(places)!r}'


class Way(NamedTuple):
    """The path of a rank through a step."""

    row: Row
    messages: Messages
    at: Callable[[Item | None], None]
    replicas: Replicas


def drive(row: Row, do: Callable[[Any], None]) -> None:
    """Run the actions and messages in the row of a rank in their order."""
    for item in row:
        if is_profiled():
            with record_function(f'{type(item).__name__} {item}'):
                do(item)
        else:
            do(item)


def _cell_of(action: Action, stage: int) -> tuple[int, bool, int]:
    """Return the cell of a stage that needs the result of an action: in forward, or backward."""
    return stage, action.kind == 'F', action.micro_batch


class _OnRanks(Run):
    """A run in which other ranks have some of the stages."""

    def __init__(
        self, engine: Engine, batches: list[Chunk], way: Way, *args: Any, **options: Any
    ) -> None:
        super().__init__(engine, batches, *args, **options)
        self._way = way
        #: By micro-batch and stage, whether each output shares memory with another tensor.
        self._aliased: dict[tuple[int, int], list[bool]] = {}
        #: By cell, the messages that it waits for.
        self._waiting: dict[tuple[int, bool, int], list[Message]] = {}

    def _run_cells(self) -> None:
        drive(self._way.row, self._do)
        self._way.messages.finish()
        self._way.at(None)

    def _do(self, item: Any) -> None:
        """Run one item in the row of this rank."""
        self._way.at(item)
        if isinstance(item, Receive):
            cell = _cell_of(item.action, item.stage)
            self._waiting.setdefault(cell, []).append(item)
            self._way.messages.receive(item)
        elif isinstance(item, Send):
            self._leave(item)
        elif isinstance(item, UnitAction):
            self._act_on_unit(item)
        else:
            if item.kind in 'FBI':
                for message in self._waiting.pop(_cell_of(item, item.stage), ()):
                    self._arrive(message)
            if self._way.replicas.units:
                self._enter(item.stage)
            observer = self._engine.observer
            if observer is None:
                self._act(item)
            else:
                observer.act(self._act, item)

    def _enter(self, j: int) -> None:
        """Wait for the parameters of the layers of a stage."""
        self._way.replicas.enter(j)

    def _act_on_unit(self, action: UnitAction) -> None:
        """Gather or free the parameters of a unit."""
        self._way.replicas.act(action)

    def _leave(self, message: Message) -> None:
        """Send the result of an action to another stage."""
        self._way.messages.send(message, *self._forward(message))

    def _forward(self, message: Message) -> tuple[Header, list[Tensor]]:
        """Return the batch and the skips that a cell has for another stage."""
        j, _, i = message.action
        next_j = message.stage
        batch = self._batches[i]
        waiting = self._skips[i]
        tensors: list[Tensor] = [*batch.tensors] if next_j == j + 1 else []
        indices = [*range(len(tensors))]
        size = len(tensors)
        skips: list[int | None] = []
        skip_kinds: list[tuple[int, Kind]] = []
        for key in self._keys(j, next_j):
            skip = waiting.pop(key)
            skips.append(None if skip.tensor is None else len(tensors))
            if skip.tensor is not None:
                if skip.kind is not bare:
                    skip_kinds.append((len(tensors), skip.kind))
                tensors.append(skip.tensor)
                indices.append(skip.k)
        kind = None
        varies = bool(skip_kinds)
        if size:
            kind = None if batch.kind is bare else batch.kind
            varies |= kind is not None and _has_numbers(batch.value)
            self._batches[i] = Chunk((), tuple)  # The batch can be freed when it is sent.
        aliased = self._aliased[i, j]
        outlines = []
        for position, (k, x) in enumerate(zip(indices, tensors)):
            tensors[position] = complete = completed(x)
            outline = outline_of(k, complete, aliased[k], self.aliasing.is_common(i, x))
            outlines.append(outline._replace(requires_grad=x.requires_grad))
        header = Header(tuple(outlines), size, kind, tuple(skips), tuple(skip_kinds), varies)
        return header, tensors

    def _arrive(self, message: Message) -> Header:
        """Put the result of another stage where a cell finds it."""
        header, tensors = self._way.messages.wait(message)
        prev_j, _, i = message.action
        j = message.stage
        aliased = []
        common = []
        for x, outline in zip(tensors, header.outlines):
            x.requires_grad_(outline.requires_grad)
            if outline.aliased:
                aliased.append(x)
            if outline.common:
                common.append(x)
        if header.size:
            kind = bare if header.kind is None else header.kind
            self._batches[i] = Chunk(tuple(tensors[: header.size]), kind)

        common_keys = set()
        kinds = dict(header.skip_kinds)
        for key, k in zip(self._keys(prev_j, j), header.skips):
            skip = Skip(None)
            if k is not None:
                outline = header.outlines[k]
                (version,) = versions([tensors[k]])
                skip = Skip(tensors[k], version, prev_j, outline.k, kinds.get(k, bare))
                if outline.common:
                    common_keys.add(key)
            self._skips[i][key] = skip
        self.aliasing.arrive(i, aliased, common, common_keys)
        return header

    def _keep_output(self, i: int, j: int, cell: Cell, output: Sequence[Tensor]) -> None:
        self._aliased[i, j] = self.aliasing.leave(i, output)
        super()._keep_output(i, j, cell, output)

    def _keys(self, j: int, next_j: int) -> list[Any]:
        """Return the keys of the skips that go from one stage to another."""
        return [key for stage, key in self._engine.partitions[j].outgoing if stage == next_j]


class Training(_OnRanks, Step):
    """This rank's part of the forward and backward of a mini-batch.

    Args:
        engine: The engine with all stages; stages of other ranks have no layers.
        batches: The micro-batches; empty ones on ranks without the first stage.
    """

    def __init__(
        self,
        engine: Engine,
        batches: list[Chunk],
        way: Way,
        loss: Loss,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        actions = tuple([item for item in way.row if isinstance(item, Action)])
        super().__init__(engine, batches, way, (actions,), loss, **options)
        self._leaves = Leaves(dtype)
        #: The backwards within which gradients are reduced, each with its unit.
        self._reducing: dict[Action, int] = {}
        if way.replicas.reduces_within_backward:
            self._reducing = last_backwards(way.row, way.replicas.groups)
        #: The stages of units that have leaves in place of their parameters.
        self._ready: set[int] = set()
        #: Whether to find tensors that get gradients besides the leaves; and these, by ``id``.
        self.finds_learning = False
        self.learning: dict[int, tuple[Tensor, str]] = {}
        #: Micro-batch and both stages of each message with a tensor that requires grad.
        self._learning: set[tuple[int, int, int]] = set()
        #: Pairs of a tensor and its gradient. Other ranks may have parts of the gradient.
        self.gradients: Gradients = []
        # `Step.run` ends with this. Here it collects gradients, which replicas reduce before they
        # are given to ``.grad``.
        self._give = self.gradients.extend  # type: ignore[assignment]

    def _run_cells(self) -> None:
        replicas = self._way.replicas
        partitions = [self._engine.partitions[j] for j in replicas.stages]
        swaps = []
        if not replicas.units:
            swaps = self._make_leaves(partitions)
        try:
            with substituted(swaps):
                super()._run_cells()
        finally:
            for partition in partitions:
                self._leaves.put_back(all_modules(partition.layers))

    def _enter(self, j: int) -> None:
        super()._enter(j)
        # Once, although a unit may be freed meanwhile: FSDP gathers again into the same tensors.
        if j not in self._ready:
            self._ready.add(j)
            self._make_leaves(self._engine.partitions[j : j + 1], by_action=True)

    def _act(self, action: Action) -> None:
        unit = self._reducing.get(action)
        if unit is None:
            super()._act(action)
            return
        replicas = self._way.replicas
        handles = replicas.begin_arrivals(unit, self._leaves.watch, self._leaves.take)
        try:
            super()._act(action)
        finally:
            # A layer of another stage may use a parameter later, when its bucket was reduced.
            for handle in handles:
                handle.remove()

    def _act_on_unit(self, action: UnitAction) -> None:
        if action.kind == 'REDUCE_GRAD':
            replicas = self._way.replicas
            gradients = self._leaves.take(replicas.tensors_of_unit(action.stage))
            self.gradients += replicas.reduce(action.stage, gradients)
        else:
            super()._act_on_unit(action)

    def _send(
        self, i: int, j: int, cell: Cell, output: list[Tensor], recomputation: Recomputation | None
    ) -> None:
        super()._send(i, j, cell, output, recomputation)
        if self.finds_learning:
            self._find_learning(i, j)

    def _find_learning(self, i: int, j: int) -> None:
        """Find the tensors at which the graph of a cell ends, except its leaves."""
        graph = self._graphs[i, j]
        leaves = self._leaves.numbers | {id(x) for _, _, x in graph.leaves}
        nodes = [edge.node for _, edge in graph.roots]
        where = f'stage {j}'
        if j == len(self._runs) - 1:
            where += ' or loss_fn'
            # A loss that depends on no parameter is a leaf itself.
            nodes = [node for node in nodes if not hasattr(node, 'variable')]
        for x in graph_leaves(nodes):
            if id(x) not in leaves:
                self.learning[id(x)] = x, where

    def _leave(self, message: Message) -> None:
        (j, kind, i), prev_j = message
        if kind == 'F':
            super()._leave(message)
            return
        grads = self._grads.pop((i, prev_j), {})
        # A micro-batch without gradients may have some the next time.
        varies = not grads and (i, prev_j, j) in self._learning
        outlines = tuple([outline_of(k, x) for k, x in grads.items()])
        self._way.messages.send(message, Header(outlines, varies=varies), [*grads.values()])

    def _arrive(self, message: Message) -> Header:
        (prev_j, kind, i), j = message
        if kind == 'F':
            header = super()._arrive(message)
            if any(outline.requires_grad for outline in header.outlines):
                self._learning.add((i, prev_j, j))
        else:
            header, grads = self._way.messages.wait(message)
            by_output = self._grads.setdefault((i, j), {})
            for outline, grad in zip(header.outlines, grads):
                by_output[outline.k] = grad
        return header


class Evaluation(_OnRanks):
    """This rank's part of the forward of a mini-batch, without graphs."""

    def _act(self, action: Action) -> None:
        self._run_cell(action.micro_batch, action.stage)

    def _bring(self, i: int, j: int, popped: Sequence[Skip]) -> list[Tensor]:
        tensors = [*self._batches[i].tensors]
        for skip in popped:
            if skip.tensor is not None:
                tensors.append(skip.tensor)
        return tensors

    def _send(
        self, i: int, j: int, cell: Cell, output: list[Tensor], recomputation: Recomputation | None
    ) -> None:
        self._keep_output(i, j, cell, output)


def _has_numbers(value: Any) -> bool:
    """Return whether a value has numbers in it, which may change the next time.

    They may also be in attributes of its tensors.
    """
    for leaf in leaves_of(value):
        plain = [leaf.value]
        if type(leaf.value) is Tensor:
            plain = tree_leaves(leaf.value.__dict__)
        if any(isinstance(x, Number) and not isinstance(x, bool) for x in plain):
            return True
    return False
