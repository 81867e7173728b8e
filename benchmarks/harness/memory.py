"""The memory that a partition keeps, and the peak of a step."""

import gc
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.harness.live import LiveTensors, Storage
from torchgpipe import is_checkpointing, is_recomputing
from torchgpipe.base.private import backward_pass

GIB = 2**30


def size_of_partition(partition: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes that stay: parameters (with buffers), gradients, optimizer state."""
    parameters = list(partition.parameters())
    state = [
        value
        for p in parameters
        for value in optimizer.state[p].values()
        if isinstance(value, Tensor)
    ]
    return {
        'parameters': _bytes([*parameters, *partition.buffers()]),
        'gradients': _bytes([p.grad for p in parameters if p.grad is not None]),
        'optimizer': _bytes(state),
    }


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def peak_memory(step: Any, devices: list[torch.device]) -> int:
    """Return the peak of one step in bytes, beyond tensors alive before it, over all devices."""
    accelerators = {
        device: torch.get_device_module(device) for device in devices if device.type != 'cpu'
    }
    if not accelerators:
        with LiveTensors().watched() as live:
            step()
        return live.peak
    before = {}
    for device, module in accelerators.items():
        torch.accelerator.synchronize(device)
        gc.collect()  # Garbage that is freed within the step would hide a part of the peak.
        module.reset_peak_memory_stats(device)
        before[device] = module.memory_allocated(device)
    step()
    return sum(
        module.max_memory_allocated(device) - before[device]
        for device, module in accelerators.items()
    )


def peak_of_activations(step: Callable[[], object]) -> int:
    """Return the peak bytes of tensors that a step makes in forward, summed over its threads.

    Gradients are excluded. Each partition on the CPU has a thread of its own, and its peak does
    not depend on the progress of the others. The CPU's allocator keeps no statistics.
    """

    def thread_and_pass() -> tuple[int, bool]:
        return threading.get_ident(), _in_forward()

    live = OwnedTensors(thread_and_pass)
    with live.watched():
        step()
    return sum(peak for (_, forward), peak in live.peaks.items() if forward)


def _in_forward() -> bool:
    """Return whether the calling thread runs forward, for the first time or again.

    The second half of a split backward is outside autograd, and as in autograd, gradients are
    disabled there.
    """
    if is_checkpointing() or is_recomputing():
        return True
    return backward_pass() == -1 and torch.is_grad_enabled()


class OwnedTensors(LiveTensors):
    """Live tensors, each of which belongs to an owner, who has a peak of its own in ``peaks``.

    Args:
        owner: Whose the tensors are that the calling thread makes.
    """

    def __init__(self, owner: Callable[[], Hashable]) -> None:
        super().__init__()
        self.peaks: dict[Hashable, int] = {}
        self._owner = owner
        self._owned: dict[Hashable, int] = {}

    def begin(self, storage: Storage) -> None:
        super().begin(storage)
        self._own(storage, self._owner())

    def end(self, storage: Storage) -> None:
        super().end(storage)
        self._owned[storage.owner] -= storage.size

    def give(self, tensor: Tensor, owner: Hashable) -> None:
        """Let a tensor belong to another owner from now on."""
        with self._lock:
            storage = self.find(tensor)
            if storage is not None:
                self._owned[storage.owner] -= storage.size
                self._own(storage, owner)

    def _own(self, storage: Storage, owner: Hashable) -> None:
        storage.owner = owner
        self._owned[owner] = self._owned.get(owner, 0) + storage.size
        self.peaks[owner] = max(self.peaks.get(owner, 0), self._owned[owner])
