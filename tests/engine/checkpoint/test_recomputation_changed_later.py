"""Changes between forward and backward: the recomputation finds the earlier state."""

import copy
import gc

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.helpers import assert_same, call, compare_all_pending, gradients, in_partitions, nothing
from torchgpipe import GPipe


def make():
    """Return a model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid()).double()


def wrap(devices, mode):
    """Wrap it."""
    return GPipe(make(), [2, 2], devices=devices(2), chunks=2, checkpoint=mode)


def inputs():
    """Return two mini-batches."""
    torch.manual_seed(1)
    return torch.rand(2, 6, 4, dtype=torch.double)


@devices
def test_layers_that_are_frozen(devices):
    """Two forward passes with other layers frozen, and one backward pass."""
    results = []
    for net in (make(), wrap(devices, 'except_last')):
        outputs = []
        for x, frozen in zip(inputs(), (0, 2)):
            net.requires_grad_(True)
            net[frozen].requires_grad_(False)
            outputs.append(call(net, x))
        net.requires_grad_(True)
        sum(output.square().sum() for output in outputs).backward()
        results.append([*outputs, *gradients(net)])
    assert_same(*results)


@devices
def test_hooks(devices):
    """They are added or removed before backward. Only gradients show their effect."""
    for kind in ['register_forward_hook', 'register_forward_pre_hook']:
        for added in [True, False]:
            results = []
            for net in (make(), wrap(devices, 'except_last')):

                def hook(module, *values):
                    return values[-1][0] * 2 if kind.endswith('pre_hook') else values[-1] * 2

                handle = None if added else getattr(net[2], kind)(hook)
                outputs = [call(net, x) for x in inputs()]
                getattr(net[2], kind)(hook) if handle is None else handle.remove()
                sum(output.square().sum() for output in outputs).backward()
                results.append([*outputs, *gradients(net)])
            assert_same(*results)


class Hooked(nn.Linear):
    """A layer with a hook for as long as its forward runs."""

    def forward(self, x):
        handle = self.register_forward_hook(lambda *args: None)
        try:
            return super().forward(x)
        finally:
            handle.remove()


@devices
def test_hooks_that_a_forward_registers(devices):
    """In v0.7.0, a recomputation raised that there is no weak reference to a dict."""
    results = []
    model = nn.Sequential(Hooked(4, 4), nn.Tanh(), Hooked(4, 4), nn.Sigmoid()).double()
    for net in (
        copy.deepcopy(model),
        GPipe(model, [2, 2], devices=devices(2), chunks=2, checkpoint='except_last'),
    ):
        output = call(net, inputs()[0])
        output.square().sum().backward()
        results.append([output, *gradients(net)])
    assert_same(*results)


class Begins(nn.Module):
    """A layer that does something new from some call on."""

    def __init__(self, what):
        super().__init__()
        self.what = what
        self.register_buffer('calls', torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.what(self, x) if self.calls > 4 else x.sin()


def set_attribute(layer, x):
    """Count in an attribute."""
    layer.number = getattr(layer, 'number', 0) + 1
    return x.sin() * layer.number


def drop(layer, x):
    """Drop some."""
    return nn.functional.dropout(x).sin()


@devices
@pytest.mark.parametrize('what', [set_attribute, drop])
def test_a_layer_that_begins_to_do_something_new(devices, what):
    """A draw is refused once, and watched from then on. Attributes are kept at any time."""
    gpipe = in_partitions(devices, Begins(what), chunks=2, checkpoint='always')
    x = torch.rand(4, 4, dtype=torch.double, requires_grad=True, device=devices.first)
    for _ in range(2):
        gpipe(x).sum().backward()
    # Accelerators have generators of their own, which are put back in any case.
    is_exact = what is set_attribute or devices.are_accelerators
    with nothing() if is_exact else pytest.raises(RuntimeError, match='took another path'):
        gpipe(x).sum().backward()
        compare_all_pending(gpipe)
    for _ in range(3):
        x.grad = None
        output = gpipe(x)
        output.sum().backward()
        # The gradient has the same factors.
        scale = (output.detach() / x.detach().sin()).round()
        if what is set_attribute:
            assert torch.allclose(x.grad, scale * x.detach().cos())
        else:
            assert torch.equal(x.grad == 0, output == 0)


@devices
def test_grad_mode_that_a_layer_leaves_changed(devices):
    class Off(nn.Module):
        def forward(self, x):
            torch.set_grad_enabled(False)
            return x

    gpipe = in_partitions(devices, Off(), nn.Linear(4, 4), chunks=2)
    with pytest.raises(RuntimeError, match='left grad mode off'):
        gpipe(torch.rand(4, 4, device=devices.first))
    assert torch.is_grad_enabled()


@devices
def test_conjugate_views_between_partitions(devices):
    """And negative ones, as the imaginary parts of conjugate ones are."""

    class Conjugate(nn.Module):
        def forward(self, x):
            y = torch.complex(x, x.sin()).conj()
            return y, y.imag

    class Real(nn.Module):
        def forward(self, xs):
            return (xs[0] * xs[0]).real + xs[1]

    results = []
    plain = nn.Sequential(Conjugate(), Real())
    for net in (plain, GPipe(plain, [1, 1], devices=devices(2), chunks=2, checkpoint='always')):
        x = inputs()[0].requires_grad_()
        call(net, x).sum().backward()
        results.append([x.grad])
    assert_same(*results)


@pytest.mark.slow
@devices
def test_no_cycle_is_left_for_the_garbage_collector(devices):
    for layer in [nn.Dropout(), nn.RReLU(), nn.Tanh()]:
        gpipe = GPipe(
            nn.Sequential(nn.Linear(4, 4), layer),
            [2],
            devices=devices(1),
            chunks=2,
            checkpoint='always',
        )
        gc.collect()
        gc.disable()
        try:
            for _ in range(2):
                gpipe(torch.rand(4, 4, device=devices.first)).sum().backward()
            gc.collect()
            gpipe(torch.rand(4, 4, device=devices.first)).sum().backward()
            assert gc.collect() == 0
        finally:
            gc.enable()
