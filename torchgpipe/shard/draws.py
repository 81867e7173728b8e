"""Random numbers: equal or different ones on the ranks of a group."""
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchgpipe.base.devices import is_cpu
from torchgpipe.shard.collectives import broadcast, from_first
from torchgpipe.shard.parameter import check_dim
from torchgpipe.shard.world import World, needed_by

__all__ = ['draws', 'same_draws']


class _OfDevice:
    """The default generator of the current device of an accelerator."""

    def __init__(self, kind: str) -> None:
        module = torch.get_device_module(kind)
        self.get_state, self.set_state = module.get_rng_state, module.set_rng_state
        self.manual_seed = module.manual_seed


@contextmanager
def same_draws(world: World, *generators: Any, replicas: bool = False) -> Iterator[None]:
    """Draw the random numbers of the group's first rank on all ranks of the group.

    If a rank's generators were in the same state, they keep the first rank's state afterwards.
    Otherwise their own state is restored. With `replicas`, all groups draw the same numbers.
    """
    own = [generator.get_state() for generator in generators]
    first = [_of_first(state, world, replicas) for state in own]
    if all(map(torch.equal, own, first)):
        yield
        return
    with _in_state(generators, own):
        for generator, state in zip(generators, first):
            generator.set_state(state)
        yield


@contextmanager
def draws(parallel_dim: int | None, device: torch.device | None = None) -> Iterator[None]:
    """Draw the same random numbers on all ranks of a group, or different ones.

    Use it around operations in your own layer that draw random numbers::

        with ts.draws(-1):  # each rank has heads of its own
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)

    In both cases the numbers depend on ``torch.manual_seed``, and a checkpoint that restores the
    states of generators draws them again. All ranks of a group have to enter it together.

    Args:
        parallel_dim: None for a full tensor. Then all ranks draw the numbers of a single process
            if their seeds are equal, and otherwise the numbers of the group's first rank. With -1
            or 1, for this rank's shard, each rank draws its own numbers.
        device: The device that draws; by default the accelerator, if there is one.
    """
    split, world = check_dim(parallel_dim) is not None, needed_by(parallel_dim)
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True)
    on_cpu = device is None or is_cpu(device)
    generators: list[Any] = [torch.default_generator]
    generators += [] if device is None or on_cpu else [_OfDevice(device.type)]
    if world is None or split and world.tensor_size == 1:
        yield
    elif not split:
        with same_draws(world, *generators):
            yield
    else:
        # Ranks with the same seed draw the same number here.
        seed = int(torch.randint(2 ** 62, (), device='cpu'))
        with _in_state(generators, [generator.get_state() for generator in generators]):
            for generator in generators:
                generator.manual_seed(seed + world.tensor_rank)
            yield


def _of_first(state: Tensor, world: World, replicas: bool) -> Tensor:
    """Return the state of a generator of the first rank, of the group or of all groups."""
    sent = state.clone().to(world.mesh.device_type)
    return (from_first(sent, world) if replicas else broadcast(sent, world.tensor_group)).cpu()


@contextmanager
def _in_state(generators: Any, states: list[Tensor]) -> Iterator[None]:
    """Restore the given states of generators at the end."""
    try:
        yield
    finally:
        for generator, state in zip(generators, states):
            generator.set_state(state)
