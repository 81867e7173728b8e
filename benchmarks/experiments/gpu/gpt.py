"""A GPT on one device: PyTorch, and schedules with several partitions, all on that device.

The partitions run in the order of the schedule for several devices::

    partitions           0       1       2       3         all on one device
    rows of 1F1B         0F0 …   1F0 …   2F0 …   3F0 …     as for four devices
    actions              0F0 1F0 0F1 2F0 1F1 0F2 3F0 …     one after the other, by steps of rows

There are no bubbles and no copies. The differences between schedules are the costs of actions and
of a split backward, and the memory of activations.
"""

import gc
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.memory import peak_memory, unless_exhausted
from benchmarks.harness.options import equal_balance, is_on_host
from benchmarks.harness.timing import check_losses, time_in_turn
from torchgpipe import GPipe
from torchgpipe.base.devices import memory_of
from torchgpipe.schedule import make
from torchgpipe.trainer.gpt import GPT, Sizes, layers

MICRO_BATCHES = 8

#: Sequences of a micro-batch.
SEQUENCES = 2

#: Schedules, and the number of devices of their orders.
ORDERS = (
    ('1f1b', 1),
    ('1f1b', 4),
    ('1f1b', 8),
    ('zb-h1', 1),
    ('zb-h1', 4),
    ('zb-h1', 8),
    ('zb-v', 4),
    ('v-half', 4),
    ('v-min', 4),
)

Step = Callable[[], Tensor]


def compare(sizes: Sizes, device: torch.device, rounds: int) -> dict[str, Any]:
    """Take steps by each contender in turn.

    Args:
        sizes: The sizes of the GPT.
        device: The device of all layers.
        rounds: The number of rounds, of which the medians count.

    Returns:
        By contender the seconds and the loss of a step, and the peak in bytes above the
        parameters; or that it is out of memory.

    Raises:
        RuntimeError: Two contenders have different losses.
    """
    model, contenders = _contenders(sizes, device)

    def first_step(step: Step) -> dict[str, Any]:
        loss = step().item()  # allocates memory, so it is not measured
        # A schedule has gradients of its own until its end. Where there are earlier ones, both
        # exist at that time.
        model.zero_grad()
        return {'loss': loss, 'peak': peak_memory(step, [device])}

    rows: dict[str, dict[str, Any]] = {}
    for name, step in contenders.items():
        rows[name] = unless_exhausted(partial(first_step, step))
        model.zero_grad()
        gc.collect()
    losses = {name: row['loss'] for name, row in rows.items() if 'loss' in row}
    check_losses(losses, tolerance=1e-2)

    timed = {name: contenders[name] for name in losses}
    for name, seconds in time_in_turn(timed, rounds, [device], model.zero_grad).items():
        rows[name]['seconds'] = median(seconds)
    return {
        'sizes': sizes._asdict(),
        'micro_batches': MICRO_BATCHES,
        'sequences': SEQUENCES,
        'rounds': rounds,
        'rows': rows,
    }


def _contenders(sizes: Sizes, device: torch.device) -> tuple[nn.Module, dict[str, Step]]:
    """Return a model, and functions by name that compute its gradients of one mini-batch."""
    torch.manual_seed(0)
    memory = memory_of(device)
    dtype = torch.float32 if is_on_host(device) else torch.bfloat16
    model = layers(GPT(sizes)).to(memory, dtype)
    samples = MICRO_BATCHES * SEQUENCES
    tokens = torch.randint(sizes.vocabulary, (samples, sizes.context + 1)).to(memory)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    contenders: dict[str, Step] = {
        'plain PyTorch': partial(_in_parts, model, x, y),
        'torch.utils.checkpoint': partial(_checkpointed, model, x, y),
    }
    for schedule, devices in ORDERS:
        order = make(schedule, devices, MICRO_BATCHES)
        stages = sum(map(len, order.stages))
        if stages > sizes.depth:
            continue
        modes = ('never', 'always') if schedule == '1f1b' else ('never',)
        for mode in modes:
            pipeline = GPipe(
                model,
                equal_balance(len(model), stages),
                devices=[device] * stages,
                chunks=MICRO_BATCHES,
                checkpoint=mode,
            )
            partitions = f'{stages} partitions' if stages > 1 else '1 partition'
            name = f'{schedule}, {partitions}' + (', always' if mode == 'always' else '')
            contenders[name] = partial(pipeline.step, x, y, _loss, schedule=order)
    return model, contenders


def _loss(scores: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1).float(), target.flatten())


def _checkpointed(model: nn.Sequential, input: Tensor, target: Tensor) -> Tensor:
    """Train on one micro-batch after the other, with a checkpoint for each block."""

    def forward(tokens: Tensor) -> Tensor:
        value: Tensor = model[0](tokens)
        for layer in model[1:-1]:
            value = checkpoint(layer, value, use_reentrant=False)
        scores: Tensor = model[-1](value)
        return scores

    return _in_parts(forward, input, target)


def _in_parts(forward: Callable[[Tensor], Tensor], input: Tensor, target: Tensor) -> Tensor:
    """Train on one micro-batch after the other."""
    losses = []
    for x, y in zip(input.chunk(MICRO_BATCHES), target.chunk(MICRO_BATCHES)):
        loss = _loss(forward(x), y) / MICRO_BATCHES
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()
