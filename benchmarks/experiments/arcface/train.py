"""The model of each process: a network for digits, and its part of ArcFace's last layer."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchgpipe.shard as ts
from benchmarks.experiments.digits import Data
from benchmarks.harness.trainer import Trainer
from benchmarks.models.arcface import ArcFace, ShardedArcFace
from torchgpipe.shard.nn.functional import parallel_cross_entropy

BATCH, FEATURES, CLASSES = 64, 16, 10


class Recogniser(Trainer):
    """A trainer that measures the accuracy of the model.

    Args:
        model: A backbone, and ArcFace's layer.
        optimizer: The optimizer of its parameters. sharded: Whether this rank has some classes of
        the layer. data: Training and test data.
    """

    def __init__(
        self, model: nn.ModuleDict, optimizer: torch.optim.Optimizer, sharded: bool, data: Data
    ) -> None:
        super().__init__(model, optimizer, self._next_loss)
        self._sharded = sharded
        self._data = data
        self._generator = torch.Generator().manual_seed(0)

    def _next_loss(self) -> Tensor:
        images, labels = self._data.train
        index = torch.randint(len(images), (BATCH,), generator=self._generator)
        labels = labels[index]
        scores = self.model['head'](self.model['backbone'](images[index]), labels)
        loss: Tensor = (parallel_cross_entropy if self._sharded else F.cross_entropy)(
            scores, labels
        )
        return loss

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the part of the test images whose class has the highest score, without margin."""
        images, labels = self._data.test
        scores = self.model['head'](self.model['backbone'](images))
        if self._sharded:
            scores = ts.distributed.gather(scores)
        return (scores.argmax(1) == labels).double().mean().item()

    def figures(self) -> dict[str, Any]:
        """Add the accuracy."""
        return {'accuracy': self.accuracy(), **super().figures()}


def make(data: Data, sharded: bool) -> Recogniser:
    """Make a trainer; after the same seed, so that all have the same values."""
    if sharded:
        ts.distributed.init_process_group()
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, FEATURES))
    head = (ShardedArcFace if sharded else ArcFace)(FEATURES, CLASSES)
    model = nn.ModuleDict({'backbone': backbone, 'head': head}).double()
    return Recogniser(model, torch.optim.AdamW(model.parameters(), 3e-3), sharded, data)
