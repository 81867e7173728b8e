"""Attention over whole heads, as many as a process has of them.

Queries, keys and values come from one linear layer. Its outputs are ordered by heads, so that a
shard of them is some heads, with all that these need::

    as papers write them        q0 q1 q2 …   k0 k1 k2 …   v0 v1 v2 …
    here                        q0 k0 v0   q1 k1 v1   q2 k2 v2 …
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return the output of attention, (N, T, heads · size), from queries, keys and values.

    Each of them is of shape (N, T, heads, size).
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return y.transpose(1, 2).flatten(-2)


def heads_of(x: Tensor, *sizes: int) -> Tensor:
    """Return the last dimension of a tensor as heads of some sizes: (…, heads, *sizes).

    Raises:
        ValueError: The last one is not a whole head.
    """
    size = torch.Size(sizes).numel()
    if x.size(-1) % size:
        raise ValueError(
            f'{x.size(-1)} features are {x.size(-1) / size:.2f} heads of {size}, and '
            'have to be whole ones: the number of heads is divisible by that of the '
            'ranks along the tensor axis'
        )
    heads: Tensor = x.unflatten(-1, (-1, *sizes))
    return heads


def by_heads(x: Tensor, heads: int) -> Tensor:
    """Return a weight or a bias of queries, then keys, then values, in the order of heads."""
    split: Tensor = x.unflatten(0, (3, heads, -1))
    return split.transpose(0, 1).flatten(0, 2)
