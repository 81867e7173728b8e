"""The training of each process: the whole model, or its part of a sharded one.

Each function returns a trainer. All of them draw the same values, from the same seed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchgpipe.shard as ts
from benchmarks.experiments.digits import Data
from benchmarks.experiments.sharded.comparison import Trainer
from benchmarks.experiments.sharded.models import (
    FEATURES,
    ArcFace,
    ShardedArcFace,
    resnet18,
    sharded_gpt,
)
from benchmarks.harness.memory import peak_memory
from torchgpipe.base.devices import CPU
from torchgpipe.shard.nn.functional import parallel_cross_entropy
from torchgpipe.trainer.gpt import GPT, Sizes


class Classes(NamedTuple):
    """The sizes of a layer of many classes."""

    classes: int
    features: int
    batch: int


class Images(NamedTuple):
    """The sizes of a ResNet-18 with many classes, and of its images."""

    classes: int
    resolution: int
    batch: int


class Text(NamedTuple):
    """A text, and the sizes of a GPT that learns it."""

    text: str
    sizes: Sizes


class Tokens(NamedTuple):
    """The sizes of a GPT, and of a mini-batch of random tokens."""

    sizes: Sizes
    batch: int


def begin(sharded: bool) -> torch.Generator:
    """Set the seed of the values, and return the generator of the data."""
    if sharded:
        ts.distributed.init_process_group()
    torch.manual_seed(0)
    return torch.Generator().manual_seed(0)


def cross_entropy(scores: Tensor, target: Tensor, sharded: bool) -> Tensor:
    """Return the mean loss of scores, which may be of this rank's classes only."""
    if sharded:
        return parallel_cross_entropy(scores, target)
    return F.cross_entropy(scores.flatten(0, -2), target.flatten())


def linear(features: int, classes: int, sharded: bool) -> nn.Module:
    """Return a linear layer, whose classes processes may share."""
    if sharded:
        return ts.nn.ParallelLinear(features, classes, dim=1)
    return nn.Linear(features, classes)


class Classifier(Trainer):
    """A trainer of a layer of many classes, which measures the memory of the loss alone."""

    def __init__(self, options: Classes, sharded: bool) -> None:
        self._options = options
        self._sharded = sharded
        self._generator = begin(sharded)
        layer = linear(options.features, options.classes, sharded)
        super().__init__(layer, torch.optim.SGD(layer.parameters(), 0.1), self._next_loss)

    def _draw(self) -> tuple[Tensor, Tensor]:
        """Draw features, as a backbone returns them, and classes."""
        classes, features, batch = self._options
        x = torch.randn(batch, features, generator=self._generator)
        target = torch.randint(classes, (batch,), generator=self._generator)
        return x.requires_grad_(), target

    def _next_loss(self) -> Tensor:
        x, target = self._draw()
        return cross_entropy(self.model(x), target, self._sharded)

    def figures(self) -> dict[str, Any]:
        """Add the peak of the loss in forward and backward with its logits, and their size."""
        x, target = self._draw()
        logits = self.model(x)
        size = logits.untyped_storage().nbytes()
        output = logits.detach().requires_grad_()
        ts.register_parallel_dim(output, ts.get_parallel_dim(logits))

        def step() -> None:
            cross_entropy(output, target, self._sharded).backward()

        return {'logits': size, 'loss': size + peak_memory(step, [CPU]), **super().figures()}


def train_resnet(options: Images, sharded: bool) -> Trainer:
    """Return a trainer of a ResNet-18 with a layer of many classes."""
    generator = begin(sharded)
    model = nn.Sequential(resnet18(), linear(FEATURES, options.classes, sharded))
    # Each step has the same images: so the loss falls fast, and a wrong gradient is seen in it.
    shape = (options.batch, 3, options.resolution, options.resolution)
    images = torch.randn(shape, generator=generator)
    target = torch.randint(options.classes, (options.batch,), generator=generator)

    def loss() -> Tensor:
        with torch.autocast('cpu', torch.bfloat16):
            return cross_entropy(model(images), target, sharded)

    return Trainer(model, torch.optim.SGD(model.parameters(), 0.01), loss)


def pieces_of(text: str, length: int) -> Tensor:
    """Return all pieces of a text of some length, as numbers of its characters."""
    numbers = {character: number for number, character in enumerate(sorted({*text}))}
    return torch.tensor([numbers[character] for character in text]).unfold(0, length, 1)


#: The number of pieces of a text in a step, and the largest norm of gradients.
PIECES, MAX_NORM = 16, 1.0


def train_on_text(options: Text, sharded: bool) -> Trainer:
    """Return a trainer of a GPT on pieces of a text, in float64."""
    generator = begin(sharded)
    pieces = pieces_of(options.text, options.sizes.context + 1)

    def draw() -> Tensor:
        return pieces[torch.randint(len(pieces), (PIECES,), generator=generator)]

    clip = ts.clip_grad_norm_ if sharded else nn.utils.clip_grad_norm_
    return _train_gpt(
        options.sizes,
        sharded,
        draw,
        torch.float64,
        1e-3,
        lambda parameters: clip(parameters, MAX_NORM),
    )


def train_on_tokens(options: Tokens, sharded: bool) -> Trainer:
    """Return a trainer of a GPT on random tokens, in float32."""
    generator = begin(sharded)
    sizes = options.sizes
    shape = (options.batch, sizes.context + 1)

    def draw() -> Tensor:
        return torch.randint(sizes.vocabulary, shape, generator=generator)

    return _train_gpt(sizes, sharded, draw, torch.float32, 1e-4)


def _train_gpt(
    sizes: Sizes,
    sharded: bool,
    draw: Callable[[], Tensor],
    dtype: torch.dtype,
    rate: float,
    *clip: Callable[[Any], object],
) -> Trainer:
    model = sharded_gpt(sizes) if sharded else GPT(sizes)
    model.to(dtype)

    def loss() -> Tensor:
        tokens = draw()
        return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], sharded)

    return Trainer(model, torch.optim.AdamW(model.parameters(), rate), loss, *clip)


#: Samples of a step of ArcFace, its features, and its classes.
DIGITS, DIGIT_FEATURES, DIGIT_CLASSES = 64, 16, 10


class Recogniser(Trainer):
    """A trainer of ArcFace on digits, in float64, which measures the accuracy."""

    def __init__(self, data: Data, sharded: bool) -> None:
        self._data = data
        self._sharded = sharded
        self._generator = begin(sharded)
        self._backbone = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, DIGIT_FEATURES)
        )
        arcface = ShardedArcFace if sharded else ArcFace
        self._head = arcface(DIGIT_FEATURES, DIGIT_CLASSES)
        model = nn.ModuleList([self._backbone, self._head]).double()
        super().__init__(model, torch.optim.AdamW(model.parameters(), 3e-3), self._next_loss)

    def _next_loss(self) -> Tensor:
        images, labels = self._data.train
        index = torch.randint(len(images), (DIGITS,), generator=self._generator)
        scores = self._head(self._backbone(images[index]), labels[index])
        return cross_entropy(scores, labels[index], self._sharded)

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the part of the test images whose class has the highest score, without margin."""
        images, labels = self._data.test
        scores = self._head(self._backbone(images))
        if self._sharded:
            scores = ts.distributed.gather(scores)
        return (scores.argmax(1) == labels).double().mean().item()

    def figures(self) -> dict[str, Any]:
        """Add the accuracy."""
        return {'accuracy': self.accuracy(), **super().figures()}
