"""Oracles and test doubles that several test files share."""

import copy
import gc
import itertools
import os
import select
import signal
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextlib import nullcontext as nothing

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests import accelerator
from torchgpipe import GPipe
from torchgpipe.engine import backward_order, partition, shared, split
from torchgpipe.engine.cell import compare_earlier
from torchgpipe.engine.streams import use_device


def tensors_of(value):
    """Return the tensors of a tensor or a tuple."""
    return (value,) if isinstance(value, torch.Tensor) else value


def micro_batches(x, chunks):
    """Split as the library promises to: sizes that differ by one at most, larger ones first."""
    m = min(chunks, len(x))
    return x.tensor_split(m)


def gradients(module):
    """Return a copy of all gradients, on the CPU."""
    return [None if p.grad is None else p.grad.clone().cpu() for p in module.parameters()]


def assert_same(actual, expected, tolerance=1e-12):
    """Compare two lists of tensors or Nones, on any devices.

    Args:
        actual: The actual tensors. expected: The expected tensors. tolerance: The largest allowed
        difference, relative to the largest element if that is above 1.
    """
    actual, expected = list(actual), list(expected)
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.dtype == b.dtype and a.shape == b.shape
            scale = max(1.0, b.abs().max().item())
            assert (a.cpu() - b.cpu()).abs().max().item() <= tolerance * scale


def assert_trains_alike(reference, gpipe, x, tolerance=1e-10):
    """Check outputs and gradients of a pipeline against the model's on the CPU."""
    expected, actual = reference(x), gpipe(x.to(gpipe.devices[0]))
    assert actual.device == gpipe.devices[-1]
    expected.square().sum().backward()
    actual.square().sum().backward()
    assert_same([actual.cpu(), *gradients(gpipe)], [expected, *gradients(reference)], tolerance)


def nodes(tensor):
    """Return all nodes of the graph that leads to a tensor."""
    found, queue = set(), [tensor.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in found:
            found.add(node)
            queue += [following for following, _ in node.next_functions]
    return found


def on_first(gpipe, x):
    """Return a copy of a tensor on the device where a pipeline begins."""
    return x.detach().to(gpipe.devices[0], copy=True)


def to(device, x):
    """Return tensors on a device, and anything else as it is."""
    if isinstance(x, (tuple, list)):
        return type(x)(to(device, each) for each in x)
    return x.to(device) if isinstance(x, torch.Tensor) else x


def call(net, x):
    """Call a model on the CPU, or a pipeline, with an input where it begins."""
    return net(x.to(net.devices[0]) if isinstance(net, GPipe) else x)


def by_partitions(gpipe, x, chunks=1):
    """Run partitions on their devices without a pipeline, in the order of the clock."""
    values = list(micro_batches(x, chunks))
    for k in range(chunks + len(gpipe.partitions) - 1):
        for j, (layers, device) in enumerate(zip(gpipe.partitions, gpipe.devices)):
            if 0 <= k - j < chunks:
                with use_device(device):
                    values[k - j] = layers(to(device, values[k - j]))
    return torch.cat(values)


def train_both(model, gpipe, x, *, context=None):
    """Run forward and backward on both, and compare outputs and gradients."""
    reference = copy.deepcopy(model)
    a, b = x.detach().clone().requires_grad_(), on_first(gpipe, x).requires_grad_()
    with context() if context else nothing():
        expected = reference(a)
    expected.square().sum().backward()
    with context() if context else nothing():
        actual = gpipe(b)
    actual.square().sum().backward()
    assert_same([actual, b.grad, *gradients(gpipe)], [expected, a.grad, *gradients(reference)])


def small_model(n=4, width=4):
    """Return a sequential module in float64."""
    layers = []
    for _ in range(n):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers).double()


def in_partitions(devices, *layers, **options):
    """Wrap layers, one in each partition. Devices are given, or made for their number."""
    places = devices(len(layers)) if callable(devices) else devices
    return GPipe(nn.Sequential(*layers), [1] * len(layers), devices=places, **options)


def threads():
    """Return all threads except autograd's, one per device, of which Python may know or not."""
    return {
        thread
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)
    }


@contextmanager
def no_gc():
    """Let Python's garbage collector free nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_a_new_thread(function):
    """Call a function where autograd's nodes get the lowest numbers, so that they come last."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def drop_failed_backward(gpipe):
    """Let go of the nodes that a failed backward had queued: PyTorch does in the next one.

    On each device in a thread of its own, which takes the last node last.
    """
    for device in {'cpu', *gpipe.devices}:
        in_a_new_thread(lambda: torch.ones(1, device=device, requires_grad=True).sum()).backward()


def compare_all_pending(gpipe):
    """Let a pipeline compare pending results of accelerators, after they are computed."""
    accelerators = [device for device in gpipe.devices if device.type != 'cpu']
    for device in accelerators:
        torch.accelerator.synchronize(device)
    if accelerators:
        for each in gpipe._engine.partitions:
            compare_earlier(each)


def as_if_on_several(monkeypatch, number):
    """Take partitions on one device for partitions on several, so that they copy and wait."""
    for name in ('device_key', 'memory_key'):
        keys = itertools.cycle(range(number))
        monkeypatch.setattr(partition, name, lambda device, keys=keys: (device.type, next(keys)))


def in_two_memories(monkeypatch):
    """Take 'cpu:0' and 'cpu:1' for devices with a memory each; give the copies between them."""
    copies = []

    def copy_tensor(tensor, *streams):
        copies.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(backward_order, 'copy_tensor', copy_tensor)
    for module in (partition, shared, split):
        monkeypatch.setattr(module, 'memory_key', lambda device: (device.type, device.index or 0))
    return copies


def sleep(milliseconds):
    """Keep the current stream busy for about so long."""
    if accelerator.is_loaded():
        accelerator.sleep(milliseconds * 1000)
    else:
        torch.cuda._sleep(milliseconds * 2_000_000)


class Call(nn.Module):
    """A layer from a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Slow(nn.Module):
    """Keep a device busy for a while, so that code that does not wait for it comes too early."""

    def forward(self, x):
        sleep(1)
        return x * 1


class Layer(nn.Module):
    """A layer from a function, which gets a linear layer and the input."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, *input):
        return self.function(self.linear, *input)


class Child:
    """A forked process that calls a function, and is killed if it does not end.

    So a test can fail by a deadlock, also by one in which a thread holds the GIL.
    """

    def __init__(self, function):
        self._reading, writing = os.pipe()  # the child has its other end, until it exits
        self._pid = os.fork()
        if self._pid == 0:
            try:
                function()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(writing)

    def wait(self):
        """Return its exit code, which is not 0 if it was killed."""
        ended, _, _ = select.select([self._reading], [], [], 20)
        os.close(self._reading)
        if not ended:
            os.kill(self._pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


class Spy(nn.Module):
    """An identity that calls a function with its input."""

    def __init__(self, see):
        super().__init__()
        self.see = see

    def forward(self, input):
        self.see(input)
        return input


def memory_of(x):
    """Return a weak reference to the memory of a tensor, which tells when it has ``expired``.

    It refers to the memory, because autograd may save another tensor over the same memory.
    """
    return StorageWeakRef(x.untyped_storage())


class WeakLog:
    """Weak references to the memory of every tensor that passes a module."""

    def __init__(self, *modules):
        self.refs = []
        for module in modules:
            module.register_forward_hook(self._see)

    def _see(self, module, args, output):
        for value in (*args, output):
            self.refs += [memory_of(x) for x in tensors_of(value)]

    def alive(self):
        """Count memories that are still alive, without a run of the garbage collector."""
        assert self.refs
        return sum(not ref.expired() for ref in self.refs)


def _train(gpipe):
    gpipe(torch.rand(8, 4, device=gpipe.devices[0])).sum().backward()


def _forget(gpipe):
    gpipe(torch.rand(8, 4, device=gpipe.devices[0]))


def _no_grad(gpipe):
    with torch.no_grad():
        gpipe(torch.rand(8, 4, device=gpipe.devices[0]))


#: Steps after which nothing of them may be alive.
STEPS = {'backward': _train, 'no backward': _forget, 'no grad': _no_grad}


def train_twice(reference, gpipe, x, input_grad):
    """Run two steps of both, and one without grad; compare all that comes of it."""
    a, b = x.clone(), on_first(gpipe, x)
    if input_grad:
        a.requires_grad_(), b.requires_grad_()
    for _ in range(2):
        expected, actual = reference(a), gpipe(b)
        assert actual.requires_grad == expected.requires_grad
        if expected.requires_grad:
            expected.square().sum().backward()
            actual.square().sum().backward()
    with torch.no_grad():
        assert_same([gpipe.eval()(b)], [reference.eval()(a)])
    assert_same([actual, b.grad, *gradients(gpipe)], [expected, a.grad, *gradients(reference)])
