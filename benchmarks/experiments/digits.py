"""Train a small convolutional network on real handwritten digits, with and without GPipe."""

import math
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks.harness.charts import Curves
from benchmarks.harness.memory import peak_memory
from benchmarks.harness.options import choose_devices, count_option, output_option
from benchmarks.harness.report import Part, Rows, Section
from benchmarks.harness.timing import one_thread, order_of_round
from torchgpipe import GPipe
from torchgpipe.base.devices import accelerators, is_cpu, memory_of
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
    images = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(labels)
    split = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    x, test_x, y, test_y = split
    return Data((x, y), (test_x, test_y))


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
        devices: The devices, of which the first one has the input and the last one the output.
        threads: The number of threads.
        steps: The number of steps.
        schedule: The schedule of a step; ``None`` for the plain call.
    """

    def __init__(
        self,
        model: Any,
        devices: Sequence[torch.device],
        threads: int,
        steps: int,
        schedule: str | None = None,
    ) -> None:
        self._model = model
        self._devices = devices
        self._threads = threads
        self._schedule = schedule
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
        if self._schedule is None:
            loss = F.cross_entropy(self._model(image), label)
            loss.backward()
        else:
            loss = self._model.step(image, label, F.cross_entropy, schedule=self._schedule)
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
            for name in order_of_round([*trainings], number):
                bar.set_description(name)
                trainings[name].epoch(data, number)
                bar.update()
    return {name: training.result(data) for name, training in trainings.items()}


def parse_balance(context: Any, parameter: Any, value: str | None) -> list[int] | None:
    """Read a balance like 7,8."""
    try:
        return None if value is None else [int(number) for number in value.split(',')]
    except ValueError:
        raise click.BadParameter(f'{value!r} is not a list of whole numbers like 7,8') from None


class Choice(NamedTuple):
    """The options of the pipeline, and whether they are from a plan."""

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
        devices = choose_devices(len(balance), None if schedule == PLAIN_CALL else schedule)
        return Choice(
            schedule or '1f1b', balance, devices, chunks or 4, checkpoint or 'never', planned=False
        )
    fastest = plan(
        network(),
        data.train[0][:BATCH],
        devices=list(dict.fromkeys(choose_devices(min(max(len(accelerators()), 2), 4)))),
        param_scale=3,
        schedules=[schedule] if schedule else (PLAIN_CALL, *NAMES),
        chunks=None if chunks is None else [chunks],
        checkpoints=[checkpoint] if checkpoint else ('never', 'except_last', 'always'),
    )
    devices = [torch.device(device) for device in fastest.devices]
    return Choice(
        fastest.schedule,
        [*fastest.balance],
        devices,
        fastest.chunks,
        fastest.checkpoint,
        planned=True,
    )


def contenders(choice: Choice, threads: int, steps: int) -> dict[str, Training]:
    """Return the trainings, by name."""

    def unwrapped(number: int) -> Training:
        torch.manual_seed(0)
        device = memory_of(choice.devices[0])
        return Training(network().to(device), [device], number, steps)

    def piped(*schedule: str) -> Training:
        torch.manual_seed(0)
        model = GPipe(
            network(),
            choice.balance,
            devices=choice.devices,
            chunks=choice.chunks,
            checkpoint=choice.checkpoint,
            deferred_batch_norm=True,
        )
        return Training(model, choice.devices, 1, steps, *schedule)

    trainings = {}
    if is_cpu(choice.devices[0]):
        if threads > 1:
            trainings[f'unwrapped, {threads} threads'] = unwrapped(threads)
        trainings['unwrapped, 1 thread'] = unwrapped(1)
    else:
        trainings['unwrapped'] = unwrapped(threads)
    trainings['GPipe, plain call'] = piped()
    if choice.schedule != PLAIN_CALL:
        trainings[f'GPipe, {choice.schedule}'] = piped(choice.schedule)
    return trainings


@click.command()
@count_option('--epochs', 12, 'Passes over the training set.')
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
    folder = output_folder(output)
    threads = torch.get_num_threads()
    data = load()
    steps = epochs * math.ceil(len(data.train[0]) / BATCH)
    try:
        with one_thread():  # as each worker has, for the plan
            choice = choose(data, balance, chunks, checkpoint, schedule)
            trainings = contenders(choice, threads, steps)
    except ValueError as error:
        raise click.ClickException(str(error).splitlines()[0]) from None
    curves = train(trainings, data, epochs)
    torch.set_num_threads(threads)
    results = {
        'choice': {**choice._asdict(), 'devices': [str(device) for device in choice.devices]},
        'threads': threads,
        'curves': {name: curve._asdict() for name, curve in curves.items()},
    }
    SECTION.publish(results, folder, not is_cpu(choice.devices[0]))


def baseline(results: dict[str, Any]) -> str:
    """Return the training that the others are compared with: unwrapped, with one thread."""
    names = [name for name in results['curves'] if name.startswith('unwrapped')]
    return names[-1]


def digit_rows(results: dict[str, Any]) -> Rows:
    """Return the header and a row for each training."""
    curves = results['curves']
    rows = []
    for name, curve in curves.items():
        rows.append(
            [
                name,
                f'{curve["accuracy"]:.2%}',
                f'{curve["seconds"] * 1e3:.1f}',
                f'{curves[baseline(results)]["seconds"] / curve["seconds"]:.2f}',
                f'{curve["memory"] / 2**20:.2f}',
            ]
        )
    return ['', 'test accuracy', 'ms per step', 'times as fast', 'peak memory, MiB'], rows


def panels(results: dict[str, Any]) -> list[Curves]:
    """Return the losses, smoothed over ten steps, and the time of a step by its memory."""
    losses, points = {}, {}
    for name, curve in results['curves'].items():
        steps = torch.tensor(curve['losses'])
        smooth = F.avg_pool1d(F.pad(steps[None, None], (9, 0), 'replicate'), 10, 1)[0, 0]
        losses[name] = range(len(steps)), smooth.tolist()
        points[name] = [curve['memory'] / 2**20], [curve['seconds'] * 1e3]
    return [
        Curves('step', 'training loss', losses, 'y'),
        Curves('peak memory, MiB', 'ms per step', points),
    ]


def parts(results: dict[str, Any]) -> Iterator[Part]:
    """Yield the options of the pipeline, the table, and its meaning."""
    choice = results['choice']
    by_plan = ', by a plan' if choice['planned'] else ''
    yield (
        f'GPipe on {", ".join(choice["devices"])}{by_plan}: balance {choice["balance"]}, '
        f"{choice['chunks']} chunks, checkpoint '{choice['checkpoint']}'"
    )
    yield digit_rows(results)
    losses = torch.tensor([curve['losses'] for curve in results['curves'].values()])
    differences = (losses[1:] - losses[0]).abs()
    yield (
        f'Largest difference of the losses: {differences.max():.4f} (mean '
        f'{differences.mean():.4f}) in {losses.shape[1]} steps. Each micro-batch is normalized by '
        f'itself. Times as fast: as {baseline(results)}. Peak memory: of one training step, in '
        'addition to parameters and optimizer state.'
    )
    if choice['devices'][0].startswith('cpu'):
        yield (
            f'Each of {len({*choice["devices"]})} workers has one thread, and a partition of the '
            'model. Backward of the plain call runs in one thread on a CPU, and a step by a '
            f'schedule in all of them. With {results["threads"]} threads, kernels of the '
            'unwrapped model share the whole mini-batch, which takes one memory for all.'
        )


SECTION = Section('Handwritten digits', 'digits', parts, panels)
COMMANDS = [digits]
SECTIONS = [SECTION]
