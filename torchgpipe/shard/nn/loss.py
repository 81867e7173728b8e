"""Cross entropy over logits whose last dimension may be a shard, with all options of PyTorch.

Ranks exchange the largest logit of each row. The same collective has further facts behind these,
as numbers that each type of sums represents exactly::

    N largest logits │ rank 0: number of its classes, checksum of its targets │ rank 1: …

All of it stays on the device, so that the host does not wait for it. On the CPU, where the host
does not have to wait, a mismatch raises an error. On other devices, the loss and gradients become
NaN, and the debug mode reports why.

A row has a share `a` of each class `c`: the weight of the class times its probability in the
target. Each rank has some of the classes. Two all-reduces combine some numbers per row. The
first one is the exchange of the largest logits, described above::

        forward                                            backward
    1   m = max of x[c]                ── maximum over ranks
    2   s = Σ exp(x[c] - m)            ─┐
    3   t = Σ a[c] (x[c] - m)           ├ sum over ranks
    4   A = Σ a[c]                     ─┘
    5   loss = A log s - t             ─────────────────▶  g (A exp(x[c] - m) / s - a[c])

Backward needs no data of other ranks: `g`, the gradient of the loss, is the same on each.

Logits may be DTensors, as the last layer of a ``tensor_plan`` returns them. The axis of the mesh
that splits their last dimension is the group. Other logits have tags, and the group of the world.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from torchgpipe.base.structure import LOSS_BLOCK, LOSS_BLOCKS, is_plain
from torchgpipe.shard.collectives import all_reduce, compare, differences, is_read
from torchgpipe.shard.parameter import get_parallel_dim, is_made_of_shards, is_split, is_tagged
from torchgpipe.shard.world import World, needed_by

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

    def local_part(self, x: Tensor) -> Tensor:
        """Return the elements of this rank's classes, in the last dimension."""
        return x.index_select(-1, self.begin + torch.arange(self.length, device=x.device))

    def check_length(self, what: str, x: Tensor, hint: str) -> None:
        """Check that the last dimension has an element for each class."""
        raise_or_nan(
            self.number != x.size(-1),
            self.largest,
            lambda: misfit(what, x, int(self.number), hint),
        )

    def places(self, target: Tensor) -> Tensor:
        """Return the place of each target among this rank's classes, -1 if elsewhere: (N, 1)."""
        places = target.reshape(-1, 1).long() - self.begin
        return places.masked_fill((places < 0) | (places >= self.length), -1)


def exchange(logits: Tensor, dtype: torch.dtype, target: Tensor, group: ProcessGroup) -> Classes:
    """Exchange facts about classes between ranks; raise if they have different targets.

    Args:
        logits: The logits of this rank, of shape (N, classes of this rank).
    """
    rows, length = logits.shape
    rank = group.rank()
    sent = logits.new_full((rows + 4 * group.size(),), -torch.inf, dtype=dtype)
    if length:
        sent[:rows] = logits.amax(1)
    table = sent[rows:].view(-1, 4)
    checksum = _checksum(target)
    numbers: list[Any] = [length, checksum]
    for i, number in enumerate(numbers):
        table[rank, 2 * i] = number >> BITS
        table[rank, 2 * i + 1] = number % (1 << BITS)
    all_reduce(sent, group, dist.ReduceOp.MAX)
    high, low = table.long().view(-1, 2, 2).unbind(-1)
    lengths, checksums = ((high << BITS) + low).unbind(-1)
    largest = sent[:rows, None]
    raise_or_nan(
        checksums.ne(checksum).any(),
        largest,
        lambda: RuntimeError(
            'the ranks of a group have different targets, by their checksums: '
            f'{differences(checksums.tolist(), group)}. Shards of logits belong to the same '
            'samples: let all ranks of a group read the same batch'
        ),
    )
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
        if self.weight is None:
            weights = torch.ones_like(like[:, :1])
        else:
            weights = self.weight[self.places]
        return weights.masked_fill(self.target < 0, 0)

    @property
    def places(self) -> Tensor:
        """The place of each row's class; any place if the class is elsewhere."""
        return self.target.clamp(min=0)


class RowLosses(torch.autograd.Function):
    """The cross entropy of each row: shape (N,), in the type that sums are computed in."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        largest: Tensor,
        group: ProcessGroup,
        target: Tensor,
        weight: Tensor | None,
        kept: float,
        even: Tensor | None,
    ) -> Tensor:
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
            'logits, ts.distributed.gather(logits), and use torch.nn.functional.cross_entropy'
        )


def _blocks(logits: Tensor) -> Iterator[slice]:
    rows = len(logits)
    step = rows if logits.numel() <= LOSS_BLOCK else -(-rows // LOSS_BLOCKS)
    for start in range(0, rows, max(step, 1)):
        yield slice(start, start + step)


def _weighted(block: Tensor, shares: Shares) -> tuple[Tensor, Tensor]:
    """Return this rank's part of `t` and `A` for a block of `x - m`."""
    if not block.size(1):
        return block.sum(1), block.sum(1)
    if shares.target.is_floating_point():
        a = shares.probabilities(block.dtype)
        t = (a * block).sum(1)
        total = a.sum(1)
    else:
        a = shares.weights(block)
        # Even infinite logits do not count if the class is elsewhere.
        t = (block.gather(1, shares.places) * a).masked_fill(shares.target < 0, 0).view(-1)
        total = a.view(-1)
    t = shares.kept * t
    total = shares.kept * total
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
        places = shares.places
        a = shares.kept * g * shares.weights(block)
        block.scatter_(1, places, block.gather(1, places) - a)
    if shares.even is not None:
        if shares.weight is None:
            block -= shares.even * g
        else:
            block.addr_((shares.even * g).view(-1), shares.weight, alpha=-1)


_LOST = (
    'If they are shards, an operation has lost their tag: put ts.nn.RegisterParallelDim(-1) '
    'before the loss. If they are full, or each rank has samples of its own, say so by '
    'ts.nn.RegisterParallelDim(None)'
)


class ParallelCrossEntropyLoss(nn.CrossEntropyLoss):
    """Compute the cross entropy between logits, full or a shard of them, and targets.

    See :func:`ts.nn.functional.parallel_cross_entropy`, which has the same options, for shapes and
    errors.

    Args:
        weight: The weights of all classes, shape (C,).
        size_average: Deprecated by PyTorch in favour of `reduction`.
        ignore_index: A class number that does not count.
        reduce: Deprecated by PyTorch in favour of `reduction`.
        reduction: ``'mean'``, ``'sum'`` or ``'none'``.
        label_smoothing: How much of each target is spread evenly over all classes.
    """

    #: For pipelines: see :mod:`torchgpipe.base.context`.
    communicates = True

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss of logits of shape (…, C), or of this rank's shard of them."""
        return parallel_cross_entropy(
            input,
            target,
            self.weight,
            None,
            self.ignore_index,
            None,
            self.reduction,
            self.label_smoothing,
        )


def parallel_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = 'mean',
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the cross entropy between logits, full or a shard of them, and targets.

    Classes are the last dimension of logits: (C,), (N, C), (N, d, C) and so on. For logits of
    shape (N, C, d), as in :func:`torch.nn.functional.cross_entropy`, pass
    ``logits.movedim(1, -1)``.

    Logits with the tag 1 or -1 have this rank's classes, of any number, after the classes of the
    ranks before it. The loss is the same on all ranks of the group, and the gradient is this
    rank's shard of the gradient in one process. No rank gets logits of another one, or has a
    tensor of all classes: the ranks exchange some numbers for each row. Memory is needed for the
    logits, for their gradient, and for some rows at a time. Sums are computed in float32 at least.
    The loss has the same type as without shards: the logits' type, or float32 under autocast.

    The same collectives compare class numbers between ranks, and with the number of classes. The
    host does not wait for the result. On the CPU an error is raised. On accelerators the loss and
    gradients become NaN, and in the debug mode, ``TORCH_DISTRIBUTED_DEBUG=DETAIL``, an error
    explains why. The debug mode also compares shapes and types. Without it, ranks with different
    ones may wait for each other until the ``timeout`` of their group, and with gloo a process may
    end.

    Args:
        input: Logits of shape (…, C); or of shape (…, classes of this rank), tagged; or a DTensor
            of shape (…, C), whole or split in its last dimension. Without a
            tag, they are full. Two checks can detect shards without a tag: autograd has recorded
            that the logits result from a shard, or ranks find, in a further collective, that
            their logits differ. :func:`ts.register_parallel_dim` of None skips both checks.
        target: Class numbers of shape (…), counted over all ranks, the same on each of them. Or
            probabilities, either full, of shape (…, C), or a tagged shard like the logits.
        weight: The weights of all classes, shape (C,), on each rank.
        size_average: Deprecated by PyTorch in favour of `reduction`.
        ignore_index: A class number that does not count. Probabilities have none.
        reduce: Deprecated by PyTorch in favour of `reduction`.
        reduction: ``'mean'``: over rows that count, in proportion to the weight of their classes,
            or over all rows for probabilities. ``'sum'``. ``'none'``: a loss of shape (…).
        label_smoothing: How much of each target is spread evenly over all classes, from 0 to 1.

    Raises:
        IndexError: A class number is out of range. The message says which one.
        RuntimeError: There are no parallel groups; or the ranks of one have logits or class
            numbers that do not belong together; or the gradient is differentiated again.
        TypeError: Logits or targets have another type.
        ValueError: Shapes do not fit together, or there is no such option; or targets or weights
            of sharded logits need a gradient.
    """
    # A pipeline watches the divisors of losses by a mode.
    tensors = (input, target, weight)
    if has_torch_function(tensors):
        loss: Tensor = handle_torch_function(
            parallel_cross_entropy,
            tensors,
            input,
            target,
            weight,
            size_average,
            ignore_index,
            reduce,
            reduction,
            label_smoothing,
        )
        return loss

    if size_average is not None or reduce is not None:
        reduction = nn.CrossEntropyLoss(size_average=size_average, reduce=reduce).reduction
    _check_options(reduction, label_smoothing)
    options = _Options(weight, ignore_index, reduction, label_smoothing)
    if not is_plain(input):
        return _of_dtensor(input, target, options)
    world = needed_by(get_parallel_dim(input))
    _check_tensors(input, target, ignore_index)
    if world is not None and is_split(input) and world.tensor_size > 1:
        return _of_shards(input, target, options, world.tensor_group)
    return _of_full(input, target, options, world)


class _Options(NamedTuple):
    """Arguments of :func:`parallel_cross_entropy`."""

    weight: Tensor | None
    ignore_index: int
    reduction: str
    label_smoothing: float


def _of_dtensor(input: Tensor, target: Tensor, options: _Options) -> Tensor:
    """Compute the loss of logits that are a DTensor, or of another subclass that is whole."""
    from torch.distributed.tensor import DTensor  # takes long

    if not isinstance(input, DTensor):
        _check_tensors(input, target, options.ignore_index)
        return _of_full(input, target, options, None)
    last = input.dim() - 1
    group = None
    for axis, placement in enumerate(input.placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard(last) or group is not None:
            raise ValueError(
                'logits are whole or split in their last dimension, by one axis of a mesh, but '
                f'these have the placements {input.placements}: use '
                'ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)'
            )
        group = input.device_mesh.get_group(axis)
    logits = input.to_local()
    if isinstance(target, DTensor):
        target = target.full_tensor()
    _check_tensors(logits, target, options.ignore_index, input.shape)
    if group is not None and group.size() > 1:
        return _of_shards(logits, target, options, group)
    return _of_full(logits, target, options, None)


# --- checks
# ----------------------------------------------------------------------------------


def _check_options(reduction: str, label_smoothing: float) -> None:
    if reduction not in ('mean', 'sum', 'none'):
        raise ValueError(f"a reduction is 'mean', 'sum' or 'none', not {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f'label_smoothing is from 0 to 1, not {label_smoothing}')


def _check_tensors(
    input: Tensor, target: Tensor, ignore_index: int, shape: torch.Size | None = None
) -> None:
    """Check types and shapes, as far as this rank knows them.

    Args:
        shape: The shape of logits in errors; by default, the shape of this rank's.
    """
    rows = input.shape[:-1]
    shapes = f'{tuple(target.shape)} for logits of {tuple(shape or input.shape)}'
    if not input.is_floating_point() or not input.dim():
        raise TypeError(
            'logits are floating point numbers of shape (…, classes), not '
            f'{input.dtype} of shape {tuple(input.shape)}'
        )
    if get_parallel_dim(input) == 0:
        raise ValueError(
            'logits are full or split in their last dimension, but these have the '
            'parallel dimension 0: register 1, -1 or None'
        )
    if target.is_floating_point():
        if target.dim() != input.dim() or target.shape[:-1] != rows:
            raise ValueError(
                'targets in floating point are probabilities, of shape (…, C) for '
                f'logits of shape (…, C), not {shapes}; class numbers are integers: '
                'target.long()'
            )
        if ignore_index >= 0:
            raise ValueError(
                f'ignore_index={ignore_index} is a class number, and the targets are '
                'probabilities: give rows that do not count probabilities of 0'
            )
    elif target.dtype not in (torch.long, torch.uint8):
        raise TypeError(
            'targets are class numbers of torch.int64 or torch.uint8, or '
            f'probabilities, not {target.dtype}: target.long()'
        )
    elif target.shape != rows:
        raise ValueError(
            f'class numbers have shape (…) for logits of shape (…, C), not {shapes}; '
            'logits of shape (N, C, …) go in as logits.movedim(1, -1)'
        )


def _check_numbers(
    target: Tensor, classes: int | Tensor, ignore_index: int, numbers: Tensor, hint: str = ''
) -> None:
    """Check that class numbers are in range: name the first wrong one, or make its row NaN."""
    wrong = (target != ignore_index) & ((target < 0) | (target >= classes))

    def error() -> IndexError:
        place = wrong.nonzero()[0].tolist()
        number = int(classes)
        return IndexError(
            f'target{place or ""} is {target[tuple(place)].item()}, but there are {number} '
            f'classes, from 0 to {number - 1}, and ignore_index is {ignore_index}{hint}'
        )

    raise_or_nan(wrong.reshape(-1, 1), numbers, error)


def _check_length(what: str, tensor: Tensor, classes: int, hint: str) -> None:
    """Check that a tensor has an element for each class."""
    if tensor.size(-1) != classes:
        raise misfit(what, tensor, classes, hint)


# --- logits that are full
# ----------------------------------------------------------------------------------


def _of_full(
    input: Tensor,
    target: Tensor,
    options: _Options,
    world: World | None,
) -> Tensor:
    """Compute the loss of logits of all classes."""
    weight, ignore_index, reduction, label_smoothing = options
    factor = None
    if world is not None and world.tensor_size > 1 and not is_tagged(input):
        factor = _check_untagged(input, world.tensor_group)
    classes = input.size(-1)
    if weight is not None:
        _check_length('weights', weight, classes, '')
    if target.is_floating_point():
        _check_length('probabilities', target, classes, '')
        target = target.movedim(-1, 1) if target.dim() > 1 else target
    else:
        if is_read(target):  # Otherwise PyTorch checks them on the device.
            _check_numbers(
                target,
                classes,
                ignore_index,
                target,
                ''
                if factor is None
                else f'; these logits have no tag, and count as full. {_LOST}',
            )
        target = target.long()
    loss = F.cross_entropy(
        input.movedim(-1, 1) if input.dim() > 1 else input,
        target,
        weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    return loss if factor is None else loss * factor


def _check_untagged(input: Tensor, group: ProcessGroup) -> Tensor:
    """Check that logits without a tag may be full: they are the same on all ranks.

    Shards may also be equal, such as shards of weights that are zero; the graph has their origin.
    Return a factor for the loss: 1, or NaN for an error on a device that the host does not read.
    """
    if is_made_of_shards(input):
        raise RuntimeError(
            "logits without a tag follow from this rank's shard of a layer, and no "
            f'gather or reduce has put them together. {_LOST}'
        )
    x = input.detach()
    total = x.sum(dtype=torch.float64)
    facts = torch.stack([total, -total, torch.linalg.vector_norm(x, dtype=torch.float64)])
    largest, negated_smallest, norm = all_reduce(facts, group, dist.ReduceOp.MAX)
    factor = torch.ones_like(largest)
    raise_or_nan(
        largest + negated_smallest > 1e-3 * norm,
        factor,
        lambda: RuntimeError(
            'the ranks of a group have different logits without a tag, so these are not full. '
            f'{_LOST}'
        ),
    )
    return factor.to(input.dtype)


# --- logits with classes split over ranks
# ----------------------------------------------------------------------------------


def _of_shards(
    input: Tensor,
    target: Tensor,
    options: _Options,
    group: ProcessGroup,
) -> Tensor:
    """Compute the loss of logits with classes split over the ranks of a group."""
    weight, ignore_index, reduction, label_smoothing = options
    _check_gradients(target, weight)
    logits = _as_rows(input)
    probable = target.is_floating_point()
    dtype = torch.promote_types(input.dtype, target.dtype) if probable else input.dtype
    sums = torch.promote_types(dtype, torch.float32)
    rows = ', '.join([*map(str, input.shape[:-1]), 'classes'])
    # The sums that ranks exchange have another type, so this compares the types of the inputs.
    compare(
        f'parallel_cross_entropy: logits of {input.dtype} and shape ({rows}), targets of '
        f'{target.dtype}',
        group,
    )
    classes = exchange(logits.detach(), sums, target, group)
    if weight is not None:
        classes.check_length('weights', weight, ': each rank needs those of all classes')
    if probable:
        local_target = _probabilities(target, classes)
    else:
        _check_numbers(target, classes.number, ignore_index, classes.largest)
        local_target = classes.places(target)
    losses: Tensor = RowLosses.apply(  # type: ignore[no-untyped-call]
        logits,
        classes.largest,
        group,
        local_target,
        None if weight is None else classes.local_part(weight).to(sums),
        1 - label_smoothing,
        label_smoothing / classes.number.to(sums) if label_smoothing else None,
    )
    loss = _reduce(losses.view(input.shape[:-1]), target, weight, ignore_index, reduction)
    return loss.to(sums if torch.is_autocast_enabled(input.device.type) else dtype)


def _check_gradients(target: Tensor, weight: Tensor | None) -> None:
    """Raise if targets or weights need a gradient."""
    if torch.is_grad_enabled() and (
        target.requires_grad or weight is not None and weight.requires_grad
    ):
        raise ValueError(
            'sharded logits get a gradient, but not their targets or weights: '
            'detach() these, or gather the logits, ts.distributed.gather(logits)'
        )


def _as_rows(x: Tensor) -> Tensor:
    """Return a tensor of rows, whatever the number of dimensions."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def _probabilities(target: Tensor, classes: Classes) -> Tensor:
    """Return the probabilities of this rank's classes: (N, classes of this rank)."""
    if is_split(target):
        _check_length('shards of probabilities', target, classes.length, ' of this rank')
        return _as_rows(target)
    classes.check_length(
        'probabilities',
        target,
        '; if they are a shard, they need the tag of one: ts.register_parallel_dim(target, -1)',
    )
    return classes.local_part(_as_rows(target))


def _reduce(
    losses: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str
) -> Tensor:
    """Leave out ignored rows, and reduce."""
    counts = torch.ones_like(losses)
    if not target.is_floating_point():
        ignored = target == ignore_index
        losses = losses.masked_fill(ignored, 0)
        if weight is not None:
            counts = weight[target.long().masked_fill(ignored, 0)].to(losses.dtype)
        counts = counts.masked_fill(ignored, 0)
    if reduction == 'none':
        return losses
    if reduction == 'mean':
        return losses.sum() / counts.sum()
    return losses.sum()
