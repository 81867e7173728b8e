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
    y = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
    return y.transpose(1, 2).flatten(-2)


def heads_of(x: Tensor, *sizes: int) -> Tensor:
    """Return the last dimension of a tensor as heads of some sizes: (…, heads, *sizes).

    Raises:
        ValueError: The last one is not a whole head.
    """
    each = torch.Size(sizes).numel()
    if x.size(-1) % each:
        raise ValueError(
            f'{x.size(-1)} features are {x.size(-1) / each:.2f} heads of {each}, and '
            'have to be whole ones: the number of heads is divisible by that of the '
            'ranks along the tensor axis'
        )
    return x.unflatten(-1, (-1, *sizes))


def by_heads(x: Tensor, heads: int) -> Tensor:
    """Return a weight or a bias of queries, then keys, then values, in the order of heads."""
    return x.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
