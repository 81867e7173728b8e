"""ArcFace on handwritten digits: in one process, and with its classes shared by several."""

from typing import Any

import click

from benchmarks.experiments.digits import Data, load
from benchmarks.harness.page import Section
from benchmarks.harness.report import Rows
from benchmarks.harness.sharding import meaning, sharding_options, training, training_rows
from benchmarks.harness.side_by_side import side_by_side

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
        from benchmarks.experiments.arcface.train import make  # has torch.distributed

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
