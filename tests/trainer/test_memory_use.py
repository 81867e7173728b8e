"""The memory in use: the growth of the process, or of the device."""

import sys

import pytest
import torch

from torchgpipe.base.devices import CPU, accelerator
from torchgpipe.trainer.memory_use import peak, reset_peak


@pytest.mark.skipif(sys.platform != 'linux', reason='needs files of Linux')
def test_the_peak_of_the_process_grows_after_a_reset():
    torch.ones(2**26)
    before = reset_peak(CPU)
    assert peak(CPU) - before < 2**24
    torch.ones(2**24)  # 64 MiB
    assert 2**25 < peak(CPU) - before < 2**27


@pytest.mark.skipif(not accelerator(), reason='needs an accelerator')
def test_the_peak_of_a_device_grows_after_a_reset():
    device = torch.device(accelerator(), 0)
    before = reset_peak(device)
    torch.ones(2**24, device=device)
    assert peak(device) - before == 2**26


@pytest.mark.skipif(sys.platform != 'linux', reason='needs files of Linux')
def test_freed_memory_is_not_in_use():
    """The C library would keep the memory of small tensors before the last one."""
    tensors = [torch.ones(2**14) for _ in range(2**11)]  # 128 MiB
    last = tensors.pop()
    full = reset_peak(CPU)
    tensors.clear()
    assert reset_peak(CPU) < full - 2**26
    assert len(last) == 2**14
