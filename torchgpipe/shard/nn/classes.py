"""Classes: the shard of each rank of a group, and the sizes that must match it.

Ranks exchange the largest logit of each row. The same collective has further facts behind these,
as numbers that each type of sums represents exactly::

    N largest logits │ rank 0: number of its classes, checksum of its targets │ rank 1: …

All of it stays on the device, so that the host does not wait for it. On the CPU, where the host
does not have to wait, a mismatch raises an error. On other devices, the loss and gradients become
NaN, and the debug mode reports why.
"""
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchgpipe.shard.collectives import all_reduce
from torchgpipe.shard.failures import differences, is_read

__all__ = ['Classes', 'exchange', 'misfit', 'raise_or_nan']

#: A number is sent as two, of so many bits each, which float32 represents exactly.
BITS = 24


class Classes(NamedTuple):
    """A rank's facts about all classes, on the device, after the exchange between ranks."""

    #: The largest logit of each row, shape (N, 1).
    largest: Tensor
    #: The numbers of all classes, of classes before this rank's, and of this rank's classes.
    number: Tensor
    begin: Tensor
    length: int

    def own(self, x: Tensor) -> Tensor:
        """Return the elements of this rank's classes, in the last dimension."""
        return x.index_select(-1, self.begin + torch.arange(self.length, device=x.device))

    def check_length(self, what: str, x: Tensor, hint: str) -> None:
        """Check that the last dimension has an element for each class."""
        raise_or_nan(self.number != x.size(-1), self.largest, lambda: misfit(
            what, x, int(self.number), hint))

    def places(self, target: Tensor) -> Tensor:
        """Return the place of each target among this rank's classes, -1 if elsewhere: (N, 1)."""
        places = target.reshape(-1, 1).long() - self.begin
        return places.masked_fill((places < 0) | (places >= self.length), -1)


def exchange(logits: Tensor, dtype: torch.dtype, target: Tensor, group: ProcessGroup) -> Classes:
    """Exchange facts about classes between ranks; raise if they have different targets.

    Args:
        logits: The logits of this rank, of shape (N, classes of this rank).
        dtype: The type of sums.
        target: The targets, of any shape.
        group: The ranks.
    """
    (rows, length), rank = logits.shape, group.rank()
    sent = logits.new_full((rows + 4 * group.size(),), -torch.inf, dtype=dtype)
    if length:
        sent[:rows] = logits.amax(1)
    table = sent[rows:].view(-1, 4)
    checksum = _checksum(target)
    numbers: list[Any] = [length, checksum]
    for i, number in enumerate(numbers):
        table[rank, 2 * i], table[rank, 2 * i + 1] = number >> BITS, number % (1 << BITS)
    all_reduce(sent, group, dist.ReduceOp.MAX)
    high, low = table.long().view(-1, 2, 2).unbind(-1)
    lengths, checksums = ((high << BITS) + low).unbind(-1)
    largest = sent[:rows, None]
    raise_or_nan(checksums.ne(checksum).any(), largest, lambda: RuntimeError(
        'the ranks of a group have different targets, by their checksums: '
        f'{differences(checksums.tolist(), group)}. Shards of logits belong to the same samples: '
        'let all ranks of a group read the same batch'))
    return Classes(largest, lengths.sum(), lengths[:rank].sum(), length)


def misfit(what: str, x: Tensor, classes: int, hint: str) -> ValueError:
    """Return the error for a tensor that does not have an element for each class."""
    return ValueError(f'{what} of shape {tuple(x.shape)} do not fit {classes} classes{hint}')


def _checksum(target: Tensor) -> Tensor:
    """Return a number of twice as many bits for class numbers in this order, or probabilities."""
    if target.is_floating_point():
        return torch.zeros((), dtype=torch.long, device=target.device)
    odd = torch.arange(target.numel(), device=target.device) * 2 + 1
    return (target.reshape(-1) * odd).sum() % (1 << 2 * BITS)


def raise_or_nan(wrong: Tensor, numbers: Tensor, error: Callable[[], Exception]) -> None:
    """Raise an error if anything is wrong, or make numbers NaN where it is, in place."""
    if not is_read(wrong):
        numbers.masked_fill_(wrong, torch.nan)
    elif wrong.any():
        raise error()
