"""Streams of devices, and autograd functions: copies, waits, and the order of backward.

Work on the CPU is done when the call returns. So a :data:`CPUStream` never has
anything to wait for, and every function below does nothing where it meets one.

What PyTorch has no generic form for, and the package needs, stands here too.

Some nodes have no data. ``fork`` takes a phony off a tensor, ``join`` puts it onto another one. In
backward, whatever comes before the fork waits until whatever comes after the join has been
started::

    forward    a ──Tie──▶ a'           backward    a ◀──Tie◀── a'
                    └phony┐                             ▲phony (no gradient)
               b ─────────Tie──▶ b'                b ◀──┴─Tie◀── b'

    1. The second one runs as soon as the gradient of b' is there.
    2. The first one has to wait for it, also when the gradient of a' came first.

A phony is a tensor without elements: it carries the edge, and no data.

Two more nodes have a checkpointed call run again: one that is tied to an output, so that it comes
before the gradient is there, and one behind which nothing can do without.

Others copy tensors between streams, and let one stream wait for another. Between partition ``j-1``
on device A and partition ``j`` on device B, one micro-batch travels over a copy stream on each
side, so that the compute streams go on computing::

    compute A ──Wait──▶ copy A ──Copy──▶ copy B ──Wait──▶ compute B        forward
    compute A ◀──Wait── copy A ◀──Copy── copy B ◀──Wait── compute B        backward

Who owns what: the copy is allocated on copy stream B and read on compute stream B; its source is
allocated on compute stream A and read on the copy streams. Either may lose its last reference
while the other stream still reads it, so both uses are recorded with the allocator.
"""
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from torchgpipe.base.devices import CPU, has_streams
from torchgpipe.base.structure import Value
from torchgpipe.schedule.schedule import Action

__all__ = ['AbstractStream', 'CPUStream', 'CPUStreamType', 'Checkpoint', 'Copy', 'Fork', 'Join',
           'Observer', 'Recompute', 'Tie', 'Wait', 'as_accelerator', 'as_cuda', 'copy_tensor',
           'current_stream', 'default_stream', 'find_grad', 'fork', 'get_device', 'get_phony',
           'graph_leaves', 'is_accelerator', 'is_cuda', 'join', 'new_stream', 'no_context',
           'observers', 'record_stream', 'tie', 'use_device', 'use_stream', 'wait_stream']


class CPUStreamType:
    """The type of :data:`CPUStream`. It has no behaviour of its own."""

    def __repr__(self) -> str:
        return 'CPUStream'


#: Stands where a :class:`torch.Stream` would stand if the device had streams.
CPUStream = CPUStreamType()

AbstractStream = torch.Stream | CPUStreamType

#: A context that does nothing, and takes no time to make.
no_context: AbstractContextManager[Any] = nullcontext()


def is_accelerator(stream: AbstractStream) -> bool:
    """Tell a stream of an accelerator, which need not be CUDA, from :data:`CPUStream`.

    >>> is_accelerator(CPUStream)
    False
    """
    return stream is not CPUStream


def as_accelerator(stream: AbstractStream) -> torch.Stream:
    """Narrow the type of a stream that is known to be an accelerator's."""
    return cast(torch.Stream, stream)


def new_stream(device: torch.device) -> AbstractStream:
    """Make a stream on an accelerator; :data:`CPUStream` for any other device.

    >>> new_stream(torch.device('cpu'))
    CPUStream
    """
    if device.type == 'cpu' or not has_streams(device):
        return CPUStream
    return torch.Stream(device)


def current_stream(device: torch.device) -> AbstractStream:
    """Return the calling thread's current stream on a device.

    >>> current_stream(torch.device('cpu'))
    CPUStream
    """
    if device.type == 'cpu' or not has_streams(device):
        return CPUStream
    return torch.accelerator.current_stream(device)


def default_stream(device: torch.device) -> AbstractStream:
    """Return the default stream of a device; its current one, where a backend tells no default.

    >>> default_stream(torch.device('cpu'))
    CPUStream
    """
    if device.type == 'cpu' or not has_streams(device):
        return CPUStream
    module = torch.get_device_module(device)
    find = getattr(module, 'default_stream', torch.accelerator.current_stream)
    return cast(torch.Stream, find(device))


def use_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make an accelerator current within the context; do nothing for the CPU."""
    if device.type == 'cpu' or not has_streams(device):
        return no_context
    return torch.accelerator.device_index(device.index)


def use_stream(stream: AbstractStream) -> AbstractContextManager[Any]:
    """Make a stream, and its device, current within the context; do nothing for the CPU."""
    return no_context if stream is CPUStream else _Current(as_accelerator(stream))


class _Current:
    """The context of :func:`use_stream`.

    A stream is a context of its own, but it keeps on itself what was current before, and threads
    share streams here.
    """

    __slots__ = ('_before', '_device', '_stream')

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._device = torch.accelerator.current_device_index()
        self._before = torch.accelerator.current_stream(self._stream.device)
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *error: object) -> None:
        torch.accelerator.set_stream(self._before)
        torch.accelerator.set_device_index(self._device)


def get_device(stream: AbstractStream) -> torch.device:
    """Return the device of a stream.

    >>> get_device(CPUStream)
    device(type='cpu')
    """
    return as_accelerator(stream).device if is_accelerator(stream) else CPU


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Let ``source`` wait for the work that is queued on ``target`` by now.

    The host waits only where the CPU has to wait for an accelerator's stream.

    >>> wait_stream(CPUStream, CPUStream)  # does nothing
    """
    if target is CPUStream:
        return
    if is_accelerator(source):
        as_accelerator(source).wait_stream(as_accelerator(target))
    else:
        as_accelerator(target).synchronize()


def record_stream(tensor: Tensor, stream: AbstractStream) -> None:
    """Tell the caching allocator that ``stream`` uses the tensor's memory.

    The allocator gives freed memory to the next taker on the stream that *allocated* it, without
    a look at other streams. Whoever uses a tensor on another stream must say so here. PyTorch
    records the whole storage, so a view that starts in its middle is safe too.

    >>> record_stream(torch.ones(2), CPUStream)  # does nothing
    """
    if is_accelerator(stream) and tensor.device.type == as_accelerator(stream).device.type:
        if tensor.is_conj() or tensor.is_neg():
            # Of such a view PyTorch would record a copy, and write that copy back.
            memory = tensor.untyped_storage()
            tensor = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
        tensor.record_stream(as_accelerator(stream))


#: As torchgpipe 0.0.7 spelled them.
is_cuda, as_cuda = is_accelerator, as_accelerator


class Observer(Protocol):
    """Whoever observes. It is called in the threads that do the work."""

    def cell(self, i: int, m: int, j: int, value: Value, skips: Sequence[Tensor | None]
             ) -> Callable[[Value], None]:
        """Take note that layers start, in a first pass or in a recomputation.

        Args:
            i: The micro-batch.
            m: How many there are.
            j: The partition.
            value: The input.
            skips: What comes in beside it.

        Returns:
            What to call with the output.
        """

    def act(self, run: Callable[[Action], None], action: Action) -> None:
        """Run an action of a step by a schedule."""

    def copy(self, source: AbstractStream, target: AbstractStream) -> Callable[[], None]:
        """Take note that a copy is about to be queued, and give what to call afterwards."""


#: Those who are told of copies, whichever pipeline these are for.
observers: list[Observer] = []


# Filled once per device, never emptied, read-only afterwards.
_phonies: dict[tuple[torch.device, bool], Tensor] = {}


def get_phony(device: torch.device, *, requires_grad: bool) -> Tensor:
    """Return the empty tensor of a device, always the same object for the same arguments.

    >>> import torch
    >>> get_phony(torch.device('cpu'), requires_grad=True).shape
    torch.Size([0])

    Args:
        device: Where the tensor lies.
        requires_grad: Whether an autograd function that takes it makes a node in the graph.

    Returns:
        A tensor of shape ``(0,)``. It is shared, so detach it before it becomes an output of an
        autograd function.
    """
    key = (device, requires_grad)
    phony = _phonies.get(key)
    if phony is None:
        # The caller's inference mode may not stick to a tensor that outlives the call. Its stream
        # does not: a tensor without elements has no memory that an allocator would take back.
        with torch.inference_mode(False):
            phony = torch.empty(0, device=device, requires_grad=requires_grad)
        phony = _phonies.setdefault(key, phony)
    return phony


# [Note: Identity without a view]
# The functions of this package that hand a tensor on return `tensor.detach()`. Autograd treats
# that as a new tensor, not as a view, so that the next layer may change it in place; and it shares
# its version counter with the input, so that autograd notices if such a change spoils what
# an earlier layer has saved. Returning the input itself would forbid the change; `.data` would
# hide it.


def tie(input: Tensor, *phonies: Tensor) -> tuple[Tensor, Tensor]:
    """Join a tensor with phonies, and branch another one off it, by one node.

    Args:
        input: A tensor of any shape.
        phonies: What came of other tensors beside these.

    Returns:
        The tensor, which requires grad if it or a phony does, and the phony of shape ``(0,)``.
        Without grad, nothing is added to the graph.
    """
    if torch.is_grad_enabled() and (input.requires_grad or any(
            [phony.requires_grad for phony in phonies])):
        return Tie.apply(input, *phonies)  # type: ignore[no-any-return,no-untyped-call]
    return input, get_phony(input.device, requires_grad=False)


def fork(input: Tensor) -> tuple[Tensor, Tensor]:
    """Branch a phony off a tensor.

    >>> a = torch.ones(2, requires_grad=True)
    >>> b = torch.ones(3, requires_grad=True)
    >>> a2, phony = fork(a)
    >>> b2 = join(b, phony)  # in backward, a2 comes after b2
    >>> (a2.sum() + b2.sum()).backward()
    >>> a.grad, b.grad
    (tensor([1., 1.]), tensor([1., 1., 1.]))
    """
    return tie(input)


def join(input: Tensor, phony: Tensor) -> Tensor:
    """Merge a phony into a tensor, which requires grad then if the phony does: see :func:`fork`.
    """
    return tie(input, phony)[0]


class Tie(torch.autograd.Function):
    """The autograd function behind :func:`tie`: ``Tie.apply(input, *phonies)``."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, *phonies: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.number = len(phonies)
        phony = get_phony(input.device, requires_grad=False)
        return input.detach(), phony.detach()  # [Note: Identity without a view]

    @staticmethod
    def backward(ctx: Any, grad_input: Tensor | None, grad_phony: Tensor | None
                 ) -> tuple[Tensor | None, ...]:
        return grad_input, *[None] * ctx.number


class Checkpoint(torch.autograd.Function):
    """Mark the output of a checkpointed call; in backward, see that its graph is filled.

    Takes ``(recomputation, number, *phonies, *output)`` and gives the output and a phony. It is a
    ``Tie`` as well: step 4 of the note "How checkpointing works".
    """

    @staticmethod
    def forward(ctx: Any, recomputation: Any, number: int, *tensors: Tensor
                ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.recomputation = recomputation
        ctx.number = number
        phony = get_phony(tensors[-1].device, requires_grad=False)
        # [Note: Identity without a view]
        return (*[y.detach() for y in tensors[number:]], phony.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.recomputation.recompute(ctx)
        return (None, None, *[None] * ctx.number, *grads[:-1])


class Recompute(torch.autograd.Function):
    """Run a checkpointed call again, before its gradient is there. In a step, `R` does so.

    Takes ``(phony, recomputation)`` and gives a phony: step 2 of the note "How checkpointing
    works".
    """

    @staticmethod
    def forward(ctx: Any, phony: Tensor, recomputation: Any) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.recomputation = recomputation
        return phony.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None]:
        ctx.recomputation.recompute(ctx)
        return None, None


#: As torchgpipe 0.0.7 named them.
Fork = Join = Tie


def find_grad(tensors: Sequence[Tensor]) -> int | None:
    """Return the index of the first tensor that requires grad, or ``None``.

    One on the CPU comes last: so a node that is hung on the tensor runs in backward in the same
    thread as the node that gave it beside others.
    """
    found = [k for k, x in enumerate(tensors) if x.requires_grad]
    return next((k for k in found if not tensors[k].is_cpu), found[0] if found else None)


# --- copies, and waits of streams
# ----------------------------------------------------------------------------------


Grads = tuple[Tensor | None, ...]


def copy_tensor(tensor: Tensor, source: AbstractStream, target: AbstractStream,
                compute: AbstractStream) -> Tensor:
    """Copy a tensor to the device of ``target``, whose compute stream will read it."""
    ends = [observer.copy(source, target) for observer in observers]
    # Between two GPUs the copy runs on the source's current stream, and the target's current
    # stream waits for it. To or from the CPU it is over when `to` returns.
    with use_stream(source), use_stream(target):
        copied = tensor.to(get_device(target))
    record_stream(tensor, source)
    record_stream(copied, compute)
    for end in ends:
        end()
    return copied


def _like(ctx: Any, input: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Let outputs require grad where their inputs do, not where any input does."""
    ctx.mark_non_differentiable(*[y for x, y in zip(input, output) if not x.requires_grad])
    return output


class Copy(torch.autograd.Function):
    """Copy tensors from one stream's device to another's: ``Copy.apply(prev, next, *tensors)``.

    Takes tensors of any shapes, and gives a tuple of them. In backward, gradients are copied the
    other way.

    >>> from torchgpipe.engine.streams import CPUStream
    >>> Copy.apply(CPUStream, CPUStream, torch.ones(2))
    (tensor([1., 1.]),)
    """

    @staticmethod
    def forward(ctx: Any, prev_stream: AbstractStream,
                next_stream: AbstractStream, *input: Tensor) -> tuple[Tensor, ...]:
        ctx.streams = prev_stream, next_stream
        # In backward, autograd's threads have current streams of their own.
        ctx.prev_compute = current_stream(get_device(prev_stream))
        ctx.set_materialize_grads(False)
        compute = current_stream(get_device(next_stream))
        # A tensor that is there already is handed on: [Note: Identity without a view].
        return _like(ctx, input, tuple(
            copy_tensor(x, prev_stream, next_stream, compute).detach() for x in input))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        prev_stream, next_stream = ctx.streams
        return (None, None, *(
            None if grad is None else copy_tensor(grad, next_stream, prev_stream, ctx.prev_compute)
            for grad in grads))


class Wait(torch.autograd.Function):
    """Let one stream wait for another: ``Wait.apply(prev, next, *tensors)``.

    In forward ``next`` waits for ``prev``, in backward ``prev`` waits for ``next``. The tensors
    only mark the place in the graph, and are given back as a tuple.

    >>> from torchgpipe.engine.streams import CPUStream
    >>> Wait.apply(CPUStream, CPUStream, torch.ones(2))
    (tensor([1., 1.]),)
    """

    @staticmethod
    def forward(ctx: Any, prev_stream: AbstractStream,
                next_stream: AbstractStream, *input: Tensor) -> tuple[Tensor, ...]:
        ctx.streams = prev_stream, next_stream
        ctx.set_materialize_grads(False)
        wait_stream(next_stream, prev_stream)
        # [Note: Identity without a view]
        return _like(ctx, input, tuple(x.detach() for x in input))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        prev_stream, next_stream = ctx.streams
        wait_stream(prev_stream, next_stream)
        return (None, None, *grads)


def graph_leaves(nodes: list[Any]) -> list[Tensor]:
    """Return the tensors that get gradients from a graph."""
    found, seen = [], {*nodes}
    while nodes:
        node = nodes.pop()
        # Those without elements only tie nodes to each other.
        if hasattr(node, 'variable') and node.variable.numel():
            found.append(node.variable)
        new = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= new
        nodes += new
    return found
