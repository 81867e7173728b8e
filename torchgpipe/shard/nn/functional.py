"""Functions of sharded layers, on this rank's shards of their weights."""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchgpipe.shard.collectives import all_gather, all_sizes
from torchgpipe.shard.distributed import copy, gather, reduce_, scatter
from torchgpipe.shard.nn.loss import parallel_cross_entropy
from torchgpipe.shard.parameter import (
    check_dim,
    find,
    global_shape,
    is_split,
    is_tagged,
    knows_shape,
    lengths,
    local_range,
    register_parallel_dim,
    set_attribute,
    storage_dim,
    tagged_full,
    to_storage,
)
from torchgpipe.shard.world import World, current

__all__ = ['parallel_cross_entropy', 'parallel_embedding', 'parallel_linear', 'set_attribute']


def parallel_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, dim: int | None = None
) -> Tensor:
    """Apply a linear map split over ranks, by the tag of its weight or by ``dim``.

    Args:
        input: A tensor of shape (…, inputs). It is full; if the weight's inputs are split, it may
            also be this rank's shard, tagged -1.
        weight: This rank's shard: of shape (outputs / n, inputs) with the parallel dimension 1 or
            -1, (outputs, inputs / n) with 0, and the full weight with None.
        bias: This rank's shard of the bias in the first case, and the full bias otherwise.
        dim: The parallel dimension of a weight without a tag. None uses the tag; without either,
            the weight is full.

    Returns:
        A tensor of shape (…, outputs), full; or (…, outputs / n), tagged -1, in the first case.

    Raises:
        ValueError: The input does not fit the weight, or the weight has another ``dim``.
    """
    storage = _storage(weight, dim, 0, 'parallel_linear')
    # A linear layer's parallel dimension 0 splits dimension 1 in memory, and vice versa.
    parallel_dim = None if storage is None else 1 - storage
    return linear(input, weight, bias, parallel_dim, None, 'parallel_linear')


def _storage(weight: Tensor, dim: int | None, order: int, name: str) -> int | None:
    """Return the dimension in memory along which a weight is split, by its tag or by ``dim``."""
    storage = to_storage(check_dim(dim), order)
    if not is_tagged(weight):
        return storage
    if storage not in (None, storage_dim(weight)):
        raise ValueError(
            f'{name} is called with dim={dim}, which splits dimension {storage} of a weight in '
            f'memory, and this weight is tagged as split along {storage_dim(weight)}: leave dim '
            'out, or tag the weight as it is split by ts.set_attribute'
        )
    return storage_dim(weight)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dim: int | None,
    in_features: int | None,
    name: object,
) -> Tensor:
    """Apply a linear map, as :func:`parallel_linear` does; errors name the layer."""
    if dim == 0:
        world = current()
        x = _shard_of_input(x, weight, in_features, world, name)
        if world.tensor_size > 1:
            y = reduce_(F.linear(x, weight))
            return y if bias is None else tagged_full(y.add_(bias))
        return tagged_full(F.linear(x, weight, bias))
    if is_split(x):
        raise ValueError(
            f'{name} takes a full input, and this one is tagged as a shard: '
            'put it together by ts.distributed.gather'
        )
    if x.size(-1) != weight.size(1):
        raise _misfit(x, name, f'a full one has {weight.size(1)}')
    if dim is None:
        return tagged_full(F.linear(x, weight, bias))
    y = F.linear(copy(x), weight, bias)
    register_parallel_dim(y, -1)
    return y


def _shard_of_input(
    x: Tensor, weight: Tensor, in_features: int | None, world: World, name: object
) -> Tensor:
    """Return this rank's shard of an input that is full, or that is the shard already."""
    length = weight.size(1)
    if is_split(x):
        if x.size(-1) != length:
            raise ValueError(
                f'{name}: the input is tagged as a shard, and has {x.size(-1)} '
                f'features; the shard of rank {world.tensor_rank} has {length}'
            )
        return x
    if in_features not in (None, x.size(-1)):
        raise _misfit(x, name, f'a full one has {in_features}')
    if local_range(x.size(-1))[1] != length:
        raise _misfit(x, name, f'the shard of rank {world.tensor_rank} has {length}')
    return scatter(x)


def _misfit(x: Tensor, name: object, other: str) -> ValueError:
    return ValueError(
        f'{name}: the input has {x.size(-1)} features, and no tag says that it is a shard; '
        f"{other}. If it is this rank's shard, an operation has lost its tag: put "
        'ts.nn.RegisterParallelDim(-1) after that operation'
    )


def parallel_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    num_embeddings: int | None = None,
    dim: int | None = None,
) -> Tensor:
    """Look up rows of a table split over ranks, by the tag of its weight or by ``dim``.

    Args:
        input: Numbers of rows of the full table, the same on all ranks of the group.
        weight: This rank's shard: some rows with the parallel dimension 0, some columns with 1 or
            -1, and the full table with None.
        padding_idx: A row of the full table that gets no gradient.
        max_norm: Rows that are looked up are scaled, in place, to at most this norm.
        norm_type: The p of that norm.
        scale_grad_by_freq: Whether a row's gradient is divided by how often it was looked up.
        sparse: Whether the gradient of the weight is a sparse tensor.
        num_embeddings: The number of rows of the full table. The weight of a sharded layer has
            it; it is required for other weights that are split along their rows.
        dim: The parallel dimension of a weight without a tag. None uses the tag; without either,
            the weight is full.

    Returns:
        The rows, full on each rank, of shape (…, features) for an input of shape (…).

    Raises:
        IndexError: A number is out of range.
        ValueError: The weight has another ``dim``, or does not fit ``num_embeddings`` rows.
    """
    storage = _storage(weight, dim, 1, 'parallel_embedding')
    return embedding(
        input,
        weight,
        _table(weight, storage, num_embeddings),
        storage,
        padding_idx,
        max_norm,
        norm_type,
        scale_grad_by_freq,
        sparse,
    )


def _table(weight: Tensor, dim: int | None, number: int | None) -> tuple[int, int]:
    """Return the shape of the full table; raise if this rank's shard does not fit its rows."""
    rows, columns = weight.shape
    if dim is None or knows_shape(weight):
        rows, columns = global_shape(weight)
    elif dim == 1:
        columns = sum(all_sizes(weight, current().tensor_group, 1))
    elif number is None:
        raise ValueError(
            'parallel_embedding takes num_embeddings, the number of rows of the '
            f'full table, as a weight of shape {tuple(weight.shape)} does not know '
            'it'
        )
    else:
        world = current()
        length = local_range(number)[1]
        if length != rows:
            raise ValueError(
                f'parallel_embedding: of num_embeddings={number} rows, the shard of rank '
                f'{world.tensor_rank} of {world.tensor_size} is {length}, and this weight has '
                f'{rows}'
            )
        rows = number
    if number not in (None, rows):
        raise ValueError(
            f'parallel_embedding is called with num_embeddings={number}, and the '
            f'full table has {rows} rows: leave it out'
        )
    return rows, columns


def embedding(
    ids: Tensor,
    weight: Tensor,
    shape: tuple[int, ...],
    dim: int | None,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> Tensor:
    """Look up rows, as :func:`parallel_embedding` does; ``dim`` is a dimension in memory."""
    rows, columns = shape
    if padding_idx is not None and padding_idx < 0:
        padding_idx += rows
    rest = norm_type, scale_grad_by_freq, sparse
    if dim == 0 and current().tensor_size > 1:
        return _of_some_rows(ids, weight, rows, padding_idx, max_norm, *rest)
    if dim == 1 and current().tensor_size > 1:
        if max_norm is not None:
            _scale_rows(ids, weight, columns, max_norm, norm_type)
        return gather(F.embedding(ids, weight, padding_idx, None, *rest), size=columns)
    return tagged_full(F.embedding(ids, weight, padding_idx, max_norm, *rest))


def _of_some_rows(
    ids: Tensor,
    weight: Tensor,
    number: int,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    scale_grad_by_freq: bool,
    sparse: bool,
) -> Tensor:
    """Look up in a table with rows split over ranks; each rank uses zeros for other rows."""
    wrong = ids[(ids < 0) | (ids >= number)]
    if len(wrong):
        raise IndexError(f'{int(wrong[0])} is not the number of a row in a table of {number}')
    begin, length = local_range(number)
    # Only rows of this rank: others would count as looked up, for `max_norm` and the frequency.
    flat = ids.reshape(-1)
    places = ((flat >= begin) & (flat < begin + length)).nonzero()[:, 0]
    padding = None if padding_idx is None else find(padding_idx, number)
    rows = F.embedding(
        flat[places] - begin, weight, padding, max_norm, norm_type, scale_grad_by_freq, sparse
    )
    term = rows.new_zeros(len(flat), weight.size(1)).index_copy(0, places, rows)
    return tagged_full(reduce_(term).view(*ids.shape, weight.size(1)))


@torch.no_grad()
def _scale_rows(
    ids: Tensor, weight: Tensor, columns: int, max_norm: float, norm_type: float
) -> None:
    """Scale looked-up rows to at most a norm, over all columns."""
    group = current().tensor_group
    rows = ids.unique()
    full = all_gather(weight[rows], group, 1, lengths(columns, group.size()))
    norm = full.norm(norm_type, 1)
    scale = torch.where(norm > max_norm, max_norm / (norm + 1e-7), 1)  # as nn.Embedding has it
    weight[rows] *= scale[:, None]
