"""The command ``torchgpipe-train-gpt``."""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NoReturn

import click

from torchgpipe.trainer.config import Config, add_options, complete, config_of
from torchgpipe.trainer.files import output_folder
from torchgpipe.trainer.launch import accept_any_text, launch
from torchgpipe.trainer.log import check_log, sample_logs
from torchgpipe.trainer.planning import choose_mesh, rehearse
from torchgpipe.trainer.ranks import NOT_FINITE
from torchgpipe.trainer.stream import SplitDataset
from torchgpipe.trainer.tokens import TokenFiles
from torchgpipe.trainer.train_gpt import train
from torchgpipe.trainer.training_folder import Lock, TrainingFolder, new_name

#: Exit codes after which another attempt would end the same way; 2 is of a wrong option.
FINAL = 2, NOT_FINITE


@click.command('train-gpt')
@add_options
def train_gpt(**options: Any) -> None:
    """Train a GPT on a mesh of data × pipe × tensor, by the processes that this takes.

    Each step logs the loss (the exact mean over all tokens), the norm of gradients, the learning
    rate and tokens/s. It logs TFLOP/s of a device (6·N + 12·layers·width·block per token, of N
    parameters) and its part of the peak (MFU). It also logs the largest memory of a rank, and the
    bubble: the share of the step's time in which ranks wait.
    """
    config = config_of(options)
    if config.plan and config.devices:
        config = choose_mesh(config, options)
    config = complete(config)
    if config.dry_run:
        rehearse(config)
        return
    is_first = os.environ.get('RANK', '0') == '0'
    is_locked = config.save and is_first
    with TrainingFolder(config.save).locked() if is_locked else nullcontext() as lock:
        training = check_files(config)
        if 'RANK' in os.environ or config.world == 1 and not config.restarts:
            train(config, training)
        else:
            launch(
                run_rank,
                config,
                training,
                lock,
                world=config.world,
                restarts=config.restarts,
                final=FINAL,
            )


def run_rank(attempt: int, config: Config, training: dict[str, Any], lock: Lock | None) -> None:
    """Run a rank of the training; after a failure, from the newest checkpoint.

    Args:
        attempt: The number of the attempt, from 0 on.
        config: The options.
        training: The description of the training.
        lock: The lock of its folder, which is held as long as the rank runs.
    """
    train(config.resumed() if attempt else config, training)


def check_files(config: Config) -> dict[str, Any]:
    """Check the data, the folder of checkpoints and the logs; return the training's description.

    Raises:
        click.UsageError: Some cannot be read or written, or they belong to another training.
    """
    output_folder(config.output)
    # These are the same until the end. The mesh, the number of steps, the learning rate and the
    # clipping of gradients may change when a training is resumed.
    training = {
        **config.sizes._asdict(),
        'experts': config.experts,
        'block_size': config.block_size,
        'seed': config.seed,
        'global_batch_size': config.global_batch_size,
        'weight_decay': config.weight_decay,
        'dtype': config.dtype,
        **describe_data(config),
    }
    last = 0
    name = new_name()
    if config.save:
        folder = TrainingFolder(config.save)
        name = folder.check(training, config.resume, config.steps)
        last = max(folder.steps(), default=0)
    if config.log and os.environ.get('RANK', '0') == '0':
        paths = [config.log]
        if config.log_samples:
            paths += sample_logs(config.log)
        for path in paths:
            check_log(path, name, last, regular=config.log_samples)
    if config.tensorboard:
        output_folder(config.tensorboard)
    return {**training, 'name': name}


def describe_data(config: Config) -> dict[str, Any]:
    """Return the properties of the data that cannot change during a training.

    Raises:
        click.UsageError: The data cannot be read.
    """
    if config.dataset and os.environ.get('RANK', '0') != '0':
        return {}  # The first rank reads the dataset.
    data: Callable[[Config], Any] = SplitDataset if config.dataset else TokenFiles
    try:
        description: dict[str, Any] = data(config).describe()
    except ImportError:
        raise click.UsageError('--dataset takes a package: pip install datasets') from None
    except (OSError, RuntimeError, ValueError) as error:
        raise click.UsageError(f'cannot read the data: {error}') from None
    return description


def main() -> NoReturn:
    """Run the command."""
    run_command(train_gpt, 'torchgpipe-train-gpt')


def run_command(command: click.Command, name: str, obj: Any = None) -> NoReturn:
    """Run a command. Errors in its options take one line.

    Args:
        command: The command.
        name: Its name, for the help text.
        obj: The object of click's context.
    """
    accept_any_text()
    try:
        command(prog_name=name, standalone_mode=False, obj=obj)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
    except click.ClickException as error:
        click.echo(f'Error: {error.format_message()}', err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo('Stopped.', err=True)
        sys.exit(130)
    sys.exit(0)
