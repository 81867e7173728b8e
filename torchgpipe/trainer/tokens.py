"""Tokens in files, and which samples are in which step.

::

    epoch 0    ···│sample│sample│sample│···    from a random token on, one sample after the other
                     2      0      1           in random order
    step k     samples k · batch to (k + 1) · batch of all epochs

So the samples of a step follow from seed and step alone, and an epoch has each of them once.
"""

import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchgpipe.trainer.config import Config

#: The number of tokens whose values are checked before a training begins.
CHECKED_TOKENS = 2**22

#: The most pieces of a file that its digest reads, and their length in tokens.
PIECES, PIECE_LENGTH = 256, 2**16


class Samples(NamedTuple):
    """The samples of a replica in a step."""

    #: The tokens, and the next token of each: of shape (samples, block size), on the device.
    x: Tensor
    y: Tensor
    #: Where the samples start in the tokens.
    starts: list[int]
    #: The position of the data after this step, for a checkpoint.
    position: dict[str, Any]


class TokenFiles:
    """Tokens of files, which are memory-mapped, or random tokens.

    Args:
        config: The options.

    Raises:
        OSError, RuntimeError: A file cannot be read.
        ValueError: One of the first tokens is not in the vocabulary, or there are too few tokens.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.train, self.val = _read(config)
        for tokens in (self.train, self.val):
            check_tokens(_unsigned(tokens[:CHECKED_TOKENS]), config.vocab_size)
        block = config.block_size
        # An epoch begins at one of the first tokens, and the last token has no next one.
        if len(self.train) < 2 * block or len(self.val) <= block:
            raise ValueError(
                f'there are {len(self.train)} tokens to train and {len(self.val)} to validate '
                f'with, but --block-size {block} takes {2 * block} and {block + 1}'
            )

    def describe(self) -> dict[str, Any]:
        """Return the properties of the data that cannot change during a training."""
        return {'tokens': len(self.train), 'digest': digest_of(self.train, self.val)}

    def batch(self, step: int, replica: int, device: torch.device) -> Samples:
        """Return the samples of a replica in a step, which counts from 0."""
        starts = starts_of(self._config, len(self.train), step)[:, replica].flatten()
        x, y = samples_at(self._config, self.train, starts, device)
        return Samples(x, y, starts.tolist(), {})

    def seek(self, position: dict[str, Any]) -> None:
        """Continue after a checkpoint: samples follow from the step alone."""


def _read(config: Config) -> tuple[Tensor, Tensor]:
    """Return the tokens to train and to validate with."""
    if config.mock_data:
        generator = torch.Generator().manual_seed(config.seed)
        train, val = torch.randint(config.vocab_size, (2, 2**18), generator=generator)
        return train, val
    if config.tokens:
        folder = Path(config.tokens)
        return _mapped(folder / 'train.bin'), _mapped(folder / 'val.bin')
    size = Path(config.text).stat().st_size
    text = torch.from_file(config.text, size=size, dtype=torch.uint8)
    return text[: size * 9 // 10], text[size * 9 // 10 :]


def _mapped(path: Path) -> Tensor:
    """Return the tokens of a file of uint16, which PyTorch maps as int16."""
    return torch.from_file(str(path), size=path.stat().st_size // 2, dtype=torch.int16)


def _unsigned(tokens: Tensor) -> Tensor:
    """Return tokens as int64; int16 has the bits of uint16."""
    if tokens.dtype is torch.int16:
        return tokens.long() & 0xFFFF
    return tokens.long()


def digest_of(*parts: Tensor) -> int:
    """Return a digest of tokens: of all, or in large files of pieces at equal distances."""
    digest = 0
    for tokens in parts:
        step = max(PIECE_LENGTH, len(tokens) // PIECES)
        for start in (*range(0, len(tokens), step), max(0, len(tokens) - PIECE_LENGTH)):
            piece = tokens[start : start + PIECE_LENGTH].contiguous()
            digest = zlib.crc32(piece.view(torch.uint8).numpy().data, digest)
    return digest


def check_tokens(tokens: Tensor, vocabulary: int) -> None:
    """Raise a :exc:`ValueError` for a token that is not in the vocabulary."""
    if tokens.numel() and tokens.max() >= vocabulary:
        raise ValueError(f'there is a token {tokens.max()}, but --vocab-size is {vocabulary}')


@lru_cache(maxsize=2)
def epoch_of(seed: int, epoch: int, token_count: int, block: int) -> Tensor:
    """Return where the samples of an epoch start: one after the other, shuffled."""
    generator = torch.Generator().manual_seed(seed << 31 | epoch)
    first = torch.randint(block, (), generator=generator)
    samples = (token_count - block) // block
    return first + block * torch.randperm(samples, generator=generator)


def starts_of(config: Config, token_count: int, step: int) -> Tensor:
    """Return where the samples of a step start, of shape (chunks, data, micro-batch size)."""
    block, batch = config.block_size, config.global_batch_size
    samples_per_epoch = (token_count - block) // block
    starts = []
    for number in range(step * batch, (step + 1) * batch):
        epoch, index = divmod(number, samples_per_epoch)
        starts.append(epoch_of(config.seed, epoch, token_count, block)[index])
    return torch.stack(starts).view(config.chunks, config.data, -1)


def samples_at(
    config: Config, tokens: Tensor, starts: Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of shape (samples, block size)."""
    pieces = [tokens[start : start + config.block_size + 1] for start in starts.tolist()]
    samples = _unsigned(torch.stack(pieces))
    check_tokens(samples, config.vocab_size)
    return samples[:, :-1].to(device), samples[:, 1:].to(device)


def validation_parts(config: Config, token_count: int, replica: int) -> list[tuple[int, Tensor]]:
    """Return the batches of a validation: the number of samples, and where a replica's start.

    Args:
        config: The options.
        token_count: The number of tokens to validate with.
        replica: The replica.
    """
    block, batch = config.block_size, config.global_batch_size
    starts = block * torch.arange((token_count - 1) // block)
    if config.eval_batches:
        starts = starts[: config.eval_batches * batch]

    # Experts take equally many samples of each replica. So the samples that replicas cannot share
    # evenly run on all of them, which does not change their mean.
    rest = len(starts) % batch % config.data
    shared, common = starts.split([len(starts) - rest, rest])
    parts = []
    for samples in shared.split(batch):
        if len(samples):
            parts.append((len(samples), samples.tensor_split(config.data)[replica]))
    if rest:
        parts.append((rest, common))
    return parts
