"""Train a small convolutional network on real handwritten digits, with and without GPipe."""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks.harness.memory import peak_memory
from benchmarks.harness.options import choose_devices
from benchmarks.harness.report import machine, output_option
from torchgpipe import GPipe
from torchgpipe.base.devices import accelerators, is_cpu, memory_of
from torchgpipe.base.errors import table
from torchgpipe.plan import plan
from torchgpipe.schedule import NAMES
from torchgpipe.schedule.generators import PLAIN_CALL
from torchgpipe.trainer.files import output_folder

BATCH = 256


class Data(NamedTuple):
    """Images of shape (N, 1, 8, 8) and labels of shape (N,)."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


class Curve(NamedTuple):
    """The results of one training: accuracy, losses, seconds and bytes of a step."""

    accuracy: float
    losses: list[float]
    seconds: float
    memory: int


def load() -> Data:
    """Load scikit-learn's bundled digits: 1,797 images, one in five of each label for testing."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    x, test_x, y, test_y = (torch.from_numpy(part) for part in split)
    return Data(
        (x.float().view(-1, 1, 8, 8) / 16, y), (test_x.float().view(-1, 1, 8, 8) / 16, test_y)
    )


def network() -> nn.Sequential:
    """Make the network: four convolutions with batch norm, 16 layers in all."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]

    return nn.Sequential(
        *block(1, 64),
        *block(64, 64),
        nn.MaxPool2d(2),
        *block(64, 128),
        *block(128, 128),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


class Training:
    """A model in training, with so many threads for each kernel.

    Args:
        model: The model.
        devices: Where its input goes, and where its output comes from.
        threads: So many.
        schedule: By which it takes steps; otherwise it is called.
        steps: How many steps there will be.
    """

    def __init__(
        self,
        model: Any,
        devices: Sequence[torch.device],
        threads: int,
        steps: int,
        schedule: str | None = None,
    ) -> None:
        self._model, self._devices, self._schedule = model, devices, schedule
        self._threads = threads
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        self._rates = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, 0.2, total_steps=steps)
        self._losses: list[float] = []
        self._seconds: list[float] = []

    def epoch(self, data: Data, number: int) -> None:
        """Train on all images, in an order that the number decides."""
        torch.set_num_threads(self._threads)
        x, y = data.train
        generator = torch.Generator().manual_seed(number)
        for index in torch.randperm(len(x), generator=generator).split(BATCH):
            start = time.perf_counter()
            self._losses.append(self._step(x[index], y[index]))
            self._optimizer.step()
            self._seconds.append(time.perf_counter() - start)
            self._rates.step()

    def _step(self, image: Tensor, label: Tensor) -> float:
        self._optimizer.zero_grad()
        image, label = image.to(self._devices[0]), label.to(self._devices[-1])
        if self._schedule is not None:
            loss = self._model.step(image, label, F.cross_entropy, schedule=self._schedule)
            return loss.item()  # type: ignore[no-any-return]
        loss = F.cross_entropy(self._model(image), label)
        loss.backward()
        return loss.item()

    def result(self, data: Data) -> Curve:
        """Return the results of the training, and the peak memory of one more step."""
        torch.set_num_threads(self._threads)
        x, y = data.test
        self._model.eval()
        with torch.no_grad():
            right = self._model(x.to(self._devices[0])).argmax(1).cpu() == y
        self._model.train()
        self._optimizer.zero_grad()
        image, label = (tensor[:BATCH] for tensor in data.train)
        memory = peak_memory(lambda: self._step(image, label), [*self._devices])
        return Curve(right.double().mean().item(), self._losses, median(self._seconds), memory)


def train(trainings: dict[str, Training], data: Data, epochs: int) -> dict[str, Curve]:
    """Let all of them train, an epoch each in turn."""
    with tqdm(total=epochs * len(trainings), unit='epoch', leave=False) as bar:
        for number in range(epochs):
            for name, training in trainings.items():
                bar.set_description(name)
                training.epoch(data, number)
                bar.update()
    return {name: training.result(data) for name, training in trainings.items()}


def draw(results: dict[str, Curve], path: Path) -> None:
    """Draw the loss curves, smoothed over ten steps, and bars of time and memory beside them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout='constrained')
    curves, times, memory = figure.subplots(1, 3, width_ratios=[3, 1, 1])
    colors = ['#3b6fb6', '#8fb0dc', '#e3a08a', '#d1603d'][: len(results)]
    for color, (name, result) in zip(colors, results.items()):
        losses = torch.tensor(result.losses)
        smooth = F.avg_pool1d(F.pad(losses[None, None], (9, 0), 'replicate'), 10, 1)[0, 0]
        curves.plot(smooth, color=color, label=f'{name}: {result.accuracy:.2%} on the test set')
    curves.set(
        xlabel='step',
        ylabel='training loss',
        yscale='log',
        title='Handwritten digits: the same training, run in several ways',
    )
    curves.legend()
    curves.grid(alpha=0.3)
    for axes, title, values in (
        (times, 'ms per step', [training.seconds * 1e3 for training in results.values()]),
        (memory, 'peak memory, MiB', [training.memory / 2**20 for training in results.values()]),
    ):
        bars = axes.bar([*range(len(values))], values, color=colors)
        axes.bar_label(bars, fmt='%.3g')
        axes.set(title=title, xticks=[])
    figure.savefig(path, dpi=120)


def parse_balance(context: Any, parameter: Any, value: str | None) -> list[int] | None:
    """Read a balance like 7,8."""
    try:
        return None if value is None else [int(number) for number in value.split(',')]
    except ValueError:
        raise click.BadParameter(f'{value!r} is not a list of whole numbers like 7,8') from None


class Choice(NamedTuple):
    """How the pipeline is run, and whether a plan says so."""

    schedule: str
    balance: list[int]
    devices: list[torch.device]
    chunks: int
    checkpoint: str
    planned: bool


def choose(
    data: Data,
    balance: list[int] | None,
    chunks: int | None,
    checkpoint: str | None,
    schedule: str | None,
) -> Choice:
    """Return the options of the pipeline: from a plan, except for the user's choices."""
    if balance is not None:
        places = choose_devices(len(balance), None if schedule == PLAIN_CALL else schedule)
        return Choice(
            schedule or '1f1b', balance, places, chunks or 4, checkpoint or 'never', False
        )
    devices = choose_devices(min(max(len(accelerators()), 2), 4))
    fastest = plan(
        network(),
        data.train[0][:BATCH],
        devices=list(dict.fromkeys(devices)),
        param_scale=3,
        schedules=[schedule] if schedule else (PLAIN_CALL, *NAMES),
        chunks=None if chunks is None else [chunks],
        checkpoints=[checkpoint] if checkpoint else ('never', 'except_last', 'always'),
    )
    return Choice(
        fastest.schedule,
        [*fastest.balance],
        [*map(torch.device, fastest.devices)],
        fastest.chunks,
        fastest.checkpoint,
        True,
    )


def contenders(choice: Choice, threads: int, steps: int) -> dict[str, Training]:
    """Return the trainings, by name."""

    def piped() -> GPipe:
        torch.manual_seed(0)
        return GPipe(
            network(),
            choice.balance,
            devices=devices,
            chunks=choice.chunks,
            checkpoint=choice.checkpoint,
            deferred_batch_norm=True,
        )

    devices = choice.devices
    first = [memory_of(devices[0])]
    trainings = {}
    for number in sorted({threads, 1}, reverse=True) if is_cpu(devices[0]) else [threads]:
        torch.manual_seed(0)
        name = f'unwrapped, {number} thread{"s" * (number > 1)}'
        trainings[name if is_cpu(devices[0]) else 'unwrapped'] = Training(
            network().to(first[0]), first, number, steps
        )
    trainings['GPipe, plain call'] = Training(piped(), devices, 1, steps)
    if choice.schedule != PLAIN_CALL:
        trainings[f'GPipe, {choice.schedule}'] = Training(
            piped(), devices, 1, steps, choice.schedule
        )
    return trainings


@click.command()
@click.option(
    '--epochs',
    type=click.IntRange(1),
    default=12,
    help='Passes over the training set.',
)
@click.option(
    '--chunks',
    type=click.IntRange(1, BATCH),
    show_default='by a plan',
    help=f'Micro-batches in a mini-batch of {BATCH}.',
)
@click.option(
    '--balance',
    callback=parse_balance,
    show_default='by a plan',
    metavar='N,N,…',
    help='Layers in each partition; 16 in all. What else is not chosen is 4 chunks, '
    'never, 1f1b then.',
)
@click.option(
    '--checkpoint',
    type=click.Choice(['always', 'except_last', 'never']),
    show_default='by a plan',
    help='Which micro-batches are computed again in backward.',
)
@click.option(
    '--schedule',
    type=click.Choice([PLAIN_CALL, *NAMES]),
    show_default='by a plan',
    help='The order of a step; interleaved, looped-bfs and zb-v have two partitions on '
    'each device.',
)
@output_option
def digits(
    epochs: int,
    chunks: int | None,
    balance: list[int] | None,
    checkpoint: str | None,
    schedule: str | None,
    output: str,
) -> None:
    """Train on scikit-learn's handwritten digits, unwrapped and in GPipe, and compare.

    The partitions are on all accelerators, or else on cpu:0 and cpu:1, which have a thread each.
    The unwrapped model has as many threads as there are, and then one.
    """
    folder, threads = output_folder(output), torch.get_num_threads()
    data = load()
    torch.set_num_threads(1)  # each worker's number, for the plan
    try:
        choice = choose(data, balance, chunks, checkpoint, schedule)
        trainings = contenders(choice, threads, epochs * -(-len(data.train[0]) // BATCH))
    except ValueError as error:
        raise click.ClickException(str(error).splitlines()[0]) from None
    finally:
        torch.set_num_threads(threads)
    results = train(trainings, data, epochs)
    torch.set_num_threads(threads)
    draw(results, folder / 'digits.png')
    print_results(results, choice, threads)
    click.echo(f'loss curves, times, memory: {folder / "digits.png"}')


def print_results(results: dict[str, Curve], choice: Choice, threads: int) -> None:
    """Print the table, and the machine of the measurement."""
    computer = machine()
    hardware = ', '.join(computer['gpus']) or computer['cpu']
    click.echo(f'torch {computer["torch"]}, {hardware}, {computer["date"]}')
    chosen = ', by a plan' if choice.planned else ''
    click.echo(
        f'GPipe on {", ".join(map(str, choice.devices))}{chosen}: balance '
        f'{choice.balance}, {choice.chunks} chunks, checkpoint '
        f"'{choice.checkpoint}'\n"
    )
    rows = [*results.values()]
    alone = next((k for k, name in enumerate(results) if name.endswith('1 thread')), 0)
    click.echo(
        table(
            ['', 'test accuracy', 'ms per step', 'times as fast', 'peak memory, MiB'],
            [
                [
                    name,
                    f'{result.accuracy:.2%}',
                    f'{result.seconds * 1e3:.1f}',
                    f'{rows[alone].seconds / result.seconds:.2f}',
                    f'{result.memory / 2**20:.2f}',
                ]
                for name, result in results.items()
            ],
        )
    )
    losses = [torch.tensor(result.losses) for result in rows]
    differences = torch.stack([(curve - losses[0]).abs() for curve in losses[1:]])
    click.echo(
        f'\nlargest difference of the losses: {differences.max():.4f} (mean '
        f'{differences.mean():.4f}) in {len(losses[0])} steps; each micro-batch is '
        'normalised by itself.'
    )
    click.echo(f'times as fast: as {[*results][alone]}.')
    click.echo('peak memory: of one training step, beyond parameters and optimizer state.')
    if is_cpu(choice.devices[0]):
        click.echo(
            f'Each of {len({*choice.devices})} workers has one thread, and a partition of the '
            'model. The plain call goes back in one\nthread on a CPU; a step by a schedule does '
            f'in all. With {threads} threads the kernels of the unwrapped model\nshare the whole '
            'mini-batch, which needs one memory for all; a pipeline does not.'
        )


COMMANDS = [digits]
