"""Random numbers while a forward is recorded: steps draw none, and who draws unseen is noticed."""
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ['KeptDraws', 'same_random_numbers']


class KeptDraws:
    """Put generators back after each step, and see whether they have moved before the next one."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = _python_states()

    def moved(self) -> str:
        """Name what has moved, if anything."""
        if not torch.equal(torch.get_rng_state(), self._torch):
            return 'PyTorch, by a function that is imported by its own name'
        return '' if _python_states() == self._python else 'Python'

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Let a step draw what it will."""
        python = random.getstate()
        try:
            yield
        finally:
            random.setstate(python)
            if not torch.equal(torch.get_rng_state(), self._torch):
                torch.set_rng_state(self._torch)
            self._python = _python_states()


def _python_states() -> tuple[Any, ...]:
    numpy = sys.modules.get('numpy')
    places = numpy.random.get_state(legacy=False)['state']['pos'] if numpy else None
    return random.getstate(), places


@contextmanager
def same_random_numbers(seed: int = 0) -> Iterator[None]:
    """Draw from a seed, and put the generators of PyTorch and Python back."""
    python = random.getstate()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices = range(torch.accelerator.device_count()) if accelerator else range(0)
    try:
        with torch.random.fork_rng(devices, device_type=accelerator.type if accelerator
                                   else 'cuda'):
            # Other numbers than the recording has drawn, whose way they may change.
            torch.manual_seed(seed)
            random.seed(seed)
            yield
    finally:
        random.setstate(python)
