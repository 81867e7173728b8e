"""Vision transformers, as they are written, as layers in a row, and as they are split.

Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020 (arXiv 2010.11929).
Its parameters have the names of timm. There is no dropout, so that numbers can be compared.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchgpipe.sequential import from_stages
from torchgpipe.trainer.attention import attend, by_heads, heads_of


class Sizes(NamedTuple):
    """How large a vision transformer is.

    Attributes:
        width: The features of a patch.
        heads: The heads that share them.
        depth: The number of blocks. classes: The number of classes. image: The height and the
        width of an image. patch: The height and the width of a patch.
    """

    width: int = 768
    heads: int = 12
    depth: int = 12
    classes: int = 1000
    image: int = 224
    patch: int = 16


#: The sizes that were published.
VIT = {'ViT-B/16': Sizes(), 'ViT-L/16': Sizes(width=1024, heads=16, depth=24)}


class PatchEmbed(nn.Module):
    """The features of patches, (N, patches, width), for images, (N, 3, height, width)."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, sizes.width, sizes.patch, stride=sizes.patch)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.proj(x)
        return y.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Attention of each patch to all."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.size = sizes.width // sizes.heads
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        self.proj = nn.Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads_of(self.qkv(x), 3, self.size).unbind(-2)
        y: Tensor = self.proj(attend(q, k, v, causal=False))
        return y


class MLP(nn.Module):
    """A network of two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return y


class Block(nn.Module):
    """Attention, and a network, each behind a norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(sizes.width, eps=1e-6)
        self.attn = Attention(sizes)
        self.norm2 = nn.LayerNorm(sizes.width, eps=1e-6)
        self.mlp = MLP(sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """The scores of classes, of shape (N, classes), for images of shape (N, 3, height, width)."""

    def __init__(self, sizes: Sizes = Sizes()) -> None:
        super().__init__()
        self.image = sizes.image
        self.patch_embed = PatchEmbed(sizes)
        patches = (sizes.image // sizes.patch) ** 2
        self.cls_token = nn.Parameter(torch.empty(1, 1, sizes.width))
        self.pos_embed = nn.Parameter(torch.empty(1, patches + 1, sizes.width))
        self.blocks = nn.Sequential(*[Block(sizes) for _ in range(sizes.depth)])
        self.norm = nn.LayerNorm(sizes.width, eps=1e-6)
        self.head = nn.Linear(sizes.width, sizes.classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values of the class token and of positions, where they are."""
        for x in self.parameters(recurse=False):  # Its layers are reset by this, too.
            nn.init.normal_(x, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return score(self, self.blocks(embed(self, x)))


def embed(model: Any, x: Tensor) -> Tensor:
    """Return the features of the class token and of patches, with their positions."""
    patches = model.patch_embed(x)
    y: Tensor = torch.cat([model.cls_token.expand(len(x), -1, -1), patches], 1) + model.pos_embed
    return y


def score(model: Any, x: Tensor) -> Tensor:
    """Return the scores of classes, by the class token."""
    y: Tensor = model.head(model.norm(x)[:, 0])
    return y


def layers(model: Any) -> nn.Sequential:
    """Return the layers of a vision transformer: patches, each block, the head."""
    images = torch.zeros(
        1, 3, model.image, model.image, device=model.pos_embed.device, dtype=model.pos_embed.dtype
    )
    return from_stages(model, [embed, *model.blocks, score], images, check_sample=False)


def tensor_plan() -> dict[str, Any]:
    """Return how it is split: by heads, by the features of networks, and by classes."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        '*.qkv': ColwiseParallel(),
        '*.fc1': ColwiseParallel(),
        '*.attn.proj': RowwiseParallel(),
        '*.fc2': RowwiseParallel(),
        '*head': ColwiseParallel(output_layouts=Replicate()),
    }


def from_timm(state_dict: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Return weights of a vision transformer, or of its layers, from timm's weights.

    There queries, keys and values are in the order of the paper.
    """
    return {name: by_heads(x, heads) if '.qkv.' in name else x for name, x in state_dict.items()}
