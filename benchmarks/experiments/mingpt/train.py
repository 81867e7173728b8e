"""The model of each process: the GPT, or its part of it, trained on pieces of a text."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchgpipe.shard as ts
from benchmarks.harness.trainer import Trainer
from benchmarks.models.sharded_gpt import sharded_gpt
from torchgpipe.shard.nn.functional import parallel_cross_entropy
from torchgpipe.trainer.gpt import GPT, Sizes

BATCH, MAX_NORM = 16, 1.0


class Options(NamedTuple):
    """The options of each process."""

    text: str
    sizes: Sizes


class TokenOptions(NamedTuple):
    """The options of each process, for random tokens."""

    sizes: Sizes
    batch: int


class Batches:
    """Pieces of a text, as numbers of its characters.

    Args:
        text: The text.
        length: The characters of a piece.
    """

    def __init__(self, text: str, length: int) -> None:
        numbers = {character: number for number, character in enumerate(sorted({*text}))}
        self._pieces = torch.tensor([numbers[each] for each in text]).unfold(0, length, 1)
        self._generator = torch.Generator().manual_seed(0)

    def draw(self) -> Tensor:
        """Draw some pieces, (BATCH, length): the same ones in each process."""
        return self._pieces[torch.randint(len(self._pieces), (BATCH,), generator=self._generator)]


def make(options: Options, sharded: bool) -> Trainer:
    """Make a trainer of the GPT; after the same seed, so that all have the same values."""
    batches = Batches(options.text, options.sizes.context + 1)
    if sharded:
        ts.distributed.init_process_group()
    torch.manual_seed(0)
    model = (sharded_gpt if sharded else GPT)(options.sizes).double()

    def loss() -> Tensor:
        characters = batches.draw()
        scores, targets = model(characters[:, :-1]), characters[:, 1:]
        if sharded:
            return parallel_cross_entropy(scores, targets)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    clip = ts.clip_grad_norm_ if sharded else nn.utils.clip_grad_norm_
    return Trainer(
        model,
        torch.optim.AdamW(model.parameters(), 1e-3),
        loss,
        lambda parameters: clip(parameters, MAX_NORM),
    )


def make_of_tokens(options: TokenOptions, sharded: bool) -> Trainer:
    """Make a trainer of a GPT on random tokens; after the same seed, as above."""
    if sharded:
        ts.distributed.init_process_group()
    torch.manual_seed(0)
    sizes = options.sizes
    model = sharded_gpt(sizes) if sharded else GPT(sizes)
    generator = torch.Generator().manual_seed(0)

    def loss() -> Tensor:
        tokens = torch.randint(
            sizes.vocabulary, (options.batch, sizes.context + 1), generator=generator
        )
        scores, targets = model(tokens[:, :-1]), tokens[:, 1:]
        if sharded:
            return parallel_cross_entropy(scores, targets)
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    return Trainer(model, torch.optim.AdamW(model.parameters(), 1e-4), loss)
