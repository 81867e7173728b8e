"""Tokens to train with: where they are read, and which samples are in which step.

::

    epoch 0    ···│sample│sample│sample│···    from a random token on, one sample after the other
                     2      0      1           in random order
    step k     samples k · batch to (k + 1) · batch of all epochs

So the samples of a step follow from seed and step alone, and an epoch has each of them once.
"""

import zlib
from argparse import Namespace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

#: The number of tokens whose values are looked at before a training begins.
_LOOKED_AT = 2**22

#: The most pieces of a file that its digest reads, and their length in tokens.
_PIECES, _PIECE = 256, 2**16


def read(config: Namespace) -> tuple[Tensor, Tensor]:
    """Return the tokens to train and to validate with; files are memory-mapped.

    Raises:
        ValueError: One of the first tokens is not in the vocabulary.
    """
    if config.mock_data:
        generator = torch.Generator().manual_seed(config.seed)
        train, val = torch.randint(config.vocab_size, (2, 2**18), generator=generator)
    elif config.tokens:
        paths = [Path(config.tokens) / f'{part}.bin' for part in ('train', 'val')]
        train, val = (
            torch.from_file(str(path), size=path.stat().st_size // 2, dtype=torch.int16)
            for path in paths
        )
    else:
        size = Path(config.text).stat().st_size
        tokens = torch.from_file(config.text, size=size, dtype=torch.uint8)
        train, val = tokens[: size * 9 // 10], tokens[size * 9 // 10 :]
    for tokens in (train, val):
        _check(tokens[:_LOOKED_AT].long() & 0xFFFF, config.vocab_size)
    return train, val


def digest_of(*parts: Tensor) -> int:
    """Return a digest of tokens: of all, or in large files of pieces at equal distances."""
    digest = 0
    for tokens in parts:
        step = max(_PIECE, len(tokens) // _PIECES)
        for start in (*range(0, len(tokens), step), max(0, len(tokens) - _PIECE)):
            piece = tokens[start : start + _PIECE].contiguous()
            digest = zlib.crc32(piece.view(torch.uint8).numpy(), digest)
    return digest


def _check(x: Tensor, size: int) -> None:
    if x.numel() and x.max() >= size:
        raise ValueError(f'there is a token {x.max()}, but --vocab-size is {size}')


@lru_cache(maxsize=2)
def epoch_of(seed: int, epoch: int, tokens: int, block: int) -> Tensor:
    """Return where the samples of an epoch start: one after the other, shuffled."""
    generator = torch.Generator().manual_seed(seed << 31 | epoch)
    first = torch.randint(block, (), generator=generator)
    return first + block * torch.randperm((tokens - block) // block, generator=generator)


def starts_of(config: Namespace, tokens: int, step: int) -> Tensor:
    """Return where the samples of a step start, of shape (chunks, data, micro-batch size)."""
    size, batch = (tokens - config.block_size) // config.block_size, config.global_batch_size
    places = [divmod(k, size) for k in range(step * batch, (step + 1) * batch)]
    starts = [epoch_of(config.seed, epoch, tokens, config.block_size)[k] for epoch, k in places]
    return torch.stack(starts).view(config.chunks, config.data, -1)


def samples_at(
    config: Namespace, tokens: Tensor, starts: Tensor, device: torch.device
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return inputs and targets of shape (N, block size); nothing if no sample starts."""
    if not len(starts):
        return None, None
    x = (
        torch.stack([tokens[k : k + config.block_size + 1] for k in starts.tolist()]).long()
        & 0xFFFF
    )
    _check(x, config.vocab_size)
    return x[:, :-1].to(device), x[:, 1:].to(device)
