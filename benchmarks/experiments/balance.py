"""Is the slowest partition as slow as its balance predicts?"""

import time
from collections.abc import Callable
from itertools import product
from statistics import median
from typing import Any

import click
import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.harness.memory import Turns
from benchmarks.harness.options import count_option, output_option
from benchmarks.harness.report import Part, Section
from torchgpipe import GPipe
from torchgpipe.balance import Balance, profile
from torchgpipe.base.devices import is_cpu, synchronize
from torchgpipe.skip import Namespace, SkipGenerator, Skippable, pop, skippable, stash
from torchgpipe.trainer.files import output_folder

CHUNKS = 4
SIZES = (2, 4)
MODES = ('never', 'except_last')
STEPS = 3


@skippable(stash=['identity'])
class Split(Skippable):
    """Stash the input of a residual block."""

    def forward(self, x: Tensor) -> SkipGenerator:
        yield stash('identity', x)
        return x


@skippable(pop=['identity'])
class Add(Skippable):
    """Add it to the block's output."""

    def forward(self, x: Tensor) -> SkipGenerator:
        return x + (yield pop('identity'))


def residual() -> tuple[nn.Sequential, Tensor]:
    """Return a flat residual network whose channels double and whose images shrink."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for channels in (16, 32, 64):
        for _ in range(3):
            namespace = Namespace()
            layers += [
                Split().isolate(namespace),
                nn.Conv2d(channels, channels, 3, padding=1),
                nn.BatchNorm2d(channels),
                nn.ReLU(inplace=True),
                nn.Conv2d(channels, channels, 3, padding=1),
                Add().isolate(namespace),
            ]
        layers.append(nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1))
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
    return nn.Sequential(*layers), torch.rand(32, 3, 48, 48)


def perceptron() -> tuple[nn.Sequential, Tensor]:
    """Return linear layers of very different sizes."""
    widths = [512, 2048, 512, 1024, 1024, 3072, 512, 256, 2048, 1024]
    layers = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in zip(widths, widths[1:])]
    return nn.Sequential(*layers), torch.rand(512, 512)


def transformer() -> tuple[nn.Sequential, Tensor]:
    """Return an encoder for integers."""
    layers = [nn.TransformerEncoderLayer(192, 6, 768, 0.0, batch_first=True) for _ in range(8)]
    return nn.Sequential(nn.Embedding(1000, 192), *layers, nn.Linear(192, 1000)), torch.randint(
        1000, (16, 64)
    )


MODELS: dict[str, Callable[[], tuple[nn.Sequential, Tensor]]] = {
    'residual': residual,
    'perceptron': perceptron,
    'transformer': transformer,
}


class Stopwatch(Turns):
    """The time that each partition takes in forward, recomputation and backward, in the pipeline.

    For partitions on one device, where one thing happens at a time. So there is one turn for all
    threads: on an accelerator, backward runs in another thread.
    """

    owner: int | None = None

    def __init__(self, gpipe: GPipe) -> None:
        super().__init__(list(gpipe.partitions))
        self.seconds = [0.0] * len(gpipe.partitions)
        self._since = time.perf_counter()
        self._devices = gpipe.devices

    def give(self, j: int | None) -> None:
        """Assign the time from now on to a partition, or to none."""
        synchronize(self._devices)
        now = time.perf_counter()
        if self.owner is not None:
            self.seconds[self.owner] += now - self._since
        self._since = now
        self.owner = j


def measure(
    model: nn.Sequential, sample: Tensor, balance: Balance, mode: str, device: str
) -> list[float]:
    """Return the seconds of each partition in a training step: medians of a few."""
    gpipe = GPipe(model, balance, devices=[device] * len(balance), chunks=CHUNKS, checkpoint=mode)
    watch = Stopwatch(gpipe)
    sample = sample.to(device)
    steps = []
    for _ in range(STEPS + 1):
        watch.seconds = [0.0] * len(balance)
        output = gpipe(sample)
        gradient = torch.ones_like(output)
        watch.give(None)
        output.backward(gradient)
        watch.give(None)
        steps.append(watch.seconds)
    return [median(seconds) for seconds in zip(*steps[1:])]


def compare(name: str, n: int, mode: str, device: str) -> dict[str, Any]:
    """Profile and balance a model, and measure its slowest partition right after."""
    model, sample = MODELS[name]()
    costs = profile(model, sample, device=device, timeout=0.5)
    balance = costs.balance(n, chunks=CHUNKS, checkpoint=mode)
    seconds = measure(model, sample, balance, mode, device)
    slowest = max(range(n), key=lambda j: balance.seconds[j])
    return {
        'balance': list(balance),
        'predicted_seconds': balance.seconds[slowest],
        'measured_seconds': seconds[slowest],
        'ratio': seconds[slowest] / balance.seconds[slowest],
    }


def repeat(name: str, n: int, mode: str, device: str, rounds: int) -> dict[str, Any]:
    """Take the round whose ratio is the median one, as the machine's speed drifts."""
    results = [compare(name, n, mode, device) for _ in range(rounds)]
    ratios = [result['ratio'] for result in results]
    middle = sorted(results, key=lambda result: result['ratio'])[rounds // 2]
    return {'model': name, 'checkpoint': mode, **middle, 'ratios': ratios}


@click.command()
@click.option('--device', default='cpu', help='Where to measure.')
@count_option('--rounds', 7, 'Rounds of profile and measurement, of which the median counts.')
@output_option
def balance(device: str, rounds: int, output: str) -> None:
    """Compare the predicted time of the slowest partition with the measured one.

    Models are profiled layer by layer, balanced by Profile.balance, and trained in a pipeline with
    4 micro-batches. All partitions are on one device, where the time of each can be measured.
    """
    folder = output_folder(output)
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise click.ClickException(f'--device {device}: {str(error).splitlines()[0]}') from None
    results = []
    for name, n, mode in tqdm([*product(MODELS, SIZES, MODES)], desc='balance', leave=False):
        results.append(repeat(name, n, mode, device, rounds))
    SECTION.publish(results, folder, not is_cpu(torch.device(device)))


def _parts(results: list[dict[str, Any]]) -> list[Part]:
    """Return a table with a row for each case."""
    header = ['model', 'balance', 'slowest, predicted, ms', 'measured, ms', 'ratio', 'all rounds']
    rows = []
    for result in results:
        rows.append(
            [
                f'{result["model"]} {result["checkpoint"]}',
                str(result['balance']),
                f'{result["predicted_seconds"] * 1e3:.1f}',
                f'{result["measured_seconds"] * 1e3:.1f}',
                f'{result["ratio"]:.2f}',
                f'{min(result["ratios"]):.2f}–{max(result["ratios"]):.2f}',
            ]
        )
    return [(header, rows)]


SECTION = Section('Predicted and measured time of the slowest partition', 'balance', _parts)
COMMANDS = [balance]
SECTIONS = [SECTION]
