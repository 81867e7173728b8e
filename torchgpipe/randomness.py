"""Random states: what a recomputation restores, and who may draw at the same time.

A recomputation has to draw the numbers that the first pass drew. A CUDA device has a generator of
its own and one worker, so saving and restoring its state is enough. The CPU's generator is shared
by all workers and by all threads of backward, which takes more care:

1. Partitions that draw from it never run at the same time as another one (:class:`Quiet`), so each
   cell draws one unbroken piece of its sequence, always in the same order.
2. A recomputation touches it only if the first pass did, and then under a lock.
3. Its state is read and written under that lock only. PyTorch guards a generator with a mutex,
   which it takes while it holds the GIL; making the tensor for the state may start Python's
   garbage collector, which may let go of the GIL. Two threads could then wait for each other for
   ever. Who waits for a lock of Python's own lets go of the GIL.
"""
import threading
from contextlib import contextmanager
from typing import Any, ContextManager, Dict, Iterator, Optional, Set, Tuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from torchgpipe.stream import no_context

__all__ = ['Quiet', 'RandomState', 'cpu_state']

_cpu = torch.default_generator

# Rules 2 and 3. Reentrant, since a cell may hold a pipeline of its own.
_cpu_lock = threading.RLock()


def cpu_state() -> Tensor:
    """Give a copy of the CPU generator's state."""
    with _cpu_lock:
        return _cpu.get_state()


class RandomState:
    """The random states of a cell's device and of the CPU, as they were before the cell ran.

    Args:
        device: The cell's device.
        quiet: Whether the cell is known not to draw from the CPU's generator.
    """

    __slots__ = ('cpu', 'device', 'own')

    def __init__(self, device: torch.device, quiet: bool = False) -> None:
        self.cpu: Optional[Tensor] = None if quiet else cpu_state()
        self.device = device
        self.own: Optional[Tensor] = None
        if device.type not in ('cpu', 'meta'):
            self.own = torch.get_device_module(device).get_rng_state(device)

    def settle(self) -> None:
        """Forget the CPU's state if nothing was drawn from it since."""
        if self.cpu is not None and torch.equal(self.cpu, cpu_state()):
            self.cpu = None

    def restored(self) -> ContextManager[Any]:
        """Put these states back within the context."""
        return no_context if self.cpu is None and self.own is None else self._restored()

    @contextmanager
    def _restored(self) -> Iterator[None]:
        module = torch.get_device_module(self.device)
        with no_context if self.cpu is None else _cpu_lock:
            cpu = None if self.cpu is None else cpu_state()
            own = None if self.own is None else module.get_rng_state(self.device)
            try:
                if self.cpu is not None:
                    _cpu.set_state(self.cpu)
                if self.own is not None:
                    module.set_rng_state(self.own, self.device)
                yield
            finally:
                if cpu is not None:
                    _cpu.set_state(cpu)
                if own is not None:
                    module.set_rng_state(own, self.device)


class Quiet:
    """Which partitions may run at the same time, since they don't draw from the CPU's generator.

    Nobody can tell from a module whether it will draw. Partitions with a layer that is known for
    it, such as dropout in training, run alone until one such run is seen to draw nothing. The
    others run at the same time, and the generator is looked at after each clock; if one of them
    drew after all, they run alone from then on. (A layer that seeds the generator and then puts
    its state back is not found out.)

    A partition is known by its index and by the training flags of its modules.
    """

    def __init__(self) -> None:
        self._quiet: Dict[Tuple[Any, ...], bool] = {}
        self._loud: Set[Tuple[Any, ...]] = set()

    def key(self, j: int, partition: nn.Module) -> Tuple[Any, ...]:
        """Name a partition in its present mode."""
        modules = list(partition.modules())
        key = (j, *(module.training for module in modules))
        if key not in self._quiet:
            self._quiet[key] = not any(_may_draw(module) for module in modules)
        return key

    def __contains__(self, key: Tuple[Any, ...]) -> bool:
        return self._quiet[key]

    def learn(self, key: Tuple[Any, ...], quiet: bool) -> None:
        """Remember whether a partition that ran alone drew nothing."""
        self._quiet[key] = quiet and key not in self._loud

    def distrust(self, key: Tuple[Any, ...]) -> None:
        """Let a partition run alone from now on."""
        self._quiet[key] = False
        self._loud.add(key)


def _may_draw(module: nn.Module) -> bool:
    # Recurrent layers, attention and many others keep a probability in `dropout`.
    rate = getattr(module, 'dropout', 0)
    return module.training and (
        isinstance(module, (_DropoutNd, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d))
        or (isinstance(rate, float) and rate > 0))
