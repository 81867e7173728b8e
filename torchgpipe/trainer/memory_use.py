"""The memory in use: of a device, or of the process on the CPU."""

import os
import sys
from contextlib import suppress
from pathlib import Path

import torch

from torchgpipe.base.devices import is_cpu
from torchgpipe.model.export import trim_memory

#: Linux takes the memory in use as the peak after a 5 is written here.
_RESET = Path('/proc/self/clear_refs')


def reset_peak(device: torch.device) -> int:
    """Forget the peak of the memory in use; return the bytes that are in use now.

    Without the files of Linux, the peak on the CPU stays, and is returned.
    """
    if not is_cpu(device):
        torch.accelerator.reset_peak_memory_stats(device)
        return torch.accelerator.memory_allocated(device)
    trim_memory()  # else the model would use memory that the prediction has freed
    with suppress(OSError):
        _RESET.write_text('5')
        pages = int(Path('/proc/self/statm').read_text().split()[1])
        return pages * os.sysconf('SC_PAGE_SIZE')
    return peak(device)


def peak(device: torch.device) -> int:
    """Return the peak in bytes since :func:`reset_peak`."""
    if not is_cpu(device):
        return torch.accelerator.max_memory_allocated(device)
    import resource

    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if sys.platform == 'darwin' else kilobytes * 1024
