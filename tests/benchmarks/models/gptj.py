"""GPT-J, as it is written, as layers in a row, and as it is split over processes.

Wang and Komatsuzaki, "GPT-J-6B: A 6 Billion Parameter Autoregressive Language Model", 2021
(https://github.com/kingoflolz/mesh-transformer-jax), with the rotary positions of Su et al.,
"RoFormer", 2021 (arXiv 2104.09864). Its parameters have the names of transformers. By default it
has the published size: 6,050,882,784 parameters.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchgpipe.sequential import from_stages
from torchgpipe.trainer.attention import attend, heads_of
from torchgpipe.trainer.gpt import Embedding, score


class Sizes(NamedTuple):
    """How large a GPT-J is.

    Attributes:
        vocabulary: How many tokens there are.
        width: The features of a token.
        heads: The heads that share them.
        depth: How many blocks there are.
        rotary: How many features of a head are turned by the position.
    """

    vocabulary: int = 50400
    width: int = 4096
    heads: int = 16
    depth: int = 28
    rotary: int = 64


def turned(x: Tensor, rotary: int) -> Tensor:
    """Turn pairs of the first features of heads, (N, T, heads, size), by angles of positions."""
    # Positions beyond 256 are no numbers of bfloat16.
    exact = torch.promote_types(x.dtype, torch.float32)
    pairs = torch.arange(0, rotary, 2, device=x.device, dtype=exact)
    positions = torch.arange(x.size(1), device=x.device, dtype=exact)
    angles = positions[:, None, None] * 10000 ** (-pairs / rotary)
    sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    a, b = x[..., :rotary:2], x[..., 1:rotary:2]
    y = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([y, x[..., rotary:]], -1)


class Attention(nn.Module):
    """Attention of each token to those up to it, whose positions turn queries and keys."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.size, self.rotary = sizes.width // sizes.heads, sizes.rotary
        self.k_proj = nn.Linear(sizes.width, sizes.width, bias=False)
        self.v_proj = nn.Linear(sizes.width, sizes.width, bias=False)
        self.q_proj = nn.Linear(sizes.width, sizes.width, bias=False)
        self.out_proj = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            heads_of(linear(x), self.size) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        y: Tensor = self.out_proj(attend(turned(q, self.rotary), turned(k, self.rotary), v, True))
        return y


class MLP(nn.Module):
    """A network of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc_in = nn.Linear(width, 4 * width)
        self.fc_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc_out(F.gelu(self.fc_in(x), approximate='tanh'))
        return y


class Block(nn.Module):
    """Attention beside a network, behind one norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(sizes.width)
        self.attn = Attention(sizes)
        self.mlp = MLP(sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        z: Tensor = self.attn(y) + self.mlp(y) + x
        return z


class GPTJ(nn.Module):
    """The scores of the next token, of shape (N, T, vocabulary), for tokens of shape (N, T)."""

    def __init__(self, sizes: Sizes = Sizes()) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                'wte': Embedding(sizes.vocabulary, sizes.width),
                'h': nn.ModuleList(Block(sizes) for _ in range(sizes.depth)),
                'ln_f': nn.LayerNorm(sizes.width),
            }
        )
        self.lm_head = nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer.wte(tokens)
        for block in self.transformer.h:
            x = block(x)
        return score(self, x)


def layers(model: Any) -> nn.Sequential:
    """Return the layers of a GPT-J in a row: the embedding, each block, the head."""
    tokens = torch.zeros(1, 1, dtype=torch.long, device=model.lm_head.weight.device)
    return from_stages(
        model, [model.transformer.wte, *model.transformer.h, score], tokens, check_sample=False
    )


def tensor_plan() -> dict[str, Any]:
    """Return how a GPT-J is split: by vocabulary, by heads, and by the features of networks.

    The scores stay split, as in :func:`torchgpipe.trainer.gpt.tensor_plan`.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        '*.wte': RowwiseParallel(input_layouts=Replicate()),
        '*.[qkv]_proj': ColwiseParallel(),
        '*.fc_in': ColwiseParallel(),
        '*.out_proj': RowwiseParallel(),
        '*.fc_out': RowwiseParallel(),
        '*lm_head': ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
