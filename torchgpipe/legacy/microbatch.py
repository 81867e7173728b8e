"""Micro-batches of torchgpipe 0.0.7, each a sequence of its tensors."""
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchgpipe.base.structure import Function, Kind, Tensors, bare, flatten
from torchgpipe.engine.cell import result_of
from torchgpipe.engine.microbatches import Chunk, cut
from torchgpipe.engine.microbatches import gather as engine_gather
from torchgpipe.engine.streams import find_grad

__all__ = ['Batch', 'check', 'gather', 'scatter']


class Batch:
    """One micro-batch: a tensor (then it is *atomic*), or a value with tensors in it.

    As a sequence it has its tensors, in their order in the value.

    >>> import torch
    >>> batch = Batch((torch.zeros(2, 3), torch.ones(2)))
    >>> batch.atomic, len(batch), batch[1].shape
    (False, 2, torch.Size([2]))

    Args:
        value: A tensor or a structure of tensors, of any shapes.

    Attributes:
        kind: Assembles a value like this one from other tensors.
    """

    __slots__ = ('_tensors', 'kind')

    _tensors: Tensors
    kind: Kind

    def __init__(self, value: Any) -> None:
        self._tensors, self.kind = flatten(value)

    @classmethod
    def of(cls, tensors: Tensors, kind: Kind = tuple) -> 'Batch':
        """Make a batch of some kind from its tensors; by default a tuple."""
        batch = cls.__new__(cls)
        batch._tensors, batch.kind = tensors, kind
        return batch

    @property
    def value(self) -> Any:
        """The value; its containers are new objects."""
        return self.kind(self._tensors)

    @property
    def atomic(self) -> bool:
        """Whether the value is a tensor itself."""
        return self.kind is bare

    @property
    def tensor(self) -> Tensor:
        """The tensor of an atomic batch; :exc:`AttributeError` otherwise."""
        if not self.atomic:
            raise AttributeError(f'a batch of {len(self)} tensors has no single tensor; '
                                 'use tensors')
        return self._tensors[0]

    @property
    def tensors(self) -> Tensors:
        """The tensors of a non-atomic batch; :exc:`AttributeError` otherwise."""
        if self.atomic:
            raise AttributeError('an atomic batch has no tuple of tensors; use tensor')
        return self._tensors

    @property
    def tensor_or_tensors(self) -> Any:
        """The value, a tensor or not."""
        return self.value

    @property
    def device(self) -> torch.device:
        """The first device that is not the CPU, if any tensor is on one."""
        for tensor in self._tensors:
            if not tensor.is_cpu:
                return tensor.device
        return torch.device('cpu')

    def call(self, function: Function) -> 'Batch':
        """Call a function with the value, and make a batch of its result."""
        return Batch.of(*result_of(function(self.value)))

    def find_grad(self) -> int | None:
        """Return the index of the first tensor that requires grad, or ``None``."""
        return find_grad(self._tensors)

    def __repr__(self) -> str:
        return f'Batch({self.value!r})'

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, index: int) -> Tensor:
        if self.atomic and index != 0:
            raise IndexError(f'index {index} into an atomic batch, which has index 0 only')
        return self._tensors[index]

    def __setitem__(self, index: int | slice, value: Any) -> None:
        if isinstance(index, slice):
            if index != slice(None):
                raise NotImplementedError('only a whole batch can be assigned: batch[:] = tensors')
            self._set_all(tuple(value))
        else:
            self[index]  # raises if there is no such tensor
            tensors = list(self._tensors)
            tensors[index] = value
            self._tensors = tuple(tensors)

    def _set_all(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != len(self._tensors):
            if self.atomic:
                raise IndexError(f'{len(tensors)} tensors for an atomic batch, which holds one')
            self.kind = tuple
        self._tensors = tuple(tensors)


def scatter(input: Any, chunks: int, batch_dim: Any = 0) -> list[Batch]:
    """Split a mini-batch along its batch dimension.

    >>> import torch
    >>> [len(batch.tensor) for batch in scatter(torch.zeros(7, 2), chunks=3)]
    [3, 2, 2]

    Args:
        input: A tensor of shape ``(batch, …)``, or a structure of such tensors. Scalars, and
            values in a :class:`~torchgpipe.NoChunk`, are the same for all micro-batches.
        chunks: The largest number of micro-batches.
        batch_dim: The rule for the batch dimension; ``None`` for values that are the same for all.

    Returns:
        ``min(chunks, batch)`` batches, whose sizes differ by one at most, larger ones first.

    Raises:
        TypeError: The input does not consist of tensors and plain values.
        ValueError: Batch sizes disagree, are zero, or there is no tensor to split.
    """
    return [Batch.of(batch.tensors, batch.kind) for batch in cut(input, chunks, batch_dim)[0]]


def gather(batches: Sequence[Batch], sizes: Sequence[int] | None = None, rule: Any = None,
           batch_dim: int = 0, shared: Sequence[Tensor] = ()) -> Any:
    """Concatenate micro-batches, as the engine does.

    >>> import torch
    >>> gather([Batch(torch.zeros(2, 3)), Batch(torch.ones(1, 3))]).shape
    torch.Size([3, 3])
    """
    return engine_gather([Chunk(tuple(batch), batch.kind) for batch in batches],
                         sizes, rule, batch_dim, shared)


def check(input: Any) -> None:
    """Check that a value may cross a partition boundary: tensors, or a structure of them.

    >>> import torch
    >>> check((torch.zeros(2, 3), None))
    >>> check('text')  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: expected Tensor, but got str as the value; ...

    Args:
        input: The value, of any shape.

    Raises:
        TypeError: The value has another type, or is a structure with another type in it.
    """
    flatten(input)
