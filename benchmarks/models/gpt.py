"""A GPT as one process has it, of layers of torch.nn."""
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ['GPT', 'Block', 'Sizes']


class Sizes(NamedTuple):
    """How large a GPT is.

    Attributes:
        vocabulary: How many tokens there are.
        context: How many of them it sees at once, at most.
        width: The features of a token.
        heads: The heads that share them.
        depth: How many blocks there are.
    """

    vocabulary: int
    context: int = 64
    width: int = 64
    heads: int = 4
    depth: int = 3


class GPT(nn.Module):
    """The scores of the next token, of shape (N, T, vocabulary), for tokens of shape (N, T)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.context, sizes.width)
        self.blocks = nn.Sequential(*[Block(sizes) for _ in range(sizes.depth)])
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        y: Tensor = self.head(self.norm(self.blocks(x)))
        return y


class Block(nn.Module):
    """Attention, and a network of two layers."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.features = width // sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        # The features of a head's queries, keys and values lie side by side: (N, heads, T, 3, …).
        heads = self.attention(self.norm1(x)).unflatten(-1, (-1, 3, self.features)).transpose(1, 2)
        y = F.scaled_dot_product_attention(*heads.unbind(-2), is_causal=True)
        x = x + self.projection(y.transpose(1, 2).flatten(-2))
        y = F.gelu(self.expand(self.norm2(x)))
        return x + self.contract(y)
