"""Train a small convolutional network on real handwritten digits, with and without GPipe."""
import time
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
from benchmarks.harness.report import machine, output_folder, table
from torchgpipe import GPipe
from torchgpipe.schedule import NAMES

BATCH = 64


class Data(NamedTuple):
    """Images of shape (N, 1, 8, 8) and labels of shape (N,)."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


class Result(NamedTuple):
    """What one training gave."""

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
    return Data((x.float().view(-1, 1, 8, 8) / 16, y), (test_x.float().view(-1, 1, 8, 8) / 16,
                                                        test_y))


def network() -> nn.Sequential:
    """Make the network: four convolutions with batch norm, 16 layers in all."""
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs),
                nn.ReLU()]

    return nn.Sequential(*block(1, 64), *block(64, 64), nn.MaxPool2d(2), *block(64, 128),
                         *block(128, 128), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
                         nn.Linear(512, 10))


def train(name: str, model: Any, data: Data, epochs: int, devices: list[torch.device],
          schedule: str | None = None) -> Result:
    """Train a model, by the plain call or by a schedule, and measure."""
    (x, y), (test_x, test_y) = data
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    steps = epochs * -(-len(x) // BATCH)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)
    losses, seconds = [], []

    def step(index: Tensor) -> float:
        optimizer.zero_grad()
        image, label = x[index].to(devices[0]), y[index].to(devices[-1])
        if schedule is not None:
            return model.step(image, label, F.cross_entropy, schedule=schedule).item()
        loss = F.cross_entropy(model(image), label)
        loss.backward()
        return loss.item()

    with tqdm(total=steps, desc=name, unit='step', leave=False) as bar:
        for _ in range(epochs):
            for index in torch.randperm(len(x), generator=generator).split(BATCH):
                start = time.perf_counter()
                losses.append(step(index))
                optimizer.step()
                seconds.append(time.perf_counter() - start)
                rates.step()
                bar.update()
                bar.set_postfix(loss=f'{losses[-1]:.3f}', refresh=False)
    model.eval()
    with torch.no_grad():
        right = model(test_x.to(devices[0])).argmax(1).cpu() == test_y
    model.train()
    optimizer.zero_grad()
    memory = peak_memory(lambda: step(torch.arange(BATCH)), devices)
    return Result(right.double().mean().item(), losses, median(seconds), memory)


def draw(results: dict[str, Result], path: Path) -> None:
    """Draw the loss curves, smoothed over ten steps, over the raw ones."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout='constrained')
    axes = figure.subplots()
    for color, (name, result) in zip(('#3b6fb6', '#d1603d'), results.items()):
        losses = torch.tensor(result.losses)
        axes.plot(losses, color=color, alpha=0.2, linewidth=0.8)
        smooth = F.avg_pool1d(F.pad(losses[None, None], (9, 0), 'replicate'), 10, 1)[0, 0]
        axes.plot(smooth, color=color, label=f'{name}: {result.accuracy:.2%} on the test set')
    axes.set(xlabel='step', ylabel='training loss', yscale='log',
             title='Handwritten digits: the same training with and without GPipe')
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def parse_balance(context: Any, parameter: Any, value: str) -> list[int]:
    """Read a balance like 7,8."""
    try:
        return [int(number) for number in value.split(',')]
    except ValueError:
        raise click.BadParameter(f'{value!r} is not a list of whole numbers like 7,8') from None


@click.command()
@click.option('--epochs', type=click.IntRange(1), default=12, show_default=True,
              help='Passes over the training set.')
@click.option('--chunks', type=click.IntRange(1), default=4, show_default=True,
              help='Micro-batches in a mini-batch of 64.')
@click.option('--balance', callback=parse_balance, default='6,10', show_default=True,
              metavar='N,N,…', help='Layers in each partition; 16 in all.')
@click.option('--checkpoint', type=click.Choice(['always', 'except_last', 'never']),
              default='except_last', show_default=True,
              help='Which micro-batches are computed again in backward.')
@click.option('--schedule', type=click.Choice([*NAMES]), show_default='the plain call',
              help='Train by GPipe.step, in this order; interleaved, looped-bfs and zb-v have two '
              'partitions on each device.')
@click.option('--output', default='results', show_default=True, metavar='DIR',
              help='Where the picture goes.')
def digits(epochs: int, chunks: int, balance: list[int], checkpoint: str, schedule: str | None,
           output: str) -> None:
    """Train on scikit-learn's handwritten digits twice, unwrapped and in GPipe.

    The partitions are on all accelerators, or else on cpu:0, cpu:1 and so on.
    """
    folder = output_folder(output)
    torch.manual_seed(0)
    plain = network()
    torch.manual_seed(0)
    try:
        devices = choose_devices(len(balance), schedule)
        piped = GPipe(network(), balance, devices=devices, chunks=chunks, checkpoint=checkpoint,
                      deferred_batch_norm=True)
    except ValueError as error:
        raise click.ClickException(str(error).splitlines()[0]) from None
    if chunks > BATCH:
        raise click.ClickException(f'--chunks {chunks} is more than the {BATCH} samples of a '
                                   'mini-batch')

    data = load()
    first = torch.device('cpu') if devices[0].type == 'cpu' else devices[0]
    results = {'unwrapped': train('unwrapped', plain.to(first), data, epochs, [first])}
    name = f'GPipe, {schedule}' if schedule else 'GPipe'
    results[name] = train(name, piped, data, epochs, devices, schedule)

    draw(results, folder / 'digits.png')
    print_results(results, piped, chunks, checkpoint)
    click.echo(f"loss curves: {folder / 'digits.png'}")


def print_results(results: dict[str, Result], model: GPipe, chunks: int, checkpoint: str) -> None:
    """Print the table, and what it was measured on."""
    here = machine()
    click.echo(f"torch {here['torch']}, {', '.join(here['gpus']) or here['cpu']}, {here['date']}")
    click.echo(f'GPipe on {", ".join(map(str, model.devices))}: balance {model.balance}, {chunks} '
               f"chunks, checkpoint '{checkpoint}'\n")
    click.echo(table(['', 'test accuracy', 'ms per step', 'peak memory, MiB'], [
        [name, f'{result.accuracy:.2%}', f'{result.seconds * 1e3:.1f}',
         f'{result.memory / 2**20:.2f}'] for name, result in results.items()]))
    a, b = (torch.tensor(result.losses) for result in results.values())
    click.echo(f'\nlargest difference of the losses: {(a - b).abs().max():.4f} '
               f'(mean {(a - b).abs().mean():.4f}) in {len(a)} steps; each micro-batch is '
               'normalised by itself.')
    click.echo('peak memory: of one training step, beyond parameters and optimizer state.')
    if all(device.type == 'cpu' for device in model.devices):
        click.echo("On a CPU the unwrapped model's kernels use all cores, too, on the whole "
                   'mini-batch, and nothing is\ncomputed twice. So GPipe takes longer here; '
                   'workers on a CPU are for trying and testing.')


COMMANDS = [digits]
