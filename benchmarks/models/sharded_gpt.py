"""The GPT of `benchmarks.models.gpt`, split over the processes of a parallel group.

What is different is five layers, and two tags where an operation loses them. Its parameters have
the same names and, after the same seed, each rank's have its part of the same values::

    tokens       some tokens of the vocabulary                   (vocabulary / n, width)
    attention    whole heads: their queries, keys and values     (3 width / n, width)
    projection   takes the features of these heads               (width, width / n)
    expand       some features                                   (4 width / n, width)
    contract     takes these features                            (width, 4 width / n)
    head         the scores of some tokens                       (vocabulary / n, width)

All ranks of the group read the same batch. Norms and positions are whole on each, and are the same
there as long as their gradients are, which they are by construction.
"""
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchgpipe.shard as ts
from benchmarks.models.gpt import Sizes

__all__ = ['ShardedBlock', 'ShardedGPT']


class ShardedGPT(nn.Module):
    """The scores of this rank's tokens, of shape (N, T, vocabulary / n), for tokens (N, T)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = ts.nn.ParallelEmbedding(sizes.vocabulary, sizes.width, dim=0)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.Sequential(*[ShardedBlock(sizes) for _ in range(sizes.depth)])
        self.norm = nn.LayerNorm(sizes.width)
        self.head = ts.nn.ParallelLinear(sizes.width, sizes.vocabulary, bias=False, dim=1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        y: Tensor = self.head(self.norm(self.blocks(x)))
        return y


class ShardedBlock(nn.Module):
    """Attention by this rank's heads, and its part of a network of two layers.

    Raises:
        ValueError: The ranks of the group can not have whole heads each.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        ranks, width = ts.distributed.get_group_size(), sizes.width
        if sizes.heads % ranks:
            raise ValueError(f'{sizes.heads} heads can not be shared by {ranks} processes: each '
                             'has as many, and whole ones')
        self.features = width // sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = ts.nn.ParallelLinear(width, 3 * width, dim=1)
        self.projection = ts.nn.ParallelLinear(width, width, dim=0)
        self.expand = ts.nn.ParallelLinear(width, 4 * width, dim=1)
        self.contract = ts.nn.ParallelLinear(4 * width, width, dim=0)
        self.split = ts.nn.RegisterParallelDim(-1)

    def forward(self, x: Tensor) -> Tensor:
        # The features of a head's queries, keys and values lie side by side: (N, heads, T, 3, …).
        heads = self.attention(self.norm1(x)).unflatten(-1, (-1, 3, self.features)).transpose(1, 2)
        y = F.scaled_dot_product_attention(*heads.unbind(-2), is_causal=True)
        x = x + self.projection(self.split(y.transpose(1, 2).flatten(-2)))
        y = F.gelu(self.expand(self.norm2(x)))
        return x + self.contract(self.split(y))
