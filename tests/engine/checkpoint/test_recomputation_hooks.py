"""The user's saved-tensor hooks: they use one stream for the input of a cell."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests.devices import devices, places
from tests.helpers import assert_same, in_partitions, sleep, small_model
from torchgpipe import GPipe


def slowly(function):
    """Compute a tensor on the stream that is current, behind a slow kernel."""

    def compute(x):
        if not x.is_cpu:
            with torch.accelerator.device_index(x.device.index):
                sleep(1)
        return function(x)

    return compute


def backward(output, net):
    """Go through the graph as usual."""
    net.zero_grad()
    output.backward()
    return [parameter.grad for parameter in net.parameters()]


def twice(output, net):
    """Do so again: the first time, nothing of the second one may lie in memory still in use."""
    net.zero_grad()
    output.backward(retain_graph=True)
    return backward(output, net)


def only_parameters(output, net):
    """Ask for gradients that need no recomputation ahead of time, so that it has no turn."""
    return torch.autograd.grad(output, list(net.parameters()))


@pytest.mark.accelerator
def test_an_input_that_hooks_pack_and_unpack_on_its_device():
    """In v0.4.0, a recomputation began before its input was unpacked."""
    for where in ['aa', 'ac', 'ca']:
        for find in [backward, twice, only_parameters]:
            model = small_model()
            reference = copy.deepcopy(model)
            gpipe = GPipe(model, [4, 4], devices=places(where), chunks=3, checkpoint='always')
            xs = [torch.randn(6, 4, dtype=torch.double) for _ in range(2)]
            with saved_tensors_hooks(slowly(lambda x: x * 2), slowly(lambda x: x / 2)):
                outputs = [gpipe(x.to(gpipe.devices[0])).square().sum() for x in xs]
            # No number is read, so that each pass reuses memory that the one before has freed,
            # and whose kernels may still be queued.
            actual = [grad for _ in xs for grad in find(outputs.pop(0), gpipe)]
            expected = [
                grad for x in xs for grad in backward(reference(x).square().sum(), reference)
            ]
            assert_same(actual, expected)


@devices
def test_hooks_pack_without_grad_as_in_autograd(devices):
    modes = []

    def pack(x):
        modes.append(torch.is_grad_enabled())
        return x

    gpipe = in_partitions(devices, nn.Linear(2, 2), chunks=2, checkpoint='always')
    with saved_tensors_hooks(pack, lambda x: x):
        output = gpipe(torch.rand(4, 2, device=devices.first))
    assert modes and not any(modes)
    output.sum().backward()
