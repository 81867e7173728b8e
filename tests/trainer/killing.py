"""Ranks of the trainer that are killed: at a step, or in the middle of a save."""

import os
import random
import shutil
import signal
import threading
from pathlib import Path

from torchgpipe.distributed import DistributedGPipe
from torchgpipe.trainer import train_gpt
from torchgpipe.trainer.command import run_rank


def once(output):
    """Return whether this is the first call with a folder."""
    try:
        Path(output, 'killed').touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def killed_at_a_step(attempt, config, training, victim):
    """Train, but for the first time a rank is killed before the optimizer of a step."""
    check = train_gpt.check_finite

    def check_finite(model, step, *values):
        if (int(os.environ['RANK']), step) == victim and once(config.output):
            shutil.copy(config.log, Path(config.output, 'log-before'))
            os.kill(os.getpid(), signal.SIGKILL)
        check(model, step, *values)

    train_gpt.check_finite = check_finite
    run_rank(attempt, config, training, None)


def killed_in_a_save(attempt, config, training, moment):
    """Train, but a rank is killed at a random moment of the second save."""
    save, generator, saves = DistributedGPipe.save, random.Random(moment), []

    def saving(*args, **options):
        saves.append(args)
        if (
            len(saves) == 2
            and int(os.environ['RANK']) == moment % config.world
            and once(config.output)
        ):
            threading.Timer(
                generator.uniform(0, 0.06), os.kill, (os.getpid(), signal.SIGKILL)
            ).start()
        return save(*args, **options)

    DistributedGPipe.save = saving
    run_rank(attempt, config, training, None)
