"""Contenders that take turns, so that all of them meet the same changes of the machine."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from benchmarks.harness.options import Decorator, count_option
from torchgpipe.base.devices import synchronize

Item = TypeVar('Item')


def rounds_option(default: int) -> Decorator:
    """Return the option of a command that measures in turn."""
    return count_option('--rounds', default, 'Interleaved rounds, of which the medians count.')


def order_of_round(items: Sequence[Item], number: int) -> list[Item]:
    """Return the items in the order of a round: each is the first one in some round."""
    first = number % max(1, len(items))
    return [*items[first:], *items[:first]]


def time_in_turn(
    calls: Mapping[Item, Callable[[], object]],
    rounds: int,
    devices: Sequence[torch.device] = (),
    prepare: Callable[[], object] = lambda: None,
) -> dict[Item, list[float]]:
    """Return the seconds of each call in all rounds, without the call that prepares it."""
    times: dict[Item, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in order_of_round([*calls], number):
            prepare()
            synchronize(devices)
            start = time.perf_counter()
            calls[name]()
            synchronize(devices)
            times[name].append(time.perf_counter() - start)
    return times


def check_losses(
    losses: Mapping[Any, float], expected: float | None = None, tolerance: float = 1e-4
) -> None:
    """Check that contenders train the same model on the same data.

    Args:
        losses: The loss of the mini-batch, by contender.
        expected: The right loss; by default the first one.
        tolerance: The largest relative difference.

    Raises:
        RuntimeError: Losses differ by more.
    """
    for loss in losses.values():
        expected = loss if expected is None else expected
        if not math.isclose(loss, expected, rel_tol=tolerance):
            raise RuntimeError(f'these losses should be the same, {expected}: {losses}')


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first and the third quartile."""
    low, high = torch.tensor(values).quantile(torch.tensor([0.25, 0.75])).tolist()
    return [low, high]


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread within the context."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
