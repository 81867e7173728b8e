"""Samples of a pass's output, which show whether another pass has the same output.

[Note: Samples of other devices] To look at a number on another device than the CPU is to wait for
that device. So samples are copied to the CPU without waiting, and compared when they have come,
which is noticed by an event. If they differ, the next forward pass raises::

    forward          sample ── copy ──▶ a
    recomputation    sample ── copy ──▶ b, then an event
    next forward     if the event has happened: compare a and b
"""
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchgpipe.base.errors import other_path
from torchgpipe.base.private import unseen
from torchgpipe.base.structure import check_nested

__all__ = ['PendingComparison', 'Sample', 'agree', 'compare', 'compare_pending', 'elements_of',
           'keep']

#: How many elements of an output are compared, about.
NUMBER = 64

DIFFERENCE = 'its output has other values'


class Sample(NamedTuple):
    """Type, shape and some elements of a tensor; no elements where they can't be looked at."""

    dtype: torch.dtype
    shape: torch.Size
    elements: Tensor | None


class PendingComparison(NamedTuple):
    """Two samples that are still on their way from another device."""

    now: Tensor
    before: Tensor
    #: Whether they have come.
    is_there: Callable[[], bool]


def keep(output: Sequence[Tensor]) -> list[Sample]:
    """Take samples of the tensors that a first pass gave, which outlive these."""
    with unseen():
        found = []
        for x in output:
            if x.is_nested:
                x = _values(x)
            elements = elements_of(x)
            found.append(Sample(x.dtype, x.shape, elements if elements is None else
                                elements.clone() if _is_here(x) else _to_host(elements)))
        return found


def _values(x: Tensor) -> Tensor:
    """Return the elements of a nested tensor, whose own shape is another one in each pass."""
    check_nested(x)
    return x.detach().values()


def elements_of(x: Tensor, every: bool = False) -> Tensor | None:
    """Return some elements, in the memory of the tensor; ``None`` if they can't be looked at.

    Args:
        x: The tensor.
        every: Whether to look at one that can have no gradient, too.
    """
    x = x.detach()
    if x.is_meta or x.layout is not torch.strided:
        return None
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    elif not every and not x.is_floating_point():
        return None
    number = x.numel()
    return x if number <= NUMBER else x.flatten()[::number // NUMBER]


def _is_here(x: Tensor) -> bool:
    """Return whether the elements of a tensor can be looked at without waiting."""
    return x.is_cpu


def _to_host(elements: Tensor) -> Tensor:
    return elements.to('cpu', non_blocking=True)


def compare(output: Sequence[Tensor], before: list[Sample]) -> list[PendingComparison]:
    """Compare what a recomputation gave with what its first pass gave.

    Args:
        output: What it gave.
        before: What was kept of the first pass.

    Returns:
        What can't be compared yet: [Note: Samples of other devices].

    Raises:
        RuntimeError: They differ.
    """
    if len(output) != len(before):
        raise other_path(f'it gave {len(output)} tensors, the first pass {len(before)}')
    late = []
    with unseen():
        for k, (x, old) in enumerate(zip(output, before)):
            if x.is_nested:
                x = _values(x)
            if (x.dtype, x.shape) != (old.dtype, old.shape):
                raise other_path(f'its output {k} is {x.dtype} of shape {tuple(x.shape)}, that of '
                                 f'the first pass {old.dtype} of shape {tuple(old.shape)}')
            elements = elements_of(x)
            if elements is None or old.elements is None:
                continue
            if not _is_here(x):
                late.append(PendingComparison(_to_host(elements), old.elements, _event(x.device)))
            elif not (torch.equal(elements, old.elements) or agree(elements, old.elements)):
                raise other_path(DIFFERENCE)
    return late


def compare_pending(late: deque[PendingComparison], j: int) -> None:
    """Compare those samples of partition ``j`` that have come; the others stay.

    Raises:
        RuntimeError: They differ.
    """
    while late:
        try:
            pair = late.popleft()
        except IndexError:  # Another thread was faster.
            return
        if not pair.is_there():
            late.appendleft(pair)
            return
        with unseen():
            same = agree(pair.now, pair.before)
        if not same:
            late.clear()
            raise other_path(f'{DIFFERENCE}, in partition {j} and an earlier backward pass')


def _event(device: torch.device) -> Callable[[], bool]:
    """Return what tells whether all that was queued so far on the current stream is done."""
    return torch.accelerator.current_stream(device).record_event().query


def agree(a: Tensor, b: Tensor) -> bool:
    """Return whether elements are the same, but for rounding."""
    if torch.equal(a, b):
        return True
    if not a.is_floating_point():
        return False
    # A kernel may add in another order, as where memory lies at another address.
    tolerance = torch.finfo(b.dtype).eps ** 0.5
    scale = b.abs().nan_to_num(0, 0, 0).max().item()
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
