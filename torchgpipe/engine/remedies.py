"""Remedies: the way out of those errors of PyTorch's own that come of a pipeline.

They are told by what PyTorch says, and by where it says so: a layer may raise the same by itself.
"""
from collections.abc import Callable
from typing import NamedTuple

from torchgpipe.context import context
from torchgpipe.errors import add_note

__all__ = ['add_remedy']


class Remedy(NamedTuple):
    """A way out."""

    #: A part of what PyTorch says.
    message: str
    #: Whether it comes of the pipeline, in partition ``j`` and one of ``m`` micro-batches.
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


def add_remedy(error: BaseException, j: int, m: int) -> None:
    """Add the way out to an error in partition ``j`` and one of ``m`` micro-batches, if it is one.
    """
    for remedy in REMEDIES:
        if remedy.message in str(error) and remedy.applies(j, m):
            add_note(error, remedy.note)
