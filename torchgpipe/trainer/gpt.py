"""GPT-2 and minGPT, as they are written, as layers in a row, and as they are split over processes.

GPT-2 is of Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; its
parameters have the names of transformers. minGPT (https://github.com/karpathy/minGPT) is the same
with a head of its own. There is no dropout, so that numbers can be compared.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torchgpipe.distributed import SequenceColwiseParallel
from torchgpipe.sequential import from_stages
from torchgpipe.shard.nn import Experts
from torchgpipe.shard.nn.functional import parallel_cross_entropy
from torchgpipe.trainer.attention import attend, by_heads, heads_of


class Sizes(NamedTuple):
    """How large a GPT is.

    Attributes:
        vocabulary: How many tokens there are.
        context: How many of them it sees at once, at most.
        width: The features of a token.
        heads: The heads that share them.
        depth: How many blocks there are.
        tied: Whether the head has the weight of the embedding.
    """

    vocabulary: int = 50257
    context: int = 1024
    width: int = 768
    heads: int = 12
    depth: int = 12
    tied: bool = True


#: The sizes that were published, by the names of transformers.
GPT2 = {
    'gpt2': Sizes(),
    'gpt2-medium': Sizes(width=1024, heads=16, depth=24),
    'gpt2-large': Sizes(width=1280, heads=20, depth=36),
    'gpt2-xl': Sizes(width=1600, heads=25, depth=48),
}

#: Sizes that only minGPT has.
MINGPT = {
    'gopher-44m': Sizes(width=512, heads=16, depth=8, tied=False),
    'gpt-mini': Sizes(width=192, heads=6, depth=6, tied=False),
    'gpt-micro': Sizes(width=128, heads=4, depth=4, tied=False),
    'gpt-nano': Sizes(width=48, heads=3, depth=3, tied=False),
}


class Embedding(nn.Embedding):
    """An embedding with small initial values, which a head may have, too."""

    def reset_parameters(self) -> None:
        """Draw them."""
        nn.init.normal_(self.weight, std=0.02)


class Attention(nn.Module):
    """Attention of each token to those up to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads_of(self.c_attn(x), 3, self.size).unbind(-2)
        y: Tensor = self.c_proj(attend(q, k, v, causal=True))
        return y


class MLP(nn.Module):
    """A network of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate='tanh'))
        return y


class Block(nn.Module):
    """Attention, and a network, each behind a norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.attn = Attention(sizes.width, sizes.heads)
        self.mlp = MLP(sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        y: Tensor = x + self.mlp(self.ln_2(x))
        return y


class GPT(nn.Module):
    """The scores of the next token, of shape (N, T, vocabulary), for tokens of shape (N, T)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        embedding = Embedding(sizes.vocabulary, sizes.width)
        self.transformer: Any = nn.ModuleDict(
            {
                'wte': embedding,
                'wpe': Embedding(sizes.context, sizes.width),
                'h': nn.ModuleList(Block(sizes) for _ in range(sizes.depth)),
                'ln_f': nn.LayerNorm(sizes.width),
            }
        )
        self.lm_head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.lm_head.weight = embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = embed(self, tokens)
        for block in self.transformer.h:
            x = block(x)
        return score(self, x)


def embed(model: Any, tokens: Tensor) -> Tensor:
    """Return the features of tokens and of their positions."""
    positions = torch.arange(tokens.size(1), device=tokens.device)
    x: Tensor = model.transformer.wte(tokens) + model.transformer.wpe(positions)
    return x


def score(model: Any, x: Tensor) -> Tensor:
    """Return the scores of tokens."""
    y: Tensor = model.lm_head(model.transformer.ln_f(x))
    return y  # or `Unscored`


class Unscored(NamedTuple):
    """The features of tokens, and the weight of the head, by which a loss computes scores.

    Attributes:
        features: A tensor of shape (N, T, width).
        weight: A tensor of shape (vocabulary, width).
    """

    features: Tensor
    weight: Tensor


class UnscoredHead(nn.Linear):
    """A head that leaves the scores to the loss."""

    def forward(self, x: Tensor) -> Unscored:  # type: ignore[override]
        return Unscored(x, self.weight)


def layers(model: Any, with_scores: bool = True) -> nn.Sequential:
    """Return the layers of a GPT in a row: the embedding, each block, the head.

    Args:
        with_scores: Whether the head returns scores. Otherwise it returns :class:`Unscored`, for
            :func:`chunked_cross_entropy`.
    """
    if not with_scores:
        model.lm_head.__class__ = UnscoredHead
    tokens = torch.zeros(1, 1, dtype=torch.long, device=model.lm_head.weight.device)
    return from_stages(model, [embed, *model.transformer.h, score], tokens, check_sample=False)


def chunked_cross_entropy(output: Unscored, target: Tensor, size: int) -> Tensor:
    """Return the mean over tokens of cross entropy, with the scores of a few tokens at a time.

    ::

        features │ chunk 0 │ chunk 1 │ chunk 2 │
        scores     s0 ─▶ loss, gradients of features and weight
                             s1 ─▶ …
                                       s2 ─▶ …

    PyTorch's ``linear_cross_entropy`` does this for whole scores of float32 or float64. Others
    are computed again in backward.

    Args:
        target: The next token of each token, of shape (N, T).
        size: The number of tokens of a chunk.
    """
    features, weight = output
    if isinstance(weight, DTensor):
        if not isinstance(features, DTensor):
            features = DTensor.from_local(features, weight.device_mesh, run_check=False)
        features = features.redistribute(placements=[Replicate()])
    features = features.flatten(0, 1)
    target = target.flatten()

    is_split = isinstance(weight, DTensor)
    # In bfloat16, its loss has three digits, and the weights of micro-batches are rounded to it.
    is_coarse = torch.is_autocast_enabled(features.device.type)
    if hasattr(F, 'linear_cross_entropy') and not (is_split or is_coarse):
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=size)
        return F.linear_cross_entropy(features, weight, target, options=options)

    losses = []
    for x, labels in zip(features.split(size), target.split(size)):
        losses.append(checkpoint(_summed_loss, x, weight, labels, use_reentrant=False))
    total: Tensor = sum(losses)
    return total / len(target)


def _summed_loss(features: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Return the sum over tokens of cross entropy."""
    return parallel_cross_entropy(F.linear(features, weight), target, reduction='sum')


#: The features of tokens, (N, T, width), and the auxiliary loss of each token, (N, T).
Value = tuple[Tensor, Tensor]


class First(nn.Module):
    """The embedding; auxiliary losses begin at zero."""

    def __init__(self, embed: nn.Module) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, tokens: Tensor) -> Value:
        x = self.embed(tokens)
        return x, x.new_zeros(tokens.shape)


class Mixture(nn.Module):
    """A block whose network is a mixture of experts, each of the size of the network.

    Each token uses two experts at most.
    """

    def __init__(self, sizes: Sizes, experts: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(sizes.width), nn.LayerNorm(sizes.width)
        self.attn = Attention(sizes.width, sizes.heads)
        self.experts = Experts(sizes.width, 4 * sizes.width, experts, min(2, experts))

    def forward(self, value: Value) -> Value:
        x, losses = value
        x = x + self.attn(self.ln_1(x))
        y, loss = self.experts(self.ln_2(x))
        return x + y, losses + loss


class Last(nn.Module):
    """The head, which passes auxiliary losses on."""

    def __init__(self, score: nn.Module) -> None:
        super().__init__()
        self.score = score

    def forward(self, value: Value) -> Value:
        return self.score(value[0]), value[1]


def layers_with_experts(sizes: Sizes, experts: int, with_scores: bool = True) -> nn.Sequential:
    """Return the layers of a GPT whose networks are mixtures of experts.

    ::

        tokens ──▶ First ──▶ Mixture ──▶ … ──▶ Last ──▶ scores       (N, T, vocabulary)
                     0 ─────── + ──────────────── ▶ ──▶ auxiliary    (N, T)
    """
    embed, score = layers(GPT(sizes._replace(depth=0)), with_scores)
    return nn.Sequential(
        First(embed), *(Mixture(sizes, experts) for _ in range(sizes.depth)), Last(score)
    )


def parameter_counts(sizes: Sizes, experts: int = 0) -> tuple[int, int]:
    """Return the number of parameters, and of those that a token uses.

    Args:
        sizes: The sizes.
        experts: The number of experts of a block, of which a token uses two; 0 without experts.
    """
    with torch.device('meta'):
        module = layers_with_experts(sizes, experts) if experts else layers(GPT(sizes))
    total = in_experts = 0
    for name, parameter in module.named_parameters():
        total += parameter.numel()
        if '.experts.' in name and '.router' not in name:
            in_experts += parameter.numel()
    if not experts:
        return total, total
    return total, total - in_experts + in_experts * min(2, experts) // experts


def init_gpt2(module: nn.Module, depth: int) -> None:
    """Draw the initial values of one module as GPT-2 does.

    Weights have a standard deviation of 0.02, and biases are 0. Weights of projections into the
    residual stream are smaller by the square root of their number, ``2 * depth``.
    """
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, (Attention, MLP)):  # after the modules in it
        nn.init.normal_(module.c_proj.weight, std=0.02 / (2 * depth) ** 0.5)


class SplitByVocabulary(ParallelStyle):
    """Split the weight of a head by its rows, and leave its input and its output as they are."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        rows = distribute_tensor(module.weight, device_mesh, [Shard(0)])
        module.weight = nn.Parameter(rows, module.weight.requires_grad)
        split: nn.Module = module
        return split


def tensor_plan(
    sequence_parallel: bool = False, with_scores: bool = True, experts: bool = False
) -> dict[str, Any]:
    """Return how a GPT is split: by vocabulary, by heads, and by the features of networks.

    The scores stay split by vocabulary, so their loss is
    :func:`torchgpipe.shard.nn.functional.parallel_cross_entropy`.

    Args:
        sequence_parallel: Whether ranks also divide norms and the sums between blocks, by tokens
            (Korthikanti et al., 2022). Stages then exchange the tokens of a rank::

                embedding ─ scatter ─ norm ─ gather ─ c_attn ─ attention ─ c_proj ─ reduce, scatter
                            └─ tokens of a rank ─┘    └──── heads of a rank ────┘   └─ tokens …
        with_scores: Whether the head returns scores: see :func:`layers`.
        experts: Whether networks are mixtures of experts, which each rank has whole.
    """
    plan: dict[str, Any] = {
        '*.wte': RowwiseParallel(input_layouts=Replicate()),
        '*.c_attn': ColwiseParallel(),
        '*.c_fc': ColwiseParallel(),
        '*.c_proj': RowwiseParallel(),
        '*lm_head': ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence_parallel:
        # The embedding of positions is whole on each rank, so the sum is divided after it.
        plan['0'] = PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(1)
        )
        plan['*.ln_*'] = SequenceParallel()
        plan['*.c_attn'] = SequenceColwiseParallel()
        plan['*.c_fc'] = SequenceColwiseParallel()
        plan['*.c_proj'] = RowwiseParallel(output_layouts=Shard(1))
        plan['*lm_head'] = SequenceColwiseParallel(use_local_output=False)
    if not with_scores:
        plan['*lm_head'] = SplitByVocabulary()
    if experts:
        del plan['*.c_fc']
    return plan


def from_hugging_face(state_dict: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Return weights of a GPT, or of its layers, from weights of ``GPT2LMHeadModel``.

    That model has transposed weights of linear layers, and queries, keys and values in the order
    of the paper.
    """
    weights = {}
    for name, x in state_dict.items():
        if name.endswith(('c_attn.weight', 'c_proj.weight', 'c_fc.weight')):
            x = x.t()
        weights[name] = by_heads(x, heads) if '.c_attn.' in name else x
    return weights
