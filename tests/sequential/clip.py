"""A model of two towers as people write it: with no regard to pipelines or to tracing."""

import math
from collections import OrderedDict

import torch
from torch import nn


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class ResidualAttentionBlock(nn.Module):
    def __init__(self, dim, heads, attn_mask=None, dropout=0.0):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads, dropout=dropout)
        self.ln_1 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(
            OrderedDict(
                [
                    ('c_fc', nn.Linear(dim, dim * 4)),
                    ('gelu', QuickGELU()),
                    ('c_proj', nn.Linear(dim * 4, dim)),
                ]
            )
        )
        self.ln_2 = nn.LayerNorm(dim)
        self.attn_mask = attn_mask

    def attention(self, x):
        mask = self.attn_mask
        if mask is not None:
            mask = mask.to(dtype=x.dtype, device=x.device)
        return self.attn(x, x, x, need_weights=False, attn_mask=mask)[0]

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x


class VisualTower(nn.Module):
    def __init__(self, size, patch, dim, depth, heads, embed_dim, dropout):
        super().__init__()
        self.conv1 = nn.Conv2d(3, dim, patch, stride=patch, bias=False)
        scale = dim**-0.5
        self.class_embedding = nn.Parameter(scale * torch.randn(dim))
        self.positional_embedding = nn.Parameter(
            scale * torch.randn((size // patch) ** 2 + 1, dim)
        )
        self.ln_pre = nn.LayerNorm(dim)
        self.resblocks = nn.Sequential(
            *[ResidualAttentionBlock(dim, heads, dropout=dropout) for _ in range(depth)]
        )
        self.ln_post = nn.LayerNorm(dim)
        self.proj = nn.Parameter(scale * torch.randn(dim, embed_dim))

    def forward(self, x):
        x = self.conv1(x)
        x = x.reshape(x.shape[0], x.shape[1], -1).permute(0, 2, 1)
        token = self.class_embedding.to(x.dtype) + torch.zeros(
            x.shape[0], 1, x.shape[-1], dtype=x.dtype, device=x.device
        )
        x = torch.cat([token, x], dim=1) + self.positional_embedding.to(x.dtype)
        x = self.ln_pre(x)
        x = self.resblocks(x.permute(1, 0, 2)).permute(1, 0, 2)
        x = self.ln_post(x[:, 0, :])
        if self.proj is not None:
            x = x @ self.proj
        return x


class CLIP(nn.Module):
    """Two towers, for an image and its text: by default CLIP ViT-B/32 (arXiv 2103.00020)."""

    def __init__(
        self,
        embed_dim=512,
        size=224,
        patch=32,
        vision_dim=768,
        vision_depth=12,
        vocab_size=49408,
        context=77,
        text_dim=512,
        text_depth=12,
        head_dim=64,
        dropout=0.0,
    ):
        super().__init__()
        self.visual = VisualTower(
            size, patch, vision_dim, vision_depth, vision_dim // head_dim, embed_dim, dropout
        )
        self.token_embedding = nn.Embedding(vocab_size, text_dim)
        self.positional_embedding = nn.Parameter(torch.randn(context, text_dim) * 0.01)
        mask = torch.full((context, context), float('-inf')).triu_(1)
        self.transformer = nn.Sequential(
            *[
                ResidualAttentionBlock(text_dim, text_dim // head_dim, mask, dropout)
                for _ in range(text_depth)
            ]
        )
        self.ln_final = nn.LayerNorm(text_dim)
        self.text_projection = nn.Parameter(torch.randn(text_dim, embed_dim) * text_dim**-0.5)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def encode_image(self, image):
        return self.visual(image)

    def encode_text(self, text):
        x = self.token_embedding(text)
        x = x + self.positional_embedding
        x = x.permute(1, 0, 2)
        x = self.transformer(x)
        x = x.permute(1, 0, 2)
        x = self.ln_final(x)
        # The end of a text has the highest number of all tokens.
        return (
            x[torch.arange(x.shape[0], device=x.device), text.argmax(dim=-1)]
            @ self.text_projection
        )

    def forward(self, image, text):
        image_features = self.encode_image(image)
        text_features = self.encode_text(text)
        image_features = image_features / image_features.norm(dim=-1, keepdim=True)
        text_features = text_features / text_features.norm(dim=-1, keepdim=True)
        similarity = self.logit_scale.exp() * (image_features * text_features).sum(dim=-1)
        return {
            'similarity': similarity,
            'image_embeds': image_features,
            'text_embeds': text_features,
        }
