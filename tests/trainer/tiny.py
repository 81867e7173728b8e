"""A tiny model in float64, trained by the command and by a plain loop."""

import json
import re
import sys
from math import cos, pi
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from torchgpipe.base.devices import CPU
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.trainer import command
from torchgpipe.trainer.config import complete, config_of
from torchgpipe.trainer.gpt import GPT, init_gpt2, layers
from torchgpipe.trainer.launch import launch
from torchgpipe.trainer.tokens import TokenFiles, samples_at, starts_of

ROOT = Path(__file__).parents[2]
COMMAND = sys.executable, '-m', 'torchgpipe.trainer'
#: A tiny model in float64, and short steps.
TINY = (
    '--cpu --n-layer 4 --n-head 2 --n-embd 16 --block-size 8 --dtype float64 '
    '--global-batch-size 16 --steps 6 --generate 0 --eval-interval 3 --eval-batches 3 '
    '--warmup-steps 2'
).split()


def options_of(folder, *args):
    """Return the options of the trainer as it checks them."""
    Path(folder).mkdir(exist_ok=True)
    words = [*TINY, '--output', folder, '--log', Path(folder, 'log'), *args]
    with command.train_gpt.make_context('train-gpt', [*map(str, words)]) as context:
        return complete(config_of(context.params))


def lines_of(path):
    return [*map(json.loads, Path(path).read_text().splitlines())]


def launched(folder, *args):
    """Run the trainer in processes that this one starts; return the lines of its log."""
    config = options_of(folder, *args)
    start(command.run_rank, config, None)
    return lines_of(folder / 'log')


def start(run, config, *args):
    """Start ranks that run a function with the options and the description of a training."""
    training = command.check_files(config)
    launch(
        run,
        config,
        training,
        *args,
        world=config.world,
        restarts=config.restarts,
        final=command.FINAL,
    )
    return training


def run_tiny(run, folder, *args):
    """Run the command with the tiny model. A text may have several words; others are one."""
    words = []
    for arg in args:
        words += arg.split() if isinstance(arg, str) else [arg]
    return run(*TINY, '--output', folder, *words)


def assert_same(found, expected):
    """Compare losses, norms and validations of all steps."""
    for key in ('step', 'loss', 'grad_norm', 'val_loss'):
        values, others = ([line.get(key, 0) for line in lines] for lines in (found, expected))
        assert values == pytest.approx(others, rel=1e-9, abs=1e-9), key


def plain_curve(config, steps):
    """Train the unwrapped model by a plain loop."""
    data, sizes = TokenFiles(config), config.sizes
    tokens, val = data.train, data.val
    model = GPT(sizes).double()
    # The initial values that layers of a pipeline have follow from the seed and their numbers.
    model.load_state_dict(plain_values(config))
    decay, rest = (
        [x for x in model.parameters() if (x.dim() > 1) == each] for each in (True, False)
    )
    optimizer = torch.optim.AdamW(
        [{'params': decay, 'weight_decay': 0.1}, {'params': rest, 'weight_decay': 0.0}],
        betas=(0.9, 0.95),
    )
    lines = []
    for k in range(steps):
        x, y = samples_at(config, tokens, starts_of(config, len(tokens), k).flatten(), CPU)
        loss = F.cross_entropy(model(x).transpose(1, 2), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = (
            1e-3 * (k + 1) / 2
            if k < 2
            else 1e-4 + 9e-4 * (1 + cos(pi * (k - 2) / (config.steps - 3))) / 2
        )
        for group in optimizer.param_groups:
            group['lr'] = rate
        optimizer.step()
        optimizer.zero_grad()
        lines.append({'step': k + 1, 'loss': loss.item(), 'grad_norm': norm.item()})
        if (k + 1) % 3 == 0:
            n = min((len(val) - 1) // config.block_size, 3 * config.global_batch_size)
            pieces = torch.stack(
                [val[k * config.block_size :][: config.block_size + 1] for k in range(n)]
            ).long()
            lines[-1]['val_loss'] = F.cross_entropy(
                model(pieces[:, :-1]).transpose(1, 2), pieces[:, 1:]
            ).item()
    return lines


def plain_values(config):
    """Return the values of a pipeline of one process, by the names of the unwrapped model."""
    with torch.device('meta'):
        module = layers(GPT(config.sizes)).double()
    model = DistributedGPipe(
        module,
        [len(module)],
        mesh=init_mesh(device_type='cpu'),
        init=lambda each: init_gpt2(each, config.sizes.depth),
    )
    torch.distributed.destroy_process_group()
    return {re.sub(r'^\d+\.', '', name): x for name, x in model.state_dict().items()}


def mesh_of(data, pipe, tensor):
    return ['--data', data, '--pipe', pipe, '--tensor', tensor]
