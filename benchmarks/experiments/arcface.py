"""ArcFace on handwritten digits: in one process, and with its classes shared by several."""

from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchgpipe.shard as ts
from benchmarks.experiments.digits import Data, load
from benchmarks.harness.page import Section
from benchmarks.harness.report import Rows
from benchmarks.harness.sharding import (
    Trainer,
    meaning,
    sharding_options,
    side_by_side,
    training,
    training_rows,
)
from benchmarks.models.sharded import ArcFace, ShardedArcFace
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


#: Largest relative difference of losses: rounding of float64, which steps make larger.
TOLERANCE = 1e-9


@click.command()
@sharding_options(300)
def arcface(numbers: tuple[int, ...], steps: int, output: str) -> None:
    """Train ArcFace on scikit-learn's handwritten digits: in one process, and sharded.

    The last layer has a direction for each digit, of which each process has some. All is in
    float64, so that losses can be compared: a loss that differs from the plain model's is an
    error.
    """

    def measure() -> dict[str, Any]:
        from benchmarks.experiments.arcface import make  # has torch.distributed

        data = Data(*[(images.double(), labels) for images, labels in load()])
        return {'rows': side_by_side(make, data, numbers, steps, 'arcface', TOLERANCE)}

    training('arcface', output, measure, _parts)


def _parts(results: dict[str, Any]) -> list[str | Rows]:
    """Describe the training, and return the table."""
    header, rows = training_rows(results['rows'])
    accuracies = [f'{row["ranks"][0]["accuracy"]:.2%}' for row in results['rows']]
    return [
        'The model is two linear layers followed by ArcFace, trained on the digits of '
        'scikit-learn. ArcFace multiplies normalised features by normalised directions of 10 '
        'classes, with scale 64 and margin 0.5. Training uses float64 and AdamW. The '
        f'directions are split. The other layers are replicated. {meaning(results)}',
        (
            [*header, 'accuracy on the test set'],
            [[*cells, accuracy] for cells, accuracy in zip(rows, accuracies)],
        ),
    ]


COMMANDS = [arcface]
SECTION = Section('ArcFace with its classes sharded over processes', 'arcface', _parts)
