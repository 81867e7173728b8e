"""The source of an error: its cell and layer, and the fix of errors caused by a pipeline.

An error keeps its type and its traceback, which leads into the layer. The traceback does not show
the cell, so the error gains a note (PEP 678)::

    RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 9x9)
    in partition 1 on cuda:1, micro-batch 0 of 4, layer '3'

If the pipeline causes the error, another note names the fix (:class:`Remedy`). Such errors are
detected by PyTorch's message and by the place, because a layer may raise the same message by
itself.
"""
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import nn

from torchgpipe.base.context import context
from torchgpipe.base.errors import add_note
from torchgpipe.base.structure import Value, call, flatten
from torchgpipe.engine.partition import Partition
from torchgpipe.skip.transfer import SkipTracker, use_skip_tracker

__all__ = ['add_culprit', 'blame', 'left_grad_mode']


class Remedy(NamedTuple):
    """The fix of an error that the pipeline causes."""

    #: A part of PyTorch's message.
    message: str
    #: Whether the error results from the pipeline, in partition ``j`` and one of ``m``
    #: micro-batches.
    applies: Callable[[int, int], bool]
    note: str


REMEDIES = [
    Remedy('modified inplace', lambda j, m: j == 0 and m > 1,
           'The micro-batches are views of one tensor, the input of the model. If that requires '
           'grad, PyTorch lets no layer change a view of it in place: use a layer that is not in '
           'place first (inplace=False), or chunks=1.'),
    Remedy('more than 1 value per channel', lambda j, m: m > 1,
           'The layer normalises each micro-batch by itself, and this one is too small. Use fewer '
           'chunks, or a larger batch; leave a small one at the end of an epoch out '
           '(drop_last=True).'),
    Remedy('saved tensor hooks', lambda j, m: context.checkpointing,
           'The partition is checkpointed, which is done by such hooks: use '
           "checkpoint='never' with layers that transform functions."),
    Remedy('same device', lambda j, m: True,
           'The input of the model belongs on the first device, model.devices[0]. What a layer '
           'keeps comes to its device with it if it is a parameter or a buffer '
           '(register_buffer).')]


def add_culprit(error: Exception, partition: Partition, i: int, m: int, layer: str | None = None
                ) -> None:
    """Add the source to an error that a partition's layers or their result raised.

    Args:
        error: The error.
        partition: The partition.
        i: The index of the micro-batch.
        m: The number of micro-batches.
        layer: The name of the layer. By default, it is found in the traceback.
    """
    layer = layer or _failing_layer(partition.layers, error.__traceback__)
    where = f'in partition {partition.j} on {partition.device}, micro-batch {i} of {m}'
    add_note(error, where if layer is None else f"{where}, layer '{layer}'")
    for remedy in REMEDIES:
        if remedy.message in str(error) and remedy.applies(partition.j, m):
            add_note(error, remedy.note)


def left_grad_mode(grad: bool) -> RuntimeError:
    """Restore the grad mode that layers left changed, and return the error to raise."""
    torch.set_grad_enabled(grad)
    return RuntimeError(f'the layers of a partition left grad mode {"off" if grad else "on"}, as '
                        'torch.set_grad_enabled does. What runs after them, and in which thread, '
                        'is not what comes after them in the model. Use it as a context: with '
                        'torch.set_grad_enabled(…): …')


def blame(partition: Partition, value: Value) -> str:
    """Return an error message that names the layer which changed a checkpointed cell's input.

    If the input requires grad, autograd raises. Otherwise a recomputation would start from the
    input as the first pass changed it.
    """
    layer = _changing_layer(partition.layers, value)
    name = 'a layer' if layer is None else f"layer '{layer}'"
    return (f'{name} of partition {partition.j} on {partition.device} changed the input of the '
            'partition in place, and the partition is checkpointed: its recomputation started '
            'from the changed input, so gradients would be wrong. Use an operation that is '
            'not in place there (inplace=False), let the partition begin with another layer, '
            "or use checkpoint='never'.")


def _failing_layer(partition: nn.Module, traceback: TracebackType | None) -> str | None:
    """Find the layer that was running, in the frames of the error. It costs nothing otherwise."""
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == 'forward' and frame.f_locals.get('self') is partition:
            return _name(partition, frame.f_locals.get('module'))
        traceback = traceback.tb_next
    return None


def _name(partition: nn.Module, layer: Any) -> str | None:
    # One layer may be in several places, and the frame does not say in which one it was running.
    names = [name for name, child in partition._modules.items() if child is layer]
    return "' or '".join(names) if names else None


def _changing_layer(partition: nn.Sequential, value: Value) -> str | None:
    """Find the layer that changes the partition's input in place: run the layers on a copy."""
    found, kind = flatten(value)
    tensors = tuple(x.detach().clone() for x in found)
    output = kind(tensors)
    with torch.no_grad(), use_skip_tracker(SkipTracker()):
        for name, layer in partition._modules.items():
            try:
                output = call(layer, output)
            except RuntimeError:  # It does not run by itself.
                return None
            if any(x._version for x in tensors):
                return name
    return None
