"""A micro-batch: the tensors of a value, and what puts the value together again."""
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchgpipe.aliases import Tensors
from torchgpipe.structure import Kind, bare, flatten, once

__all__ = ['Batch', 'result_of']


@dataclass(slots=True, eq=False)
class Batch:
    """One micro-batch.

    >>> import torch
    >>> batch = Batch(*flatten((torch.zeros(2, 3), None)))
    >>> len(batch.tensors), batch.value[0].shape
    (1, torch.Size([2, 3]))

    Args:
        tensors: The tensors of a value, in the order in which they stand there.
        kind: Puts a value like this one together from tensors.
    """

    tensors: Tensors
    kind: Kind

    @property
    def value(self) -> Any:
        """The value; what holds its tensors is made anew."""
        return self.kind(self.tensors)


def result_of(value: Any) -> tuple[Tensors, Kind]:
    """Return the tensors that layers gave, and what puts the value together again.

    A tensor in several places goes on once.

    >>> import torch
    >>> x = torch.ones(2)
    >>> tensors, kind = result_of({'x': x, 'y': x})
    >>> len(tensors), kind(tensors)['x'] is kind(tensors)['y']
    (1, True)
    """
    if isinstance(value, Tensor):  # as mostly
        return (value,), bare
    tensors, kind = flatten(value)
    return (tensors, kind) if len(tensors) == 1 else once(tensors, kind)
