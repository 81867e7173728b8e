"""A model in training, for one step of a setting.

Compiled partitions leave alone the layers that the compiler does not understand::

    layers      conv  norm  relu  stash  conv  norm  pop  relu
    compiled    ───────────────          ──────────       ────

Layers that stash or pop have effects that it cannot see. A deferred batch norm does something
else in each micro-batch, so it would be compiled again and again.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import groupby
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks.harness.experiment import Experiment, Setting
from benchmarks.harness.memory import require, size_of_partition
from benchmarks.harness.options import Options, is_on_host
from torchgpipe import GPipe
from torchgpipe.base.devices import memory_of, synchronize
from torchgpipe.base.structure import Value
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.engine.streams import current_stream
from torchgpipe.skip.layout import DeclaresSkips
from torchgpipe.timeline.recorder import Stamp, seconds, stamp

Step = Callable[[Value], Value]


def compile_partition(partition: nn.Sequential) -> None:
    """Let a partition run its layers in compiled runs, in place."""
    steps: list[Step] = []
    for alone, layers in groupby(partition, key=_is_left_alone):
        run = list(layers)
        if alone:
            steps += run
        else:
            steps.append(torch.compile(_run(run, len(steps))))

    def forward(input: Value) -> Value:
        for step in steps:
            input = step(input)
        return input

    partition.forward = forward


def _run(layers: list[nn.Module], number: int) -> Step:
    """Return a function of some layers, with a code object of its own.

    PyTorch counts compilations by code object, and gives up at the eighth.
    """

    def run(input: Value) -> Value:
        for layer in layers:
            input = layer(input)
        return input

    run.__code__ = run.__code__.replace(co_name=f'run_{number}')
    return run


def _is_left_alone(layer: nn.Module) -> bool:
    return any(
        isinstance(module, (DeclaresSkips, DeferredBatchNorm)) for module in layer.modules()
    )


#: Tensors as large as the parameters: weights, gradients and the optimizer's state.
COPIES = {'SGD': 2, 'RMSprop': 3}


@contextmanager
def autocast(options: Options, devices: Sequence[torch.device]) -> Iterator[None]:
    """Compute in mixed precision within the context, if the options ask for it."""
    with ExitStack() as stack:
        if options.autocast:
            for kind in {device.type for device in devices}:
                stack.enter_context(torch.autocast(kind, options.autocast))
        yield


def wrap(
    model: nn.Sequential, setting: Setting, options: Options, batch: int, **kwargs: Any
) -> nn.Module:
    """Put a model on its devices: into GPipe, or by itself if the setting has no balance."""
    devices = options.place(setting)
    if options.dtype == torch.float64:
        model.double()
    wrapped: nn.Module
    if setting.balance:
        wrapped = GPipe(
            model,
            setting.balance,
            devices=devices,
            chunks=min(setting.chunks, batch),
            checkpoint=setting.checkpoint,
            **kwargs,
        )
    else:
        wrapped = model.to(memory_of(devices[0]))
    if options.compile:
        for partition in partitions_of(wrapped):
            compile_partition(partition)
    return wrapped


def partitions_of(model: nn.Module) -> list[nn.Sequential]:
    """Return the partitions of a GPipe; a model without one is one partition."""
    partitions: Any = model.partitions if isinstance(model, GPipe) else [model]
    return list(partitions)


def parameters_of(setting: Setting) -> int:
    """Return the number of parameters of a model."""
    with torch.device('meta'):
        return sum(parameter.numel() for parameter in setting.model.build().parameters())


class Job:
    """A setting's model, with random data of the right shape.

    Args:
        experiment: The table.
        setting: The line of the table.
        options: The user's options.
        change: An ablation's change of the model.

    Raises:
        MemoryError: The host has not enough memory for the model.
    """

    def __init__(
        self,
        experiment: Experiment,
        setting: Setting,
        options: Options,
        change: Callable[[nn.Sequential], nn.Sequential] = lambda model: model,
    ) -> None:
        self.setting = setting
        self.options = options
        self.devices = options.place(setting)
        self.batch = setting.scaled_batch(options.scale)
        self.chunks = min(setting.chunks, self.batch)
        self.resolution = experiment.scaled_resolution(options.scale)
        on_host = is_on_host(self.devices[0])
        # One accelerator draws the initial values itself. The host may not have the memory.
        in_place = len({*self.devices}) == 1 and not on_host
        if not in_place:
            copies = COPIES[experiment.optimizer] if on_host else 1
            size = max(4, options.dtype.itemsize) * copies
            require(size * parameters_of(setting), str(setting.model))
        torch.manual_seed(options.seed)
        with self.devices[0] if in_place else nullcontext():
            module = setting.model.build()
        self.model = wrap(change(module), setting, options, self.batch)
        self.partitions = partitions_of(self.model)
        # Where memory counts, one parameter at a time: `foreach` may copy all of them at once.
        foreach = False if experiment.figure == 'memory' else None
        optimizer = getattr(torch.optim, experiment.optimizer)
        self.optimizers = [
            optimizer(partition.parameters(), lr=1e-3, foreach=foreach)
            for partition in self.partitions
        ]
        self.input, self.target = self._data()

    def _data(self) -> tuple[Tensor, Tensor]:
        """Return images, and the classes of images or of their pixels."""
        dtype = self.options.dtype if self.options.autocast is None else torch.float32
        size = self.resolution, self.resolution
        x = torch.rand(self.batch, 3, *size, dtype=dtype)
        y = torch.randint(1000, (self.batch,))
        if self.setting.model.kind == 'unet':
            y = torch.rand(self.batch, 1, *size).round().to(dtype)
        return x.to(memory_of(self.devices[0])), y.to(memory_of(self.devices[-1]))

    def forward(self) -> Tensor:
        """Compute the loss."""
        with autocast(self.options, self.devices):
            return self._loss(self.model(self.input), self.target)

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.setting.model.kind == 'unet':
            return F.binary_cross_entropy_with_logits(output.to(target.dtype), target)
        return F.cross_entropy(output, target)

    def step(self) -> None:
        """Train on one mini-batch."""
        schedule = self.options.schedule
        if schedule is not None and isinstance(self.model, GPipe):
            with autocast(self.options, self.devices):
                self.model.step(self.input, self.target, self._loss, schedule=schedule)
        else:
            self.forward().backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.clear()

    def sizes(self) -> list[dict[str, int]]:
        """Return the bytes of each partition that stay from step to step."""
        return [
            size_of_partition(partition, optimizer)
            for partition, optimizer in zip(self.partitions, self.optimizers)
        ]

    def clear(self) -> None:
        """Let go of the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


#: Samples of an epoch at full scale.
SAMPLES = 10_000


def steps_of_an_epoch(setting: Setting, scale: float) -> int:
    """Return the number of steps in an epoch: a fraction of those at full scale."""
    return max(1, round(SAMPLES / setting.batch * scale))


def time_epochs(job: Job, result: dict[str, Any]) -> None:
    """Time epochs; the first ones are there to get warm."""
    setting, options = job.setting, job.options
    steps = steps_of_an_epoch(setting, options.scale)
    throughputs = []
    with tqdm(
        total=options.epochs * steps * job.batch, desc=setting.name, unit=' samples', leave=False
    ) as bar:
        for epoch in range(options.epochs):
            start = _now(job)
            for _ in range(steps):
                job.step()
                bar.update(job.batch)
            time = seconds(start, _now(job))
            if epoch >= options.skip_epochs:
                throughputs.append(steps * job.batch / time)
                result.update(figure=median(throughputs), epochs=throughputs)


def _now(job: Job) -> Stamp:
    """Return the time when all devices are through with all that is queued."""
    synchronize(job.devices)
    now = stamp(current_stream(job.devices[0]))
    synchronize(job.devices)
    return now
