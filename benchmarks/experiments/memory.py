"""Measure memory: parameters, gradients, optimizer state and peak activations of each partition.

*Model memory* is parameters, gradients and optimizer state. *Activation memory* is the peak of
all memory over two steps, less the model memory; gradients stay from step to step. Both are summed
over partitions.

Where each partition has an accelerator for itself, the peak is the memory that its allocator has
reserved. Where partitions share a memory, the peak of each counts live tensors, as they would be
on its own device. These are the tensors that the partition made, its input, the gradient of its
output and the skip tensors that it pops. That leaves out the workspace of kernels and the rounding
of the allocator. A tensor that two partitions hold at the same time counts for the later one only.
"""

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import click
import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.harness.campaign import campaign
from benchmarks.harness.experiment import Experiment, Setting
from benchmarks.harness.job import Job
from benchmarks.harness.memory import GIB, OwnedTensors, Turns
from benchmarks.harness.options import Options, experiment_options, take_options
from benchmarks.harness.published import ACTIVATIONS, EXPERIMENTS, MODEL
from torchgpipe.base.devices import memory_of, synchronize
from torchgpipe.engine.plain_call import PlainCall
from torchgpipe.engine.run import Skip


def measure(
    experiment: Experiment, setting: Setting, options: Options, result: dict[str, Any]
) -> None:
    """Train for some steps, and add the memory of each partition to the result."""
    job = Job(experiment, setting, options)
    # Gradients and optimizer state, which belong to the model, are there after one step.
    before, steps = max(1, options.skip_epochs), options.epochs - options.skip_epochs
    by_allocator = all(_has_own_devices(options.place(setting)) for setting in options.settings)
    total = (before + steps) * job.batch
    with tqdm(total=total, desc=setting.name, unit=' samples', leave=False) as bar:

        def run(number: int, turns: Turns | None = None) -> None:
            for _ in range(number):
                train_keeping_gradients(job, turns)
                bar.update(job.batch)

        peaks = (_reserved if by_allocator else _live)(job, run, before, steps)

    result['partitions'] = []
    model, activations = 0, 0
    for device, sizes, peak in zip(job.devices, job.sizes(), peaks):
        size = sum(sizes.values())
        if by_allocator:
            peak -= size
        model += size
        activations += peak
        result['partitions'].append({'device': str(device), **sizes, 'activations': peak})
    result['measured_by'] = 'the allocator' if by_allocator else 'live tensors'
    result['figure'] = (model + activations) / GIB
    result['details'].update({MODEL: model / GIB, ACTIVATIONS: activations / GIB})


def _has_own_devices(devices: Sequence[torch.device]) -> bool:
    return len({device for device in devices if device.type != 'cpu'}) == len(devices)


def train_keeping_gradients(job: Job, turns: Turns | None = None) -> None:
    """Train on one mini-batch; the gradients stay.

    The output and the loss are in no partition, and are on the last device. The optimizer needs
    memory for a parameter at a time, on its device.
    """
    turns = turns or Turns([])
    last = len(job.partitions) - 1
    turns.give(last)
    loss = job.forward()
    # On an accelerator, backward runs in another thread.
    loss.grad_fn.register_prehook(lambda grads: turns.give(last))
    loss.backward()
    for j, optimizer in enumerate(job.optimizers):
        turns.give(j)
        optimizer.step()
    turns.give(None)


def _reserved(job: Job, run: Callable[..., None], before: int, steps: int) -> list[int]:
    """Ask the allocator of each partition's own device."""
    synchronize(job.devices)
    module = torch.get_device_module(job.devices[0])
    module.empty_cache()
    for device in job.devices:
        module.reset_peak_memory_stats(device)
    run(before + steps)
    synchronize(job.devices)
    return [module.max_memory_reserved(device) for device in job.devices]


def _live(job: Job, run: Callable[..., None], before: int, steps: int) -> list[int]:
    run(before)
    peaks = peaks_by_partition(job.partitions, lambda turns: run(steps, turns))
    return [peaks[j] for j in range(len(job.partitions))]


class _Owners(Turns):
    """Turns that count tensors that reach a partition as its own."""

    def __init__(self, partitions: Sequence[nn.Module]) -> None:
        super().__init__(partitions)
        self.live = OwnedTensors(lambda: self.owner)

    def receive(self, j: int, grads: Sequence[Tensor]) -> None:
        for grad in grads:
            self.live.give(grad, j)

    def hand_over(self, j: int, place: Any, tensors: Sequence[Tensor]) -> None:
        """Assign a cell's inputs on its device to its partition, also those that are no copies."""
        for tensor in tensors:
            if tensor.device == memory_of(place):
                self.live.give(tensor, j)


def peaks_by_partition(
    partitions: Sequence[nn.Module], run: Callable[[Turns], None]
) -> dict[int, int]:
    """Return the peak bytes of live tensors of each partition, in a memory that they share.

    Args:
        partitions: The partitions.
        run: The function to measure. Its argument is the turns, to assign its work between
            partitions.
    """
    owners = _Owners(partitions)
    bring = PlainCall._bring

    def bring_and_hand_over(
        pipeline: PlainCall, i: int, j: int, popped: Sequence[Skip]
    ) -> list[Tensor]:
        place = pipeline._engine.partitions[j].device
        waiting = [*pipeline._batches[i].tensors]
        for skip in popped:
            if skip.tensor is not None:
                waiting.append(skip.tensor)
        owners.hand_over(j, place, waiting)
        tensors = bring(pipeline, i, j, popped)
        owners.hand_over(j, place, tensors)
        return tensors

    try:
        with owners.live.watched(), patch.object(PlainCall, '_bring', bring_and_hand_over):
            run(owners)
    finally:
        owners.close()
    return {j: owners.live.peaks.get(j, 0) for j in range(len(partitions))}


def _command(experiment: Experiment) -> click.Command:
    @click.command(
        experiment.name,
        help=(
            f'{experiment.title}: what parameters, gradients, optimizer state and activations of '
            'each partition take. Model memory is all of these but activations; activation memory '
            'is the peak of all memory, less the model memory.'
        ),
    )
    @experiment_options(experiment, 2, 1, 'a step each, at least one of which comes first')
    def command(**options: Any) -> None:
        campaign(experiment, take_options(experiment, **options), measure)

    return command


COMMANDS = [
    _command(experiment)
    for experiment in (EXPERIMENTS['amoebanetd-memory'], EXPERIMENTS['unet-memory'])
]
