"""Portals: tensors and gradients go through, and die when they have been used."""

import pytest
import torch

from tests.devices import ACCELERATOR, devices
from torchgpipe.dependency import fork, join
from torchgpipe.skip.portal import Portal, PortalBlue, PortalCopy, PortalOrange
from torchgpipe.stream import CPUStream, default_stream


def streams(devices):
    """Return the stream of a device twice, to copy to where a tensor is already."""
    return [default_stream(devices.first)] * 2


@devices
def test_the_gradient_equals_the_tensor_s_gradient(devices):
    for requires_grad in [True, False]:
        for through_main in [True, False]:
            for copied in [True, False]:
                main = torch.rand(1, requires_grad=True, device=devices.first)
                skip = torch.rand(1, requires_grad=requires_grad, device=devices.first)
                portal = Portal(skip, tensor_life=2)
                phony = portal.blue()
                if copied:
                    phony = portal.copy(*streams(devices), phony)
                inner = main
                if through_main:  # as torchgpipe 0.0.7 did, and other code may
                    inner, phony = fork(join(main, phony))
                (inner * 2 + portal.orange(phony)).backward()
                assert main.grad.tolist() == [2], (requires_grad, through_main, copied)
                assert skip.grad is None if not requires_grad else skip.grad.tolist() == [1]


@devices
def test_adjoint_identity(devices):
    x = torch.rand(5, dtype=torch.double, requires_grad=True, device=devices.first)
    portal = Portal(x, tensor_life=2)
    y = portal.orange(portal.copy(*streams(devices), portal.blue()))
    v = torch.rand(5, dtype=torch.double, device=devices.first)
    y.backward(v)
    assert torch.equal((y * v).sum(), (x * x.grad).sum())


@devices
def test_a_gradient_of_a_gradient(devices):
    x = torch.tensor([3.0], requires_grad=True, device=devices.first)
    portal = Portal(x * 1, tensor_life=2)
    y = portal.orange(portal.copy(*streams(devices), portal.blue())) ** 3
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    assert torch.autograd.grad(grad, x)[0].item() == 18


@devices
def test_a_tensor_that_is_popped_and_not_used_gets_no_gradient(devices):
    x = torch.rand(1, requires_grad=True, device=devices.first)
    portal = Portal(x, tensor_life=2)
    phony = portal.blue()
    assert portal.orange(phony) is not None
    join(torch.rand(1, requires_grad=True, device=devices.first), phony).backward()
    assert x.grad is None


@devices
def test_a_tensor_lives_as_long_as_it_says(devices):
    for life, uses in [(0, ''), (1, 'b'), (2, 'bo'), (3, 'boo'), (4, 'boob')]:
        tensor = torch.rand(1, requires_grad=True, device=devices.first)
        portal = Portal(tensor, life)
        phony = None
        for k, use in enumerate(uses):
            assert portal.tensor_life == life - k and portal.tensor is not None
            if use == 'b':
                phony = portal.blue()
            else:
                assert portal.orange(phony).data_ptr() == tensor.data_ptr(), (life, uses)
        assert portal.tensor_life == 0 and portal.tensor is None, (life, uses)
        for ask in (
            portal.check_tensor_life,
            portal.use_tensor,
            portal.blue,
            lambda: portal.orange(phony),
            lambda: portal.copy(*streams(devices), phony),
        ):
            with pytest.raises(RuntimeError, match='tensor in portal has been removed'):
                ask()


@devices
def test_a_tensor_stashed_again_lives_for_one_use(devices):
    portal = Portal(torch.rand(1, requires_grad=True, device=devices.first), 3)
    phony = portal.blue()
    portal.orange(phony), portal.orange(phony)
    portal.put_tensor(torch.rand(1, requires_grad=True, device=devices.first), tensor_life=1)
    portal.blue()
    assert portal.tensor is None


@devices
def test_a_gradient_is_used_once(devices):
    portal = Portal(None, 1)
    grad = torch.rand(1, device=devices.first)
    portal.put_grad(grad)
    assert portal.use_grad() is grad
    with pytest.raises(RuntimeError, match='grad in portal has been removed or never set'):
        portal.use_grad()


def test_none_makes_no_node(monkeypatch):
    for function in (PortalBlue, PortalCopy, PortalOrange):
        monkeypatch.setattr(function, 'apply', None)
    portal = Portal(None, 2)
    assert portal.orange(portal.copy(CPUStream, CPUStream, portal.blue())) is None
    assert portal.tensor_life == 0


@devices
def test_the_waiting_tensor_does_not_own_a_graph(devices):
    portal = Portal(torch.rand(1, requires_grad=True, device=devices.first) * 2, 2)
    phony = portal.blue()
    assert portal.tensor.grad_fn is None and phony.grad_fn is not None


@pytest.mark.accelerator
def test_copy_to_another_device():
    cpu, other = torch.device('cpu'), torch.device(ACCELERATOR, 0)
    tensor = torch.rand(2, requires_grad=True)
    portal = Portal(tensor, tensor_life=2)
    phony = portal.copy(default_stream(cpu), default_stream(other), portal.blue())
    assert phony.device == other
    output = portal.orange(phony)
    assert output.device == other
    output.sum().backward()
    assert tensor.grad.tolist() == [1, 1]
