"""Samples: some elements of tensors, by which two passes over the same layers are compared.

[Note: Samples of other devices] A read of an element on an accelerator waits for the accelerator.
So :func:`samples_of` and :func:`compare` copy samples to the CPU without waiting. An event shows
when the copies are complete, and then they are compared. The next forward pass raises if they
differ::

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
from torchgpipe.base.private import FakeTensor, unseen
from torchgpipe.base.structure import check_nested

#: The approximate number of elements of an output that are compared.
NUMBER = 64

DIFFERENCE = 'its output has other values'


class Sample(NamedTuple):
    """Type, shape and some elements of a tensor; no elements if they cannot be read."""

    dtype: torch.dtype
    shape: torch.Size
    elements: Tensor | None


class PendingComparison(NamedTuple):
    """Two samples whose copies from another device are not complete yet."""

    now: Tensor
    before: Tensor
    #: Whether the copies are complete.
    is_there: Callable[[], bool]


def samples_of(output: Sequence[Tensor]) -> list[Sample]:
    """Return samples of a first pass's output, which outlive the output."""
    samples = []
    with unseen():
        for x in output:
            if x.is_nested:
                x = _values(x)
            elements = elements_of(x)
            if elements is None:
                pass
            elif _is_readable(x):
                elements = elements.clone()  # A view would keep the output.
            else:
                elements = _to_host(elements)
            samples.append(Sample(x.dtype, x.shape, elements))
    return samples


def _values(x: Tensor) -> Tensor:
    """Return the elements of a nested tensor, whose own shape differs between passes."""
    check_nested(x)
    return x.detach().values()


def elements_of(x: Tensor, every: bool = False) -> Tensor | None:
    """Return at most about :data:`NUMBER` elements, as a view if the tensor is contiguous.

    Returns:
        The elements; ``None`` if the tensor is not strided, has no data, or has another dtype.
    """
    x = x.detach()
    if hasattr(x, 'to_local'):
        x = x.to_local()  # a DTensor's part of the elements
    if x.is_meta or isinstance(x, FakeTensor) or x.layout is not torch.strided:
        return None
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    elif not every and not x.is_floating_point():
        return None
    number = x.numel()
    if number <= NUMBER:
        return x
    if not x.is_contiguous():
        x = x.flatten()  # The stride in memory of the elements below needs one dimension.
    return x.as_strided([NUMBER], [number // NUMBER], x.storage_offset())


def few_elements_of(x: Tensor) -> Tensor | None:
    """Return a few elements of a tensor of any strides, without a copy of all of it.

    Returns:
        The elements; ``None`` where :func:`elements_of` returns it, and for nested tensors.
    """
    x = getattr(x, 'to_local', x.detach)()
    if x.is_nested or x.layout is not torch.strided:
        return None
    places = tuple([slice(None, None, max(1, size // 3)) for size in x.shape])
    return elements_of(x[places])


def _is_readable(x: Tensor) -> bool:
    """Return whether the elements of a tensor can be read without waiting."""
    return x.is_cpu


def _to_host(elements: Tensor) -> Tensor:
    return elements.to('cpu', non_blocking=True)


def compare(
    output: Sequence[Tensor],
    before: list[Sample],
    difference: str = DIFFERENCE,
) -> list[PendingComparison]:
    """Compare the output of a recomputation with the output of its first pass.

    Args:
        output: The output of the recomputation.
        before: The samples of the first pass.
        difference: The text of the error about other values.

    Returns:
        The samples that cannot be compared yet: [Note: Samples of other devices].

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
                raise other_path(
                    f'its output {k} is {x.dtype} of shape {tuple(x.shape)}, that of '
                    f'the first pass {old.dtype} of shape {tuple(old.shape)}'
                )
            elements = elements_of(x)
            # Tensors of integers and tensors without data do not have a sample.
            if elements is None or old.elements is None:
                continue
            if not _is_readable(x):
                copied = _to_host(elements)
                is_there = _event(x.device)
                late.append(PendingComparison(copied, old.elements, is_there))
            elif not torch.equal(elements, old.elements) and not agree(elements, old.elements):
                raise other_path(difference)
    return late


def compare_pending(late: deque[PendingComparison], j: int) -> None:
    """Compare the samples of partition ``j`` that are on the CPU by now; the others stay.

    Raises:
        RuntimeError: They differ.
    """
    while late:
        try:
            pair = late.popleft()
        except IndexError:  # Another thread was faster.
            return
        if not pair.is_there():
            # The other ones were queued later.
            late.appendleft(pair)
            return
        with unseen():
            same = agree(pair.now, pair.before)
        if not same:
            late.clear()
            raise other_path(f'{DIFFERENCE}, in partition {j} and an earlier backward pass')


def _event(device: torch.device) -> Callable[[], bool]:
    """Return a function that returns whether the work queued so far on the stream is done."""
    return torch.accelerator.current_stream(device).record_event().query


def agree(a: Tensor, b: Tensor) -> bool:
    """Return whether elements are the same except for rounding."""
    if torch.equal(a, b):
        return True
    if not a.is_floating_point():
        return False
    # A kernel may add in another order, such as when memory is at another address.
    tolerance = torch.finfo(b.dtype).eps ** 0.5
    scale = b.abs().nan_to_num(0, 0, 0).max().item()
    return torch.allclose(
        a,
        b,
        rtol=tolerance,
        atol=tolerance * scale,
        equal_nan=True,
    )
