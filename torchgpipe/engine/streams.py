"""Streams of devices, and autograd functions: copies, waits, and the order of backward.

Functions of streams also take :data:`CPUStream`. Work on the CPU is done when the call returns, so
a :data:`CPUStream` never has work to wait for, and they do nothing for it. Only
:func:`wait_stream` makes the host wait, if the CPU has to wait for an accelerator. Some functions
here are for operations for which PyTorch does not have a generic form.

:func:`fork` and :func:`join` set the order of backward by edges without data. ``fork`` branches a
phony off a tensor, and ``join`` merges it into another tensor. In backward, nodes before the fork
wait until nodes after the join have been started::

    forward    a ──Tie──▶ a'           backward    a ◀──Tie◀── a'
                    └phony┐                             ▲phony (no gradient)
               b ─────────Tie──▶ b'                b ◀──┴─Tie◀── b'

    1. The second ``Tie`` runs as soon as the gradient of b' is available.
    2. The first ``Tie`` waits for the second, even if the gradient of a' comes first.

A phony (:func:`get_phony`) is a tensor without elements, which carries only the edge.

:class:`Recompute` and :class:`Checkpoint` run a checkpointed call again. ``Recompute`` is tied to
an output, so that it runs before the gradient is available. ``Checkpoint`` is in the path of every
gradient, so it ensures that the call has run again.

:class:`Copy` copies tensors between streams, and :class:`Wait` lets one stream wait for another.
Let partition ``j-1`` be on device A and partition ``j`` on device B. A micro-batch passes through
a copy stream on each side, so that the compute streams continue to compute::

    compute A ──Wait──▶ copy A ──Copy──▶ copy B ──Wait──▶ compute B        forward
    compute A ◀──Wait── copy A ◀──Copy── copy B ◀──Wait── compute B        backward

Ownership: the copy is allocated on copy stream B and read on compute stream B. Its source is
allocated on compute stream A and read on the copy streams. Either may lose its last reference
while the other stream still reads it, so both uses are recorded with the allocator.

Offload: tensors move to host memory, and return before they are needed.

One stream of each device copies them, concurrently with the compute stream::

    compute        cell i ──▶ cell i+1 ──▶ …          … ──▶ backward of i+1 ──▶ recomputation of i
                     └wait┐                                                      ┌wait┘
    host stream           x ──▶ host                                 host ──▶ x'

Ownership: x is allocated on the compute stream or a copy stream, and read on the host stream. x'
is allocated on the host stream and read on the compute stream. Both uses are recorded with the
allocator. Host memory is pinned, because copies are asynchronous only with pinned memory. PyTorch
reuses pinned memory only after copies from it and to it have ended.

An operation that changes x in place after the cell may run before or after the copy. It raises in
backward, as without offload: an alias without memory has the version of x.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from torchgpipe.base.devices import CPU, has_streams
from torchgpipe.base.private import unseen
from torchgpipe.base.structure import Tensors, Value, is_plain
from torchgpipe.schedule.schedule import Action

__all__ = [
    'AbstractStream',
    'CPUStream',
    'CPUStreamType',
    'Checkpoint',
    'Copy',
    'Fork',
    'Join',
    'Observer',
    'Offload',
    'Recompute',
    'Tie',
    'Wait',
    'as_accelerator',
    'as_cuda',
    'copy_tensor',
    'current_stream',
    'default_stream',
    'find_grad',
    'fork',
    'get_device',
    'get_phony',
    'graph_leaves',
    'is_accelerator',
    'is_cuda',
    'join',
    'new_stream',
    'no_context',
    'observers',
    'record_stream',
    'tie',
    'use_device',
    'use_stream',
    'wait_stream',
]

# Streams of devices.


class CPUStreamType:
    """The type of :data:`CPUStream`. It has no behaviour."""

    def __repr__(self) -> str:
        return 'CPUStream'


#: Used in place of a :class:`torch.Stream` for devices without streams.
CPUStream = CPUStreamType()

AbstractStream = torch.Stream | CPUStreamType

#: A context that does nothing, and takes no time to make.
no_context: AbstractContextManager[Any] = nullcontext()


def is_accelerator(stream: AbstractStream) -> bool:
    """Return whether a stream belongs to an accelerator (CUDA or another one).

    >>> is_accelerator(CPUStream)
    False
    """
    return stream is not CPUStream


def as_accelerator(stream: AbstractStream) -> torch.Stream:
    """Narrow the type of a stream that is known to be an accelerator's."""
    return cast(torch.Stream, stream)


def new_stream(device: torch.device) -> AbstractStream:
    """Create a stream on an accelerator; return :data:`CPUStream` for any other device.

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
    """Return the default stream of a device, or its current one if the backend has no default.

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
    if stream is CPUStream:
        return no_context
    return _Current(as_accelerator(stream))


class _Current:
    """The context of :func:`use_stream`.

    A stream is itself a context, but it stores the previous stream on itself, and threads share
    streams here.
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
    if is_accelerator(stream):
        return as_accelerator(stream).device
    return CPU


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Make ``source`` wait for the work that is queued on ``target`` by now.

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
    """Record with the caching allocator that ``stream`` uses the tensor's memory.

    The allocator reuses freed memory on the stream that *allocated* it, regardless of other
    streams. So the use of a tensor on another stream must be recorded here. PyTorch records the
    whole storage, so a view that starts in its middle is also safe.

    >>> record_stream(torch.ones(2), CPUStream)  # does nothing
    """
    if is_accelerator(stream) and tensor.device.type == as_accelerator(stream).device.type:
        if tensor.is_conj() or tensor.is_neg():
            # For such a view, PyTorch would record a copy, and write that copy back.
            memory = tensor.untyped_storage()
            tensor = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
        tensor.record_stream(as_accelerator(stream))


#: The names in torchgpipe 0.0.7.
is_cuda = is_accelerator
as_cuda = as_accelerator


class Observer(Protocol):
    """An observer of cells, actions and copies. It is called in the threads that run them."""

    def cell(
        self, i: int, m: int, j: int, value: Value, skips: Sequence[Tensor | None]
    ) -> Callable[[Value], None]:
        """Record the start of a cell's layers in any pass; return a function for their output."""

    def act(self, run: Callable[[Action], None], action: Action) -> None:
        """Run an action of a step by a schedule."""

    def copy(self, source: AbstractStream, target: AbstractStream) -> Callable[[], None]:
        """Record the start of a copy, and return a function to call when it is queued."""


#: The observers of copies, in all pipelines.
observers: list[Observer] = []


# The order of backward: edges without data, and the nodes of a recomputation.

# Filled once per device, never emptied, read-only afterwards.
_phonies: dict[tuple[torch.device, bool], Tensor] = {}


def get_phony(device: torch.device, *, requires_grad: bool) -> Tensor:
    """Return the empty tensor of a device, always the same object for the same arguments.

    >>> import torch
    >>> get_phony(torch.device('cpu'), requires_grad=True).shape
    torch.Size([0])

    Args:
        device: The device of the tensor.
        requires_grad: Whether an autograd function with this argument makes a node in the graph.

    Returns:
        A tensor of shape ``(0,)``. It is shared, so detach it before it becomes an output of an
        autograd function.
    """
    key = (device, requires_grad)
    phony = _phonies.get(key)
    if phony is None:
        # The tensor outlives the call, so it must not be an inference tensor. The caller's stream
        # does not matter, because a tensor without elements has no memory to free.
        with torch.inference_mode(False):
            phony = torch.empty(0, device=device, requires_grad=requires_grad)
        phony = _phonies.setdefault(key, phony)
    return phony


# [Note: Identity without a view]
# The functions of this package that pass a tensor on return `tensor.detach()`. Autograd treats
# the result as a new tensor, not as a view, so that the next layer may change it in place. The
# result shares its version counter with the input. So autograd detects a change of a tensor that
# an earlier layer has saved. Returning the input itself would forbid the change; `.data` would
# hide it. This is rule 11.


def tie(input: Tensor, *phonies: Tensor) -> tuple[Tensor, Tensor]:
    """Join a tensor with phonies, and branch another phony off it, by one node.

    Args:
        input: A tensor of any shape.
        phonies: Phonies that were branched off other tensors.

    Returns:
        The tensor, which requires grad if it or a phony does, and the phony of shape ``(0,)``.
        Without grad, nothing is added to the graph.
    """
    if torch.is_grad_enabled() and (
        input.requires_grad or any(phony.requires_grad for phony in phonies)
    ):
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
    """Merge a phony into a tensor: see :func:`fork`. It requires grad then if the phony does."""
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
    def backward(
        ctx: Any, grad_input: Tensor | None, grad_phony: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        return grad_input, *[None] * ctx.number


class Checkpoint(torch.autograd.Function):
    """Mark the output of a checkpointed call; in backward, ensure that its graph is filled.

    Takes ``(recomputation, number, *phonies, *output)`` and returns the output and a phony. It is
    a ``Tie`` as well: step 4 of the note "How checkpointing works".
    """

    @staticmethod
    def forward(ctx: Any, recomputation: Any, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
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
    """Run a checkpointed call again before its gradient is available. In a step, `R` does so.

    Takes ``(phony, recomputation)`` and returns a phony: step 2 of the note "How checkpointing
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


#: The names in torchgpipe 0.0.7.
Fork = Join = Tie


def find_grad(tensors: Sequence[Tensor]) -> int | None:
    """Return the index of the first tensor that requires grad, or ``None``.

    Tensors on the CPU come last. So a node on the tensor runs in backward in the same thread as
    the node that returned it together with others.
    """
    found = [k for k, x in enumerate(tensors) if x.requires_grad]
    return next((k for k in found if not tensors[k].is_cpu), found[0] if found else None)


# Copies, and waits of streams.


Grads = tuple[Tensor | None, ...]


def copy_tensor(
    tensor: Tensor, source: AbstractStream, target: AbstractStream, compute: AbstractStream
) -> Tensor:
    """Copy a tensor to the device of ``target``, whose compute stream will read it."""
    ends = [observer.copy(source, target) for observer in observers]
    # Between two GPUs the copy runs on the source's current stream, and the target's current
    # stream waits for it. To or from the CPU the copy is complete when `to` returns.
    with use_stream(source), use_stream(target):
        copied = tensor.to(get_device(target))
    record_stream(tensor, source)  # rule 13
    record_stream(copied, compute)
    for end in ends:
        end()
    return copied


def _like(ctx: Any, input: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Make each output require grad only if its own input does."""
    ctx.mark_non_differentiable(*[y for x, y in zip(input, output) if not x.requires_grad])
    return output


class Copy(torch.autograd.Function):
    """Copy tensors from one stream's device to another's: ``Copy.apply(prev, next, *tensors)``.

    Takes tensors of any shapes, and returns a tuple of copies. In backward, gradients are copied
    in the opposite direction.

    >>> from torchgpipe.engine.streams import CPUStream
    >>> Copy.apply(CPUStream, CPUStream, torch.ones(2))
    (tensor([1., 1.]),)
    """

    @staticmethod
    def forward(
        ctx: Any, prev_stream: AbstractStream, next_stream: AbstractStream, *input: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.streams = prev_stream, next_stream
        # In backward, autograd's threads have their own current streams.
        ctx.prev_compute = current_stream(get_device(prev_stream))
        ctx.set_materialize_grads(False)
        compute = current_stream(get_device(next_stream))
        # A tensor on the target device is passed on: [Note: Identity without a view].
        return _like(
            ctx,
            input,
            tuple(copy_tensor(x, prev_stream, next_stream, compute).detach() for x in input),
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        prev_stream, next_stream = ctx.streams
        return (
            None,
            None,
            *(
                None
                if grad is None
                else copy_tensor(grad, next_stream, prev_stream, ctx.prev_compute)
                for grad in grads
            ),
        )


class Wait(torch.autograd.Function):
    """Make one stream wait for another: ``Wait.apply(prev, next, *tensors)``.

    In forward ``next`` waits for ``prev``, in backward ``prev`` waits for ``next``. The tensors
    only mark the place in the graph, and are returned as a tuple.

    >>> from torchgpipe.engine.streams import CPUStream
    >>> Wait.apply(CPUStream, CPUStream, torch.ones(2))
    (tensor([1., 1.]),)
    """

    @staticmethod
    def forward(
        ctx: Any, prev_stream: AbstractStream, next_stream: AbstractStream, *input: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.streams = prev_stream, next_stream
        ctx.set_materialize_grads(False)
        wait_stream(next_stream, prev_stream)
        # [Note: Identity without a view]
        return _like(ctx, input, tuple(x.detach() for x in input))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        prev_stream, next_stream = ctx.streams
        wait_stream(prev_stream, next_stream)
        return None, None, *grads


def graph_leaves(nodes: list[Any]) -> list[Tensor]:
    """Return the tensors that receive gradients from a graph."""
    found = []
    seen = {*nodes}
    while nodes:
        node = nodes.pop()
        # Phonies only tie nodes to each other.
        if hasattr(node, 'variable') and node.variable.numel():
            found.append(node.variable)
        new = {other for other, _ in node.next_functions if other is not None} - seen
        seen |= new
        nodes += new
    return found


# Inputs of checkpointed cells in host memory.


class Offload:
    """Tensors that a stream copies to host memory, where they are kept until they are needed."""

    __slots__ = ('_moved', '_stream', 'aliases')

    def __init__(self, stream: AbstractStream) -> None:
        self._stream = stream
        self._moved: list[bool] = []
        #: Tensors without memory that have the versions of the stored tensors.
        self.aliases: list[Tensor] = []

    def store(self, tensors: Tensors, compute: AbstractStream) -> Tensors:
        """Return copies in host memory. Tensors on another device than the stream's stay.

        Args:
            compute: The stream on which the tensors are available.
        """
        device = get_device(self._stream)
        self._moved = [x.device == device and is_plain(x) and x.numel() > 0 for x in tensors]
        wait_stream(self._stream, compute)
        with unseen(), use_stream(self._stream):
            self.aliases = [_without_memory(x) for x in tensors]
            return tuple(
                self._to_host(x) if moved else x for x, moved in zip(tensors, self._moved)
            )

    def _to_host(self, x: Tensor) -> Tensor:
        host = torch.empty_like(x, device='cpu', pin_memory=True, requires_grad=False)
        host.copy_(x.detach(), non_blocking=True)
        record_stream(x, self._stream)
        return host.requires_grad_(x.requires_grad)

    def fetch(self, tensors: Tensors, compute: AbstractStream) -> Tensors:
        """Return the tensors, copied back to the device.

        Args:
            compute: The stream that will use them.
        """
        with unseen(), use_stream(self._stream):
            fetched = tuple(
                self._to_device(x, compute) if moved else x
                for x, moved in zip(tensors, self._moved)
            )
        wait_stream(compute, self._stream)
        return fetched

    def _to_device(self, x: Tensor, compute: AbstractStream) -> Tensor:
        y = x.detach().to(get_device(self._stream), non_blocking=True)
        record_stream(y, compute)
        return y.requires_grad_(x.requires_grad)


def _without_memory(x: Tensor) -> Tensor:
    """Return a tensor that shares only the version with another one."""
    alias = x.detach()
    alias.data = torch.empty(0, dtype=x.dtype, device=x.device)
    return alias
