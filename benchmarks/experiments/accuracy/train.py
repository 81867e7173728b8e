"""Train ResNet-101 on a folder of images, and measure its error on the validation images.

The recipe is of Goyal et al., arXiv 1706.02677: SGD with Nesterov momentum 0.9 and weight decay
1e-4. The learning rate is 0.1 for a batch of 256 and grows with it. It is divided by 10 three
times, after a warm-up::

    epoch     0 ─── 5 ─────── 30 ─────── 60 ──── 80 ─── 90
    rate      0.1 ↗ peak      ÷ 10       ÷ 100   ÷ 1000         peak = 0.1 × batch / 256

Training for another number of epochs stretches all of it. It differs from the paper: weight decay
is on all parameters, and the scale of each block's last batch norm starts at 1. The last layer
starts as PyTorch's does, and the last mini-batch of an epoch may be smaller.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

from benchmarks.experiments.accuracy.images import (
    ImageFolder,
    UnreadableImage,
    normalise,
    open_folders,
)
from benchmarks.experiments.accuracy.progress import Progress
from benchmarks.harness.experiment import Experiment, Setting
from benchmarks.harness.job import autocast, wrap
from benchmarks.harness.options import Options
from benchmarks.models import resnet101
from torchgpipe.base.devices import memory_of

EPOCHS = 90
WARM_UP = 5 / 90
MILESTONES = (30 / 90, 60 / 90, 80 / 90)


def learning_rate(progress: float, batch: int) -> float:
    """Return the learning rate.

    >>> [round(learning_rate(epoch / 90, 1024), 4) for epoch in (0, 2.5, 5, 30, 60, 80)]
    [0.1, 0.25, 0.4, 0.04, 0.004, 0.0004]

    Args:
        progress: Fraction of the training that is over, from 0 to 1.
        batch: Samples of a mini-batch.
    """
    peak = 0.1 * batch / 256
    if progress < WARM_UP:
        start = min(0.1, peak)
        return start + (peak - start) * progress / WARM_UP
    return peak / 10 ** sum(progress >= milestone for milestone in MILESTONES)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer; the learning rate is set before each step."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)


class Errors(NamedTuple):
    """The mean loss, and shares of images in percent."""

    loss: float
    top1: float
    top5: float


class Training:
    """A training: model, data, optimizer, and an epoch of each kind."""

    def __init__(
        self, experiment: Experiment, setting: Setting, options: Options, data: Path, workers: int
    ) -> None:
        self.options = options
        self.name = setting.name
        self.batch = setting.scaled_batch(options.scale)
        self.devices = options.place(setting)
        self.workers = workers
        resolution = experiment.scaled_resolution(options.scale)
        self.train_set, self.val_set = open_folders(data, resolution, options.seed)
        torch.manual_seed(options.seed)
        kwargs = {'deferred_batch_norm': True} if setting.balance else {}
        model = resnet101(len(self.train_set.classes))
        self.model = wrap(model, setting, options, self.batch, **kwargs)
        self.optimizer = make_optimizer(self.model.parameters())
        self.scaler = torch.amp.GradScaler(
            self.devices[0].type, enabled=options.dtype == torch.float16
        )

    def _load(self, images: ImageFolder, shuffle: bool) -> DataLoader[Any]:
        random = torch.Generator().manual_seed(hash((self.options.seed, images.epoch)) % 2**63)
        return DataLoader(
            images,
            self.batch,
            shuffle=shuffle,
            generator=random,
            num_workers=self.workers,
            pin_memory=self.devices[0].type != 'cpu',
        )

    def _forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if self.options.dtype == torch.float64 else torch.float32
        first, last = memory_of(self.devices[0]), memory_of(self.devices[-1])
        with autocast(self.options, self.devices):
            output = self.model(normalise(images.to(first, non_blocking=True), dtype))
            return output, F.cross_entropy(output, labels.to(last, non_blocking=True))

    def train(self, epoch: int) -> Errors:
        """Train for an epoch."""
        self.model.train()
        self.train_set.epoch = epoch
        loader = self._load(self.train_set, shuffle=True)
        count = _Count()
        for step, (images, labels) in enumerate(self._bar(loader, f'epoch {epoch + 1}')):
            progress = (epoch + step / len(loader)) / self.options.epochs
            for group in self.optimizer.param_groups:
                group['lr'] = learning_rate(progress, self.batch)
            self.optimizer.zero_grad()
            output, loss = self._forward(images, labels)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            count.add(output, labels, loss)
        return count.errors()

    @torch.no_grad()
    def validate(self) -> Errors:
        """Classify the validation images."""
        self.model.eval()
        count = _Count()
        for images, labels in self._bar(self._load(self.val_set, shuffle=False), 'validation'):
            output, loss = self._forward(images, labels)
            count.add(output, labels, loss)
        return count.errors()

    def _bar(self, loader: DataLoader[Any], what: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches, and show samples per second and the time left."""
        images: Any = loader.dataset
        with tqdm(
            total=len(images), desc=f'{self.name}, {what}', unit=' samples', leave=False
        ) as bar:
            try:
                for batch, labels in loader:
                    yield batch, labels
                    bar.update(len(batch))
            except UnreadableImage as error:
                reason = str(error).strip().splitlines()[-1].partition('UnreadableImage: ')
                raise click.ClickException(
                    f'{reason[2] or reason[0]}; the epochs before are kept, and --resume goes on '
                    'from there'
                ) from None


class _Count:
    """Sums over the samples of an epoch, on the device, so that no step waits for them."""

    def __init__(self) -> None:
        self._sums: Any = 0
        self._samples = 0

    def add(self, output: Tensor, labels: Tensor, loss: Tensor) -> None:
        with torch.no_grad():
            best = output.topk(min(5, output.shape[1])).indices
            right = best == labels.to(output.device)[:, None]
            top1 = (~right[:, 0]).double().sum()
            top5 = (~right.any(1)).double().sum()
            self._sums += torch.stack([loss.double() * len(labels), top1, top5])
            self._samples += len(labels)

    def errors(self) -> Errors:
        loss, top1, top5 = (self._sums / self._samples).tolist()
        return Errors(loss, 100 * top1, 100 * top5)


def measure(
    experiment: Experiment,
    setting: Setting,
    options: Options,
    result: dict[str, Any],
    data: Path,
    workers: int,
    resume: bool,
) -> None:
    """Train to the end, and add the results of each epoch."""
    training = Training(experiment, setting, options, data, workers)
    progress = Progress.begin(experiment, setting, options, training.train_set.classes)
    state = {'model': training.model, 'optimizer': training.optimizer, 'scaler': training.scaler}
    if resume:
        progress.resume(**state)
    result['images'] = {
        'classes': len(training.train_set.classes),
        'train': len(training.train_set),
        'val': len(training.val_set),
    }
    _tell(progress, options, result)
    for epoch in range(len(progress.rows), options.epochs):
        start = time.perf_counter()
        train = training.train(epoch)
        seconds = time.perf_counter() - start
        val = training.validate()
        progress.add(
            {
                'epoch': epoch + 1,
                'learning_rate': training.optimizer.param_groups[0]['lr'],
                'train_loss': train.loss,
                'train_error': train.top1,
                'val_loss': val.loss,
                'val_error': val.top1,
                'val_error_top5': val.top5,
                'samples_per_second': len(training.train_set) / seconds,
            },
            **state,
        )
        _tell(progress, options, result)


def _tell(progress: Progress, options: Options, result: dict[str, Any]) -> None:
    if not progress.rows:
        return
    speeds = [row['samples_per_second'] for row in progress.rows[options.skip_epochs :]]
    result.update(
        figure=progress.rows[-1]['val_error'],
        epochs=progress.rows,
        log=f'{progress.folder.name}/log.csv',
    )
    result['details'] = {
        'top-5 error, %': progress.rows[-1]['val_error_top5'],
        'samples/s': median(speeds) if speeds else None,
    }
