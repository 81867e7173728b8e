"""The peak of the memory that a step takes."""
from typing import Any

import torch

from torchgpipe.balance.live import LiveTensors

__all__ = ['peak_memory']


def peak_memory(step: Any, devices: list[torch.device]) -> int:
    """Give the peak of one step in bytes, beyond what was alive before it, over all devices."""
    cuda = {device for device in devices if device.type == 'cuda'}
    if not cuda:
        with LiveTensors().watched() as live:
            step()
        return live.peak
    before = {}
    for device in cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before[device] = torch.cuda.memory_allocated(device)
    step()
    return sum(torch.cuda.max_memory_allocated(device) - before[device] for device in cuda)
