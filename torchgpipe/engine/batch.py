"""Micro-batches: check a mini-batch, scatter it, gather it again."""
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from torchgpipe.aliases import Function, TensorOrTensors, Tensors

__all__ = ['Batch', 'Kind', 'check', 'gather', 'kind_of', 'scatter']

#: Makes a value of some kind from its tensors.
Kind = Callable[[Sequence[Tensor]], TensorOrTensors]


def kind_of(value: TensorOrTensors) -> Kind:
    """Tell a tensor from a tuple and from a named tuple, so that another one like it can be made.

    >>> import torch
    >>> kind_of((torch.zeros(2), torch.zeros(2)))((torch.ones(1), torch.ones(1)))
    (tensor([1.]), tensor([1.]))
    """
    if isinstance(value, Tensor):
        return itemgetter(0)
    cls = type(value)
    if hasattr(cls, 'n_sequence_fields'):  # as torch.max(x, 0) gives it
        return cls
    return getattr(cls, '_make', tuple)


class Batch:
    """One micro-batch: a tensor (then it is *atomic*) or a tuple of tensors, under one face.

    >>> import torch
    >>> batch = Batch((torch.zeros(2, 3), torch.ones(2)))
    >>> batch.atomic, len(batch), batch[1].shape
    (False, 2, torch.Size([2]))

    Args:
        value: A tensor or a tuple of tensors, of any shapes.
    """

    __slots__ = ('atomic', 'value')

    def __init__(self, value: TensorOrTensors) -> None:
        self.value = value
        self.atomic = isinstance(value, Tensor)

    @property
    def tensor(self) -> Tensor:
        """The tensor of an atomic batch; :exc:`AttributeError` otherwise."""
        if not isinstance(self.value, Tensor):
            raise AttributeError(f'a batch of {len(self.value)} tensors has no single tensor; '
                                 'use tensors')
        return self.value

    @property
    def tensors(self) -> Tensors:
        """The tensors of a non-atomic batch; :exc:`AttributeError` otherwise."""
        if isinstance(self.value, Tensor):
            raise AttributeError('an atomic batch has no tuple of tensors; use tensor')
        return self.value

    @property
    def tensor_or_tensors(self) -> TensorOrTensors:
        """The value, whichever it is."""
        return self.value

    @property
    def device(self) -> torch.device:
        """The first device that is not the CPU, if any tensor is on one."""
        for tensor in self:
            if tensor.device.type != 'cpu':
                return tensor.device
        return torch.device('cpu')

    def call(self, function: Function) -> 'Batch':
        """Call a function with the value, and make a batch of what it returns."""
        return Batch(function(self.value))

    def find_grad(self) -> int | None:
        """Give the index of the first tensor that requires grad, or ``None``."""
        if isinstance(self.value, Tensor):
            return 0 if self.value.requires_grad else None
        return next((k for k, x in enumerate(self.value) if x.requires_grad), None)

    def __repr__(self) -> str:
        return f'Batch({self.value!r})'

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.value,) if isinstance(self.value, Tensor) else self.value)

    def __len__(self) -> int:
        return 1 if isinstance(self.value, Tensor) else len(self.value)

    def __getitem__(self, index: int) -> Tensor:
        if not isinstance(self.value, Tensor):
            return self.value[index]
        if index != 0:
            raise IndexError(f'index {index} into an atomic batch, which has index 0 only')
        return self.value

    def __setitem__(self, index: int | slice, value: Any) -> None:
        if isinstance(index, slice):
            if index != slice(None):
                raise NotImplementedError('only a whole batch can be assigned: batch[:] = tensors')
            self._set_all(value)
        elif not isinstance(self.value, Tensor):
            tensors: list[Any] = list(self.value)
            tensors[index] = value
            self.value = kind_of(self.value)(tensors)
        elif index != 0:
            raise IndexError(f'index {index} into an atomic batch, which has index 0 only')
        else:
            self.value = value

    def _set_all(self, value: Sequence[Tensor]) -> None:
        if not isinstance(self.value, Tensor):
            # As many tensors make another value of the same kind.
            same = len(value) == len(self.value)
            self.value = kind_of(self.value)(value) if same else tuple(value)
        elif len(value) != 1:
            raise IndexError(f'{len(value)} tensors for an atomic batch, which holds one')
        else:
            self.value = value[0]


def check(input: Any) -> None:
    """Check that a value may cross a partition boundary: a tensor or a tuple of tensors.

    >>> import torch
    >>> check((torch.zeros(2, 3), torch.zeros(2)))
    >>> check([torch.zeros(2, 3)])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: expected Tensor, but got list as the value; ...

    Args:
        input: The value, of any shape.

    Raises:
        TypeError: It is something else, or a tuple with something else in it.
    """
    if isinstance(input, Tensor):
        return
    if not isinstance(input, tuple):
        raise _not_a_tensor(input, 'the value')
    for k, element in enumerate(input):
        if not isinstance(element, Tensor):
            raise _not_a_tensor(element, f'element {k} of the tuple')


def _not_a_tensor(value: Any, what: str) -> TypeError:
    return TypeError(f'expected Tensor, but got {type(value).__name__} as {what}; between '
                     'partitions, and into and out of a pipeline, go a tensor or a tuple of '
                     'tensors')


def scatter(input: TensorOrTensors, chunks: int) -> list[Batch]:
    """Split a mini-batch along dimension 0.

    >>> import torch
    >>> [len(batch.tensor) for batch in scatter(torch.zeros(7, 2), chunks=3)]
    [3, 2, 2]

    Args:
        input: A tensor, or a tuple of tensors of one batch size, each of shape ``(batch, …)``.
        chunks: The largest number of micro-batches.

    Returns:
        ``min(chunks, batch)`` batches, whose sizes differ by one at most, larger ones first.

    Raises:
        TypeError: The input is not made of tensors.
        ValueError: Batch sizes disagree, are zero, or a tensor has no dimension to split.
    """
    check(input)
    tensors = (input,) if isinstance(input, Tensor) else input
    size = _batch_size(tensors)
    m = min(chunks, size)
    if m == 1:
        return [Batch(input)]
    sizes = [size // m + (i < size % m) for i in range(m)]
    kind = kind_of(input)
    return [Batch(kind(xs)) for xs in zip(*(x.split(sizes) for x in tensors))]


def _batch_size(tensors: Sequence[Tensor]) -> int:
    if not tensors:
        raise ValueError('the input is an empty tuple; a pipeline needs at least one tensor')
    for k, x in enumerate(tensors):
        if x.layout is not torch.strided:
            raise ValueError(f'tensor {k} of the input is sparse ({x.layout}), so it can not be '
                             'split into micro-batches; make it dense, or make it sparse in the '
                             'first layer')
        if x.dim() == 0:
            raise ValueError(f'tensor {k} of the input has no dimensions, so it can not be split '
                             'into micro-batches; give each tensor a batch dimension (shapes: '
                             f'{[tuple(x.shape) for x in tensors]})')
    sizes = [len(x) for x in tensors]
    if len(set(sizes)) > 1:
        raise ValueError('the tensors of the input disagree in batch size (dimension 0): '
                         f'{sizes}; every one must hold the same samples')
    if sizes[0] == 0:
        raise ValueError('the batch is empty: dimension 0 of the input has size 0, at least 1 is '
                         f'needed (shapes: {[tuple(x.shape) for x in tensors]})')
    return sizes[0]


def gather(batches: Sequence[Batch], sizes: Sequence[int] | None = None) -> TensorOrTensors:
    """Concatenate micro-batches along dimension 0.

    >>> import torch
    >>> gather([Batch(torch.zeros(2, 3)), Batch(torch.ones(1, 3))]).shape
    torch.Size([3, 3])

    Args:
        batches: At least one batch, all of one kind and number of tensors.
        sizes: How many samples went into each, to check that as many came out.

    Returns:
        A tensor or a tuple of tensors, each of shape ``(batch, …)``.

    Raises:
        ValueError: The number of samples or of tensors changed within the pipeline.
    """
    if sizes is not None:
        _check_sizes(batches, sizes)
    if len(batches) == 1:
        return batches[0].value
    return kind_of(batches[0].value)([torch.cat(xs) for xs in zip(*batches)])


def _check_sizes(batches: Sequence[Batch], sizes: Sequence[int]) -> None:
    kinds = {(batch.atomic, len(batch)) for batch in batches}
    if len(kinds) > 1:
        raise ValueError('the micro-batches came out of the pipeline with different numbers of '
                         f'tensors: {[len(batch) for batch in batches]}')
    for i, (batch, size) in enumerate(zip(batches, sizes)):
        for x in batch:
            if x.dim() == 0 or len(x) != size:
                raise ValueError(
                    f'micro-batch {i} went into the pipeline with {size} samples and came out '
                    f'with shape {tuple(x.shape)}: outputs are gathered along dimension 0, which '
                    'must stay the batch dimension. Reduce over the batch after the pipeline, not '
                    'in it.')
