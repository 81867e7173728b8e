"""The model of each process: a classifier, or its classes of one."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchgpipe.shard as ts
from benchmarks.harness.memory import peak_memory
from benchmarks.harness.trainer import Trainer
from benchmarks.models.resnet18 import FEATURES, resnet18
from torchgpipe.shard.nn.functional import parallel_cross_entropy


class Options(NamedTuple):
    """The options of each process."""

    classes: int
    features: int
    batch: int


class ImageOptions(NamedTuple):
    """The options of each process, for a ResNet-18."""

    classes: int
    resolution: int
    batch: int


class Classifier(Trainer):
    """A trainer that measures the memory of the loss alone.

    Args:
        layer: The layer that returns logits. sharded: Whether the logits are for this rank's
        classes only. options: Sizes.
    """

    def __init__(self, layer: nn.Module, sharded: bool, options: Options) -> None:
        super().__init__(layer, torch.optim.SGD(layer.parameters(), 0.1), self._next_loss)
        self._cross_entropy = parallel_cross_entropy if sharded else F.cross_entropy
        self._options = options
        self._generator = torch.Generator().manual_seed(0)

    def _draw(self) -> tuple[Tensor, Tensor]:
        """Draw features, as a backbone gives them, and classes."""
        classes, features, batch = self._options
        x = torch.randn(batch, features, generator=self._generator)
        return (x.requires_grad_(), torch.randint(classes, (batch,), generator=self._generator))

    def _next_loss(self) -> Tensor:
        x, target = self._draw()
        loss: Tensor = self._cross_entropy(self.model(x), target)
        return loss

    def figures(self) -> dict[str, Any]:
        """Add the peak of the loss in forward and backward with its logits, and their size."""
        x, target = self._draw()
        logits = self.model(x)
        size = logits.untyped_storage().nbytes()
        output = logits.detach().requires_grad_()
        ts.register_parallel_dim(output, ts.get_parallel_dim(logits))
        peak = peak_memory(
            lambda: self._cross_entropy(output, target).backward(), [torch.device('cpu')]
        )
        return {'logits': size, 'loss': size + peak, **super().figures()}


def make(options: Options, sharded: bool) -> Classifier:
    """Make a trainer; after the same seed, so that all have the same values."""
    torch.manual_seed(0)
    if not sharded:
        return Classifier(nn.Linear(options.features, options.classes), sharded, options)
    ts.distributed.init_process_group()
    layer = ts.nn.ParallelLinear(options.features, options.classes, dim=1)
    return Classifier(layer, sharded, options)


def make_resnet(options: ImageOptions, sharded: bool) -> Trainer:
    """Make a trainer of a ResNet-18; after the same seed, so that all have the same values."""
    torch.manual_seed(0)
    backbone = resnet18()
    head: nn.Module
    if sharded:
        ts.distributed.init_process_group()
        head = ts.nn.ParallelLinear(FEATURES, options.classes, dim=1)
    else:
        head = nn.Linear(FEATURES, options.classes)
    model = nn.Sequential(backbone, head)
    cross_entropy = parallel_cross_entropy if sharded else F.cross_entropy
    generator = torch.Generator().manual_seed(0)
    # Each step has the same images: so the loss falls fast, and a wrong gradient is seen in it.
    images = torch.randn(
        options.batch, 3, options.resolution, options.resolution, generator=generator
    )
    target = torch.randint(options.classes, (options.batch,), generator=generator)

    def loss() -> Tensor:
        with torch.autocast('cpu', torch.bfloat16):
            value: Tensor = cross_entropy(model(images), target)
        return value

    return Trainer(model, torch.optim.SGD(model.parameters(), 0.01), loss)
