"""Messages between ranks: tensors, and the metadata that a receiver needs in advance.

A receive takes memory of the right size. So the first time a message carries a header, for which
its receiver waits where the receive stands in its row; from then on both know it::

    first step      sender    header, tensors ──▶  receiver   waits for the header, then receives
    later ones      sender    tensors ─────────▶  receiver   receives at once, waits at the use

What was known is known for equal steps only: as many micro-batches of equal sizes, the same modes
of the layers, and whatever else the ranks have told each other before a step. A value with plain
numbers in it, which may be others each time, has a header each time.

Who owns what: a tensor is its message's until the send has ended; so nobody may write to it. What
arrives is the receiver's own.
"""
import pickle
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchgpipe.base.devices import is_cpu
from torchgpipe.base.structure import Kind
from torchgpipe.schedule.lowering import Message

__all__ = ['Header', 'Messages', 'Outline', 'outline']


#: So many messages to one rank may be on their way at a time.
AHEAD = 4


class Outline(NamedTuple):
    """What is known of a tensor that is not there yet.

    Args:
        k: Which of the tensors it is that its cell gave.
        shape: Its shape.
        dtype: Its type.
        order: Its dimensions, that of the largest stride first.
        requires_grad: Whether it does.
        aliased: Whether something else lies in its memory, where it comes from.
        common: Whether all micro-batches share it.
    """

    k: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    requires_grad: bool
    aliased: bool = False
    common: bool = False


class Header(NamedTuple):
    """What comes along with tensors.

    Args:
        outlines: Those of the tensors.
        size: How many of them, the first ones, are the batch; none if it goes elsewhere.
        kind: Puts the batch together; ``None`` if it is a tensor itself.
        skips: For each skip that goes the same way, the number of its tensor, or ``None``.
        varies: Whether it may be another one each time.
    """

    outlines: tuple[Outline, ...]
    size: int = 0
    kind: Kind | None = None
    skips: tuple[int | None, ...] = ()
    varies: bool = False


def outline(k: int, x: Tensor, aliased: bool = False, common: bool = False) -> Outline:
    """Return the outline of a tensor.

    Raises:
        TypeError: It is sparse, nested, or of a class of its own.
    """
    if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided or x.is_nested:
        raise TypeError(
            f'a stage gave a {type(x).__name__} ({x.layout}) to a stage on another rank, but only '
            'plain dense tensors travel between ranks; make it one in the last layer of that '
            'stage, and what it was in the first layer of the next')
    strides = x.stride()
    order = tuple(sorted(range(x.dim()), key=lambda dim: -strides[dim]))
    return Outline(k, tuple(x.shape), x.dtype, order, x.requires_grad, aliased, common)


class Messages:
    """The messages of one rank in one step.

    Args:
        group: The ranks of the pipeline; ``None`` if there is one only.
        ranks: The rank of each stage, among all processes.
        device: Where tensors arrive.
        known: The headers of earlier steps like this one, by message; those of this one are added.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int], device: torch.device,
                 known: dict[Message, Header]) -> None:
        self._group = group
        self._ranks = ranks
        self._device = device
        self._known = known
        #: By rank, what is on its way there: of each message, its tensors.
        self._sent: defaultdict[int, deque[list[tuple[Any, Tensor]]]] = defaultdict(deque)
        self._received: dict[Message, tuple[Header, list[Tensor], list[Any]]] = {}

    def send(self, message: Message, header: Header, tensors: Sequence[Tensor]) -> None:
        """Let a message leave.

        Raises:
            RuntimeError: It is not like that of earlier steps.
        """
        rank, known = self._ranks[message.stage], self._known.get(message)
        self._make_room(self._sent[rank])
        self._sent[rank].append([])
        if known is None or known.varies:
            self._known[message] = header
            data = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8)
            self._put(torch.tensor([len(data)]).to(self._device), rank)
            self._put(data.to(self._device), rank)
        elif message.action.kind != 'F' and not header.outlines:
            # A micro-batch with nothing to learn has no gradients: they are zero.
            tensors = [torch.zeros(each.shape, dtype=each.dtype, device=self._device)
                       for each in known.outlines]
            header = known
        elif known != header:
            raise RuntimeError(_other(message, known, header))
        for x, each in zip(tensors, header.outlines):
            if x.numel():
                x = x.detach().resolve_conj().resolve_neg().permute(each.order).contiguous()
                self._put(x.view(-1).view(torch.uint8), rank)

    def receive(self, message: Message) -> None:
        """Let a message come in."""
        rank, header = self._ranks[message.action.stage], self._known.get(message)
        if header is None or header.varies:
            size = torch.zeros(1, dtype=torch.long, device=self._device)
            self._get(size, rank).wait()
            data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
            self._get(data, rank).wait()
            header = self._known[message] = pickle.loads(data.cpu().numpy().tobytes())
        tensors = [torch.empty([each.shape[dim] for dim in each.order], dtype=each.dtype,
                               device=self._device) for each in header.outlines]
        works = [self._get(x.view(-1).view(torch.uint8), rank) for x in tensors if x.numel()]
        self._received[message] = header, tensors, works

    def wait(self, message: Message) -> tuple[Header, list[Tensor]]:
        """Return what has come in."""
        header, tensors, works = self._received.pop(message)
        for work in works:
            work.wait()
        return header, [x.permute(_inverse(each.order))
                        for x, each in zip(tensors, header.outlines)]

    def finish(self) -> None:
        """Wait until all has left."""
        for sent in self._sent.values():
            while sent:
                _see_through(sent.popleft())

    def _make_room(self, sent: 'deque[list[tuple[Any, Tensor]]]') -> None:
        """Let go of what has arrived, and on the CPU wait for what was sent long ago.

        Gloo says of no send that it has ended, to whoever does not wait for it. It ends without
        anything else of this rank, as a message stands where sends may wait for their receives.
        """
        while sent and (all(work.is_completed() for work, _ in sent[0])
                        or is_cpu(self._device) and len(sent) >= AHEAD):
            _see_through(sent.popleft())

    def _put(self, x: Tensor, rank: int) -> None:
        self._sent[rank][-1].append((dist.isend(x, rank, self._group), x))

    def _get(self, x: Tensor, rank: int) -> Any:
        return dist.irecv(x, rank, self._group)


def _see_through(message: list[tuple[Any, Tensor]]) -> None:
    for work, _ in message:
        work.wait()


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _other(message: Message, known: Header, header: Header) -> str:
    return (f'what stage {message.action.stage} sends to stage {message.stage} for micro-batch '
            f'{message.action.micro_batch} is {_text(header)}, but in an earlier step with equal '
            f'inputs it was {_text(known)}; the other rank has made room for that. Shapes that '
            'depend on values cannot cross to another rank: let layers pad to a size that the '
            'input decides, or put both layers into one stage')


def _text(header: Header) -> str:
    tensors = ', '.join(f'{each.dtype} {each.shape}' + ' with grad' * each.requires_grad
                        for each in header.outlines)
    places: Any = [None] * header.size
    value = '' if header.kind is None else f' in {header.kind(places)!r}'
    return f'({tensors or "nothing"}){value}'
