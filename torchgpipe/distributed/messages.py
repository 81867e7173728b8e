"""Messages between ranks: tensors, and the metadata that a receiver needs in advance.

A receive needs memory of the right size. So the first time, a message carries a header, and its
receiver waits for that at the receive in its row. Later, both ranks know the header::

    first step      sender    header, tensors ──▶  receiver   waits for the header, then receives
    later ones      sender    tensors ─────────▶  receiver   receives at once, waits at the use

A header is reused in equal steps only. These have the same number and sizes of micro-batches, the
same modes of the layers, and the same further facts that ranks exchange before a step. A value
with plain numbers in it has a header each time, because these may change.

A tensor belongs to its message until the send has ended, so it must not be written to. The
receiver owns the tensors that it receives.
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


#: How many messages to one rank may be in flight at a time.
AHEAD = 4


class Outline(NamedTuple):
    """The metadata of a tensor that has not arrived yet.

    Args:
        k: The number of the tensor among the outputs of its cell.
        shape: Its shape.
        dtype: Its type.
        order: Its dimensions, from the largest stride to the smallest.
        requires_grad: Whether it requires grad.
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


class Header(NamedTuple):
    """The metadata of the tensors in a message.

    Args:
        outlines: The outlines of the tensors.
        size: How many of the tensors, from the first one, are the batch; 0 if the message
            carries no batch.
        kind: Assembles the batch; ``None`` if it is a single tensor.
        skips: For each skip in the message, the number of its tensor, or ``None``.
        varies: Whether the header may differ each time.
    """

    outlines: tuple[Outline, ...]
    size: int = 0
    kind: Kind | None = None
    skips: tuple[int | None, ...] = ()
    varies: bool = False


def outline(k: int, x: Tensor, aliased: bool = False, common: bool = False) -> Outline:
    """Return the outline of a tensor.

    Raises:
        TypeError: It is sparse, nested, or of a subclass.
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
        group: The ranks of the pipeline; ``None`` if there is only one.
        ranks: The rank of each stage, among all processes.
        device: The device for received tensors.
        known: The headers of earlier equal steps, by message; new headers are added to it.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int], device: torch.device,
                 known: dict[Message, Header]) -> None:
        self._group = group
        self._ranks = ranks
        self._device = device
        self._known = known
        #: By rank, the sends in flight to it: for each message, its tensors.
        self._sent: defaultdict[int, deque[list[tuple[Any, Tensor]]]] = defaultdict(deque)
        self._received: dict[Message, tuple[Header, list[Tensor], list[Any]]] = {}

    def send(self, message: Message, header: Header, tensors: Sequence[Tensor]) -> None:
        """Send a message.

        Raises:
            RuntimeError: The header differs from earlier steps.
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
        """Start to receive a message."""
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
        """Wait for a message, and return its header and tensors."""
        header, tensors, works = self._received.pop(message)
        for work in works:
            work.wait()
        return header, [x.permute(_inverse(each.order))
                        for x, each in zip(tensors, header.outlines)]

    def finish(self) -> None:
        """Wait until all sends have ended."""
        for sent in self._sent.values():
            while sent:
                _see_through(sent.popleft())

    def _make_room(self, sent: 'deque[list[tuple[Any, Tensor]]]') -> None:
        """Release messages whose sends have ended, and wait for early sends on the CPU.

        Gloo reports the end of a send only to a thread that waits for it. A send ends without
        further actions of this rank, because its place in the row allows it to wait.
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
