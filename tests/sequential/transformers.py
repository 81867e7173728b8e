"""Transformers as people write them: with no regard to pipelines or to tracing."""

import math
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DropPath(nn.Module):
    """Stochastic depth: drop a whole branch for some of the samples."""

    def __init__(self, drop_prob=0.0):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1 - self.drop_prob
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        mask.div_(keep)
        return x * mask


class PatchEmbed(nn.Module):
    def __init__(self, size, patch, channels, dim):
        super().__init__()
        self.img_size = (size, size)
        self.num_patches = (size // patch) ** 2
        self.proj = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)

    def forward(self, x):
        B, C, H, W = x.shape
        assert H == self.img_size[0], f'height {H} is not that of the model, {self.img_size[0]}'
        assert W == self.img_size[1], f'width {W} is not that of the model, {self.img_size[1]}'
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, dim, num_heads, drop):
        super().__init__()
        assert dim % num_heads == 0
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.attn_drop = nn.Dropout(drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(drop)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.attn_drop.p if self.training else 0.0
        )
        x = x.transpose(1, 2).reshape(B, N, C)
        x = self.proj(x)
        x = self.proj_drop(x)
        return x


class Mlp(nn.Module):
    def __init__(self, dim, hidden, drop):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        x = self.drop(self.act(self.fc1(x)))
        return self.drop(self.fc2(x))


class EncoderBlock(nn.Module):
    def __init__(self, dim, num_heads, drop, drop_path):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads, drop)
        self.drop_path = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, 4 * dim, drop)

    def forward(self, x):
        x = x + self.drop_path(self.attn(self.norm1(x)))
        x = x + self.drop_path(self.mlp(self.norm2(x)))
        return x


class VisionTransformer(nn.Module):
    """By default ViT-B/16 (arXiv 2010.11929)."""

    def __init__(
        self,
        size=224,
        patch=16,
        dim=768,
        depth=12,
        num_heads=12,
        num_classes=1000,
        drop=0.0,
        drop_path=0.0,
    ):
        super().__init__()
        self.patch_embed = PatchEmbed(size, patch, 3, dim)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, self.patch_embed.num_patches + 1, dim) * 0.02)
        self.pos_drop = nn.Dropout(drop)
        rates = [float(p) for p in torch.linspace(0, drop_path, depth, device='cpu')]
        self.blocks = nn.Sequential(*[EncoderBlock(dim, num_heads, drop, p) for p in rates])
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, num_classes) if num_classes > 0 else nn.Identity()

    def forward_features(self, x):
        B = x.shape[0]
        x = self.patch_embed(x)
        cls_tokens = self.cls_token.expand(B, -1, -1)
        x = torch.cat((cls_tokens, x), dim=1)
        x = self.pos_drop(x + self.pos_embed)
        x = self.blocks(x)
        return self.norm(x)

    def forward(self, x):
        x = self.forward_features(x)
        return self.head(x[:, 0])


@dataclass
class GPTConfig:
    """By default GPT-2 small."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    dropout: float = 0.1


class GPTOutput(NamedTuple):
    """The output of a GPT."""

    loss: Optional[Tensor]
    logits: Tensor
    last_hidden_state: Tensor


class Conv1D(nn.Module):
    """A linear layer whose weight is stored the other way round."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.02)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        size_out = x.size()[:-1] + (self.nf,)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.n_embd = config.n_head, config.n_embd
        self.dropout = config.dropout
        self.c_attn = Conv1D(3 * config.n_embd, config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)
        length = config.n_positions
        self.register_buffer(
            'bias',
            torch.tril(torch.ones(length, length, dtype=torch.bool)).view(1, 1, length, length),
            persistent=False,
        )

    def forward(self, x, attention_mask=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, torch.finfo(att.dtype).min)
        if attention_mask is not None:
            att = att + attention_mask
        att = F.softmax(att, dim=-1)
        att = F.dropout(att, p=self.dropout, training=self.training)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class GPTBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.ModuleDict(
            dict(
                c_fc=Conv1D(4 * config.n_embd, config.n_embd),
                c_proj=Conv1D(config.n_embd, 4 * config.n_embd),
                dropout=nn.Dropout(config.dropout),
            )
        )

    def forward(self, x, attention_mask=None):
        x = x + self.attn(self.ln_1(x), attention_mask=attention_mask)
        h = self.mlp.c_fc(self.ln_2(x))
        h = 0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * h.pow(3.0))))
        return x + self.mlp.dropout(self.mlp.c_proj(h))


class GPT(nn.Module):
    """GPT-2, with the head tied to the embedding."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.n_positions, config.n_embd),
                drop=nn.Dropout(config.dropout),
                h=nn.ModuleList([GPTBlock(config) for _ in range(config.n_layer)]),
                ln_f=nn.LayerNorm(config.n_embd),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=0.02)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, input_ids, attention_mask=None, labels=None):
        device = input_ids.device
        B, T = input_ids.size()
        assert T <= self.config.n_positions, (
            f'{T} tokens are more than the {self.config.n_positions} of the model'
        )
        pos = torch.arange(0, T, dtype=torch.long, device=device).unsqueeze(0)
        x = self.transformer.wte(input_ids) + self.transformer.wpe(pos)
        x = self.transformer.drop(x)
        if attention_mask is not None:
            attention_mask = attention_mask.view(B, -1)[:, None, None, :].to(dtype=x.dtype)
            attention_mask = (1.0 - attention_mask) * torch.finfo(x.dtype).min
        for block in self.transformer.h:
            x = block(x, attention_mask=attention_mask)
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(
                logits[:, :-1].reshape(-1, logits.size(-1)),
                labels[:, 1:].reshape(-1),
                ignore_index=-100,
            )
        return GPTOutput(loss=loss, logits=logits, last_hidden_state=x)
