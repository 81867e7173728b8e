"""One face for CUDA streams and for the CPU, which has none.

Work on the CPU is done when the call returns. So a :data:`CPUStream` never has
anything to wait for, and every function below does nothing where it meets one.
"""
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ['AbstractStream', 'CPUStream', 'CPUStreamType', 'as_cuda', 'current_stream',
           'default_stream', 'get_device', 'is_cuda', 'new_stream', 'no_context',
           'record_stream', 'use_device', 'use_stream', 'wait_stream']


class CPUStreamType:
    """The type of :data:`CPUStream`. It has no behaviour of its own."""

    def __repr__(self) -> str:
        return 'CPUStream'


#: Stands where a :class:`torch.cuda.Stream` would stand if the device had streams.
CPUStream = CPUStreamType()

AbstractStream = torch.cuda.Stream | CPUStreamType

#: A context that does nothing, and takes no time to make.
no_context: AbstractContextManager[Any] = nullcontext()


def is_cuda(stream: AbstractStream) -> bool:
    """Tell a CUDA stream from :data:`CPUStream`.

    >>> is_cuda(CPUStream)
    False
    """
    return stream is not CPUStream


def as_cuda(stream: AbstractStream) -> torch.cuda.Stream:
    """Narrow the type of a stream that is known to be a CUDA stream."""
    return cast(torch.cuda.Stream, stream)


def new_stream(device: torch.device) -> AbstractStream:
    """Make a stream on a CUDA device; :data:`CPUStream` for any other device.

    >>> new_stream(torch.device('cpu'))
    CPUStream
    """
    return torch.cuda.Stream(device) if device.type == 'cuda' else CPUStream


def current_stream(device: torch.device) -> AbstractStream:
    """Give the calling thread's current stream on a device.

    >>> current_stream(torch.device('cpu'))
    CPUStream
    """
    return torch.cuda.current_stream(device) if device.type == 'cuda' else CPUStream


def default_stream(device: torch.device) -> AbstractStream:
    """Give the default stream of a device.

    >>> default_stream(torch.device('cpu'))
    CPUStream
    """
    return torch.cuda.default_stream(device) if device.type == 'cuda' else CPUStream


def use_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a CUDA device current within the context; do nothing for the CPU."""
    return torch.cuda.device(device) if device.type == 'cuda' else no_context


def use_stream(stream: AbstractStream) -> AbstractContextManager[Any]:
    """Make a CUDA stream, and its device, current within the context; do nothing for the CPU."""
    return torch.cuda.stream(as_cuda(stream)) if is_cuda(stream) else no_context


def get_device(stream: AbstractStream) -> torch.device:
    """Give the device of a stream.

    >>> get_device(CPUStream)
    device(type='cpu')
    """
    return as_cuda(stream).device if is_cuda(stream) else torch.device('cpu')


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Let ``source`` wait for the work that is queued on ``target`` by now.

    The host waits only where the CPU has to wait for a CUDA stream.

    >>> wait_stream(CPUStream, CPUStream)  # does nothing
    """
    if not is_cuda(target):
        return
    if is_cuda(source):
        as_cuda(source).wait_stream(as_cuda(target))
    else:
        as_cuda(target).synchronize()


def record_stream(tensor: Tensor, stream: AbstractStream) -> None:
    """Tell the caching allocator that ``stream`` uses the tensor's memory.

    The allocator gives freed memory to the next taker on the stream that *allocated* it, without
    a look at other streams. Whoever uses a tensor on another stream must say so here. PyTorch
    records the whole storage, so a view that starts in its middle is safe too.

    >>> record_stream(torch.ones(2), CPUStream)  # does nothing
    """
    if is_cuda(stream) and tensor.is_cuda:
        tensor.record_stream(as_cuda(stream))
