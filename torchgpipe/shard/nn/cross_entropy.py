"""The cross entropy of each row of logits whose classes are split over a group of ranks.

A row has a share `a` of each class `c`: the weight of the class times its probability in the
target. Each rank has some of the classes. Two all-reduces combine some numbers per row, the first
of them before (see :mod:`torchgpipe.shard.nn.classes`)::

        forward                                            backward
    1   m = max of x[c]                ── maximum over ranks
    2   s = Σ exp(x[c] - m)            ─┐
    3   t = Σ a[c] (x[c] - m)           ├ sum over ranks
    4   A = Σ a[c]                     ─┘
    5   loss = A log s - t             ─────────────────▶  g (A exp(x[c] - m) / s - a[c])

Backward needs no data of other ranks: `g`, the gradient of the loss, is the same on each.
"""
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchgpipe.shard.collectives import all_reduce

__all__ = ['RowLosses', 'Shares']

#: The number of blocks of rows into which many logits are split. Blocks reduce the further memory,
#: besides logits and gradient, for a few more operations.
BLOCKS = 8

#: The largest number of logits in a single block.
FEW = 1 << 20


class Shares(NamedTuple):
    """The shares of this rank's classes in some rows."""

    #: The place of each row's class among this rank's classes, or -1 if it is elsewhere, of shape
    #: (N, 1). Or the probability of each class, of shape (N, classes).
    target: Tensor
    #: The weights of this rank's classes.
    weight: Tensor | None
    #: The rest of the target's share after smoothing, and the smoothed share of each class.
    kept: float
    even: Tensor | None

    def of(self, rows: slice) -> 'Shares':
        """Return the shares in some rows."""
        return self._replace(target=self.target[rows])

    def probabilities(self, dtype: torch.dtype) -> Tensor:
        """Return probabilities times weights."""
        target = self.target.to(dtype)
        return target if self.weight is None else target * self.weight

    def weights(self, like: Tensor) -> Tensor:
        """Return the weight of each row's class, shape (N, 1); 0 if the class is elsewhere."""
        found = (torch.ones_like(like[:, :1]) if self.weight is None
                 else self.weight[self.places])
        return found.masked_fill(self.target < 0, 0)

    @property
    def places(self) -> Tensor:
        """The place of each row's class; any place if the class is elsewhere."""
        return self.target.clamp(min=0)


class RowLosses(torch.autograd.Function):
    """The cross entropy of each row: shape (N,), in the type that sums are computed in."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, largest: Tensor, group: ProcessGroup, target: Tensor,
                weight: Tensor | None, kept: float, even: Tensor | None) -> Tensor:
        """Take logits of shape (N, this rank's classes), `m`, and the fields of `Shares`."""
        shares = Shares(target, weight, kept, even)
        sums = largest.new_empty(3, len(logits))
        for rows in _blocks(logits):
            block = logits[rows] - largest[rows]
            sums[1, rows], sums[2, rows] = _weighted(block, shares.of(rows))
            sums[0, rows] = block.exp_().sum(1)
            del block  # before there is the next one
        s, t, a = all_reduce(sums, group)
        ctx.save_for_backward(logits, largest, a / s, target, weight)
        ctx.shares = kept, even
        losses: Tensor = a * s.log() - t
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Write the gradient of the logits into one buffer."""
        logits, largest, factor, target, weight = ctx.saved_tensors
        shares = Shares(target, weight, *ctx.shares)
        result = torch.empty_like(logits)
        # A block is computed in the result itself, unless its type is too coarse for sums.
        exact = result.dtype == largest.dtype
        with torch.no_grad():
            for rows in _blocks(logits):
                g = gradients[0][rows, None]
                block = torch.sub(logits[rows], largest[rows], out=result[rows] if exact else None)
                block.exp_().mul_(factor[rows, None] * g)
                _subtract(block, shares.of(rows), g)
                if not exact:
                    result[rows] = block
                del block
        if torch.is_grad_enabled():
            result = _Once.apply(result, logits)  # type: ignore[no-untyped-call]
        return result, None, None, None, None, None, None


class _Once(torch.autograd.Function):
    """Raise if the gradient is differentiated, because it does depend on the logits."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, logits: Tensor) -> Tensor:
        """Return the gradient."""
        return gradient

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Raise an error, because there is no second derivative."""
        raise RuntimeError(
            'the gradient of parallel_cross_entropy cannot be differentiated again: gather the '
            'logits, ts.distributed.gather(logits), and use torch.nn.functional.cross_entropy')


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows = len(logits)
    step = rows if logits.numel() <= FEW else -(-rows // BLOCKS)
    for start in range(0, rows, max(step, 1)):
        yield slice(start, start + step)


def _weighted(block: Tensor, shares: Shares) -> tuple[Tensor, Tensor]:
    """Return this rank's part of `t` and `A` for a block of `x - m`."""
    if not block.size(1):
        return block.sum(1), block.sum(1)
    if shares.target.is_floating_point():
        a = shares.probabilities(block.dtype)
        t, total = (a * block).sum(1), a.sum(1)
    else:
        a = shares.weights(block)
        # Even infinite logits do not count if the class is elsewhere.
        t = (block.gather(1, shares.places) * a).masked_fill(shares.target < 0, 0).view(-1)
        total = a.view(-1)
    t, total = shares.kept * t, shares.kept * total
    if shares.even is not None:
        weight = shares.weight
        t += shares.even * (block if weight is None else block * weight).sum(1)
        total += shares.even * (block.size(1) if weight is None else weight.sum())
    return t, total


def _subtract(block: Tensor, shares: Shares, g: Tensor) -> None:
    """Subtract `g a` from a block, in place."""
    if not block.size(1):
        return
    if shares.target.is_floating_point():
        block.addcmul_(shares.probabilities(block.dtype), g, value=-shares.kept)
    else:
        places, a = shares.places, shares.kept * g * shares.weights(block)
        block.scatter_(1, places, block.gather(1, places) - a)
    if shares.even is not None:
        if shares.weight is None:
            block -= shares.even * g
        else:
            block.addr_((shares.even * g).view(-1), shares.weight, alpha=-1)
