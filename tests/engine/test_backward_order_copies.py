"""Copies and waits between streams."""

import pytest
import torch

from tests.devices import ACCELERATOR, places
from tests.helpers import sleep
from torchgpipe.engine.backward_order import Copy, Wait
from torchgpipe.engine.streams import (
    CPUStream,
    current_stream,
    default_stream,
    get_device,
    is_accelerator,
    new_stream,
    record_stream,
    use_device,
    use_stream,
    wait_stream,
)

cpu = torch.device('cpu')


#: Between which devices to copy.
WAYS = ['cc', *(pytest.param(way, marks=pytest.mark.accelerator) for way in ('ca', 'ac', 'aa'))]


def between_waits(prev_stream, next_stream, x):
    """Copy as the pipeline does: both copy streams wait for compute streams, and the other way."""
    (x,) = Wait.apply(current_stream(get_device(prev_stream)), prev_stream, x)
    (y,) = Copy.apply(prev_stream, next_stream, x)
    return Wait.apply(next_stream, current_stream(get_device(next_stream)), y)


@pytest.mark.parametrize('function', [between_waits, Wait.apply], ids=['copy', 'wait'])
@pytest.mark.parametrize('way', WAYS)
def test_backward_is_the_adjoint_and_goes_the_other_way(function, way):
    prev_stream, next_stream = [new_stream(torch.device(place)) for place in places(way)]
    x = torch.randn(100, device=get_device(prev_stream), requires_grad=True)
    (y,) = function(prev_stream, next_stream, x)
    where = get_device(next_stream) if function is between_waits else x.device
    v = torch.randn(100).to(where)
    forward = (y * v).sum()
    assert y.device == where
    assert y.detach().cpu().equal(x.detach().cpu())
    forward.backward()
    assert x.grad.device == x.device and x.grad.cpu().equal(v.cpu())


def test_several_tensors_share_a_node():
    a, b = torch.rand(1, requires_grad=True), torch.rand(1, requires_grad=True)
    a, b = Wait.apply(CPUStream, CPUStream, a, b)
    assert a.grad_fn is b.grad_fn and isinstance(a.grad_fn, Wait._backward_cls)


@pytest.mark.parametrize('function', [Copy, Wait])
def test_a_tensor_without_gradient_gets_none(function):
    a, b = torch.rand(1, requires_grad=True), torch.rand(1, requires_grad=True)
    c, d = function.apply(CPUStream, CPUStream, a, b)
    c.backward()
    assert a.grad is not None and b.grad is None


def test_integers_pass():
    (k,) = Copy.apply(CPUStream, CPUStream, torch.tensor([1, 2]))
    assert k.tolist() == [1, 2] and not k.requires_grad


def test_the_cpu_has_one_placeholder_for_a_stream():
    assert new_stream(cpu) is current_stream(cpu) is default_stream(cpu) is CPUStream
    assert get_device(CPUStream) == cpu and not is_accelerator(CPUStream)
    assert repr(CPUStream) == 'CPUStream'
    with use_device(cpu), use_stream(CPUStream):
        wait_stream(CPUStream, CPUStream)
        record_stream(torch.rand(1), CPUStream)


@pytest.mark.accelerator
def test_a_stream_is_current_within_the_context():
    device = torch.device(ACCELERATOR, 0)
    stream = new_stream(device)
    assert is_accelerator(stream) and get_device(stream) == device
    with use_stream(stream):
        assert current_stream(device) == stream
    found, expected = current_stream(device), default_stream(device)  # may be of two classes
    assert (found.stream_id, found.device) == (expected.stream_id, expected.device)


@pytest.mark.accelerator
def test_a_recorded_tensor_is_not_overwritten_while_another_stream_reads_it():
    device = torch.device(ACCELERATOR, 0)
    stream = new_stream(device)
    source = torch.ones(1 << 20, device=device)
    shifted = source[1:]  # a view that does not start where its memory starts
    wait_stream(stream, current_stream(device))
    with use_stream(stream):
        sleep(100)
        total = shifted.sum()
    record_stream(shifted, stream)
    pointer = source.data_ptr()
    del source, shifted
    other = torch.zeros(1 << 20, device=device)
    assert other.data_ptr() != pointer
    torch.accelerator.synchronize()
    assert total.item() == (1 << 20) - 1


@pytest.mark.parametrize('function', [Copy, Wait])
def test_tensors_that_do_not_require_grad_stay_so(function):
    constant, variable = torch.rand(2), torch.rand(2, requires_grad=True)
    outputs = function.apply(CPUStream, CPUStream, constant, variable, torch.arange(2))
    assert [x.requires_grad for x in outputs] == [False, True, False]
