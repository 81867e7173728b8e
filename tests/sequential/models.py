"""Models of any form with a sample for each: small ones, and models of the literature."""

import torch

from tests.sequential.clip import CLIP
from tests.sequential.convnets import LARGE, DenseNet, MobileNetV3, ResNet, UNet
from tests.sequential.t5 import T5, T5Config
from tests.sequential.transformers import GPT, GPTConfig, VisionTransformer
from torchgpipe import Arguments

#: The samples of small models. It is no other size in them, and three chunks do not divide it.
BATCH = 7


def images(*size, batch=BATCH):
    """Return images."""
    return torch.randn(batch, 3, *size)


def tokens(length, words, batch=BATCH):
    """Return sequences of tokens, in which none is padding."""
    return torch.randint(1, words, (batch, length))


def padded(length, batch=BATCH):
    """Return a mask of sequences that end anywhere but at once."""
    lengths = torch.randint(2, length + 1, (batch,))
    return (torch.arange(length) < lengths[:, None]).long()


def gpt(dropout=0.1):
    """Return a GPT, and ids with a mask."""
    model = GPT(
        GPTConfig(vocab_size=13, n_positions=10, n_embd=8, n_layer=3, n_head=2, dropout=dropout)
    )
    return model, Arguments(tokens(6, 13), attention_mask=padded(6))


def t5(dropout=0.1):
    """Return a T5, and the inputs of its encoder and decoder."""
    model = T5(
        T5Config(
            vocab_size=13,
            d_model=8,
            d_kv=4,
            d_ff=16,
            num_layers=2,
            num_heads=2,
            num_buckets=8,
            max_distance=12,
            dropout_rate=dropout,
        )
    )
    return model, Arguments(tokens(9, 13), attention_mask=padded(9), labels=tokens(5, 13))


def clip(dropout=0.1):
    """Return a model of two towers, and images with their texts."""
    model = CLIP(
        embed_dim=5,
        size=12,
        patch=4,
        vision_dim=8,
        vision_depth=2,
        vocab_size=13,
        context=6,
        text_dim=12,
        text_depth=2,
        head_dim=4,
        dropout=dropout,
    )
    return model, Arguments(images(12, 12), tokens(6, 13))


#: Each gives a small model, in float32 and in training mode, and a sample of it; with dropout, or
#: without any: `MODELS[name](dropout=0.0)`.
MODELS = {
    'ResNet': lambda dropout=0.1: (ResNet([1, 2], 4, num_classes=5), images(16, 16)),
    'MobileNetV3': lambda dropout=0.1: (
        MobileNetV3([*LARGE[1:5], LARGE[10]], 0.25, hidden=16, num_classes=5, dropout=dropout),
        images(24, 24),
    ),
    'U-Net': lambda dropout=0.1: (UNet(2, 4), images(13, 10)),
    'DenseNet': lambda dropout=0.1: (
        DenseNet([2, 3], 4, 2, num_classes=5, dropout=dropout),
        images(16, 16),
    ),
    'ViT': lambda dropout=0.1: (
        VisionTransformer(
            12, 4, 8, depth=3, num_heads=2, num_classes=5, drop=dropout, drop_path=2 * dropout
        ),
        images(12, 12),
    ),
    'GPT': gpt,
    'T5': t5,
    'two towers': clip,
}
