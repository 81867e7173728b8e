"""Streams of devices, and the memory that they use.

Functions of streams also take :data:`CPUStream`. Work on the CPU is done when the call returns, so
a :data:`CPUStream` never has work to wait for, and they do nothing for it. Only
:func:`wait_stream` makes the host wait, if the CPU has to wait for an accelerator. Some functions
here are for operations for which PyTorch does not have a generic form.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from torchgpipe.base.devices import CPU, has_streams


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
        # `set_stream` also makes the stream's device current.
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
    # Rule 12: The stream that reads a tensor waits for the stream that writes it, in forward and
    # in backward. The host waits only where the CPU reads from an accelerator.
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
    # Rule 13: A tensor that is allocated on one stream and used on another one is recorded with
    # the allocator.
    if is_accelerator(stream) and tensor.device.type == as_accelerator(stream).device.type:
        if tensor.is_conj() or tensor.is_neg():
            # For such a view, PyTorch would record a copy, and write that copy back.
            memory = tensor.untyped_storage()
            tensor = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            tensor.set_(memory)
        tensor.record_stream(as_accelerator(stream))


#: The names in torchgpipe 0.0.7.
is_cuda = is_accelerator
as_cuda = as_accelerator
