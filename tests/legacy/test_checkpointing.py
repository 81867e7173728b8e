"""Checkpointing on its own: the saved tensors, the recomputations, and their times."""

import weakref
from functools import partial

import pytest
import torch
from torch import nn

from tests.devices import ACCELERATOR, devices
from tests.helpers import memory_of, nodes
from torchgpipe.base.context import ThreadState
from torchgpipe.base.private import current_node
from torchgpipe.checkpoint import (
    Checkpoint,
    Checkpointing,
    Recompute,
    checkpoint,
    enable_checkpointing,
    enable_recomputing,
    is_checkpointing,
    is_recomputing,
)
from torchgpipe.dependency import fork, join
from torchgpipe.microbatch import Batch


class Log(torch.autograd.Function):
    """An identity that logs both ways."""

    @staticmethod
    def forward(ctx, log, name, x):
        ctx.log, ctx.name = log, name
        log.append(f'{name}:forward')
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(f'{ctx.name}:backward')
        return None, None, grad


def leaf(*shape, dtype=None, device='cpu'):
    """Return a leaf of the graph."""
    return torch.rand(shape, dtype=dtype, device=device, requires_grad=True)


@devices
def test_each_call_is_recomputed_just_before_its_backward(devices):
    log = []
    a, b = leaf(1, device=devices.first), leaf(1, device=devices.first)
    a = checkpoint(partial(Log.apply, log, 'a'), a)
    a, phony = fork(a)
    b = join(b, phony)
    b = checkpoint(partial(Log.apply, log, 'b'), b)
    assert log == ['a:forward', 'b:forward']
    log.clear()
    torch.cat((a, b)).sum().backward()
    assert log == ['b:forward', 'b:backward', 'a:forward', 'a:backward']


@devices
def test_recomputation_comes_before_the_gradient(devices):
    log = []

    def arrive(grad):
        log.append('gradient')

    def function(x):
        log.append('recompute' if is_recomputing() else 'compute')
        return x * 2

    checkpointing = Checkpointing(function, Batch(leaf(1, device=devices.first)))
    batch = checkpointing.checkpoint()
    batch.tensor.register_hook(arrive)  # stands where a Wait stands
    checkpointing.recompute(batch)
    batch.tensor.backward()
    assert log == ['compute', 'recompute', 'gradient']


@devices
def test_gradients_equal_the_function(devices):
    function = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    function.to(devices.first)
    x = leaf(3, 4, dtype=torch.double, device=devices.first)
    assert torch.autograd.gradcheck(partial(checkpoint, function), (x,))


@devices
def test_no_activation_outlives_the_first_pass(devices):
    refs = []

    def function(x):
        y = (x * 2).exp()
        refs.append(memory_of(y))
        return y.sin().cos()

    x = leaf(3, device=devices.first)
    y = checkpoint(function, x)
    assert refs[0].expired()
    y.sum().backward()
    assert refs[1].expired()


def test_a_function_that_requires_no_grad():
    checkpointing = Checkpointing(lambda x: x * 2, Batch(torch.rand(1)))
    batch = checkpointing.checkpoint()
    assert batch[0].requires_grad
    checkpointing.recompute(batch)
    assert batch[0].requires_grad
    batch.tensor.backward()


@devices
def test_a_parameter_that_the_function_closes_over(devices):
    x, a = torch.rand(1, device=devices.first), leaf(1, device=devices.first)
    checkpoint(lambda x: x * a, x).backward()
    assert torch.equal(a.grad, x)


def test_integers_and_constants_stay_out_of_the_graph():
    def function(x):
        return x * 2, torch.ones_like(x, dtype=torch.bool), torch.rand(1, device=x.device)

    y, flag, constant = checkpoint(function, leaf(1))
    assert y.requires_grad and not flag.requires_grad and not constant.requires_grad
    y.backward()


def test_without_grad_nothing_is_kept():
    with torch.no_grad():
        y = checkpoint(lambda x: x * 2, torch.rand(1, requires_grad=True))
    assert not y.requires_grad


@pytest.mark.parametrize(
    'device', ['cpu', pytest.param(ACCELERATOR, marks=pytest.mark.accelerator)]
)
def test_random_numbers_are_drawn_again(device):
    dropout = nn.Dropout(0.5)
    x = torch.rand(50, 50, device=device, requires_grad=True)
    random = torch if device == 'cpu' else torch.get_device_module(device)
    state = random.get_rng_state()
    expected = dropout(x)
    expected.sum().backward()
    x_grad, x.grad = x.grad, None
    random.set_rng_state(state)
    actual = checkpoint(dropout, x)
    torch.rand(10, device=device)
    state = random.get_rng_state()
    actual.sum().backward()
    assert torch.equal(actual, expected) and torch.equal(x.grad, x_grad)
    assert torch.equal(random.get_rng_state(), state)


def test_both_passes_know_which_they_are():
    log = []

    def function(x):
        log.append((is_checkpointing(), is_recomputing()))
        return x

    checkpoint(function, leaf(1)).backward()
    assert log == [(True, False), (False, True)]
    assert (is_checkpointing(), is_recomputing()) == (False, False)
    with enable_checkpointing():
        with enable_recomputing():
            assert (is_checkpointing(), is_recomputing()) == (False, True)
        assert (is_checkpointing(), is_recomputing()) == (True, False)


def test_the_graph_has_one_node_of_each():
    y = checkpoint(lambda x: x * 2, leaf(1))
    kinds = [type(node) for node, _ in y.grad_fn.next_functions]
    assert kinds == [Checkpoint._backward_cls, Recompute._backward_cls]


def test_a_second_backward_raises_as_pytorch_does():
    y = checkpoint(lambda x: x.exp(), leaf(1))
    y.backward()
    with pytest.raises(RuntimeError, match='backward through the graph a second time'):
        y.backward()


@devices
def test_a_retained_graph_is_recomputed_again(devices):
    x = leaf(1, device=devices.first)
    passes = []

    def function(x):
        passes.append(is_recomputing())
        return x.exp()

    y = checkpoint(function, x)
    y.backward(retain_graph=True)
    first, x.grad = x.grad, None
    y.backward()
    assert torch.equal(x.grad, first) and passes == [False, True, True]


def test_gradients_of_some_inputs_only():
    a, b = leaf(1), leaf(1)
    y = checkpoint(lambda x: x.exp() * b, a)
    (grad,) = torch.autograd.grad(y, b)
    assert torch.allclose(grad, a.exp()) and a.grad is None


def test_a_recomputation_runs_in_no_node_of_the_layers():
    """It is not run while a node unpacks saved tensors, because PyTorch then holds its lock."""
    log = []
    b = leaf(1)

    def function(x):
        if is_recomputing():
            log.append(type(current_node()))
        return x.exp() * b

    y = checkpoint(function, leaf(1))
    torch.autograd.grad(y, b, retain_graph=True)
    y.backward()
    assert log == [Checkpoint._backward_cls, Recompute._backward_cls]


def test_saved_tensors_can_be_read_outside_of_backward():
    x = leaf(3)
    y = checkpoint(torch.exp, x)
    (node,) = [node for node in nodes(y) if node.name() == 'ExpBackward0']
    for _ in range(2):
        assert torch.equal(node._saved_result, x.exp())
    y.sum().backward()
    assert torch.equal(x.grad, x.exp())


def test_a_gradient_of_a_gradient():
    x = leaf(4, dtype=torch.double)
    assert torch.autograd.gradgradcheck(
        partial(checkpoint, lambda x: (x.exp() * x.sin()).tanh()), (x,)
    )


@devices
def test_hooks_of_a_parameter_see_its_whole_gradient_once(devices):
    weight = leaf(3, device=devices.first)
    calls = []
    weight.register_hook(lambda grad: calls.append('tensor') or grad.clamp(max=1))
    weight.register_post_accumulate_grad_hook(lambda _: calls.append('accumulated'))
    ones = torch.ones(3, device=devices.first)
    outputs = [checkpoint(lambda x: x * weight, ones) for _ in range(4)]
    torch.stack(outputs).sum().backward()
    assert calls == ['tensor', 'accumulated']
    assert weight.grad.tolist() == [1, 1, 1]  # 4, clamped; not four times 1


@devices
def test_saved_tensors_of_a_custom_function_may_be_asked_for_twice(devices):
    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx, grad):
            a = ctx.saved_tensors[0]
            b = ctx.saved_tensors[1]
            return grad * b, grad * a

    passes = []

    def function(x):
        passes.append(is_recomputing())
        return Multiply.apply(Multiply.apply(x, x.exp()), x)

    x = leaf(3, dtype=torch.double, device=devices.first)
    y = checkpoint(function, x)
    y.sum().backward()
    actual, x.grad = x.grad, None
    function(x).sum().backward()
    assert torch.equal(actual, x.grad)
    assert passes == [False, True, False]


def test_an_in_place_change_of_a_saved_tensor_is_noticed():
    def function(x):
        y = x.exp()  # saves its result
        return y.mul_(2)

    y = checkpoint(function, leaf(1))
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        y.backward()


@devices
def test_an_in_place_change_of_the_input_raises(devices):
    y = checkpoint(lambda x: x.relu_(), leaf(1, device=devices.first) * 1)
    with pytest.raises(RuntimeError, match='was changed in place; change a copy instead'):
        y.backward()


class Double(torch.autograd.Function):
    """Save a result. In backward, count the recomputed results that are alive, if asked to."""

    @staticmethod
    def forward(ctx, refs, alive, x):
        y = x * 2
        if is_recomputing():
            refs.append(memory_of(y))
        ctx.save_for_backward(y)
        ctx.refs, ctx.alive = refs, alive
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.alive is not None:
            ctx.saved_tensors
            ctx.alive.append(sum(not ref.expired() for ref in ctx.refs))
        return None, None, grad * 2


def test_tensors_that_no_node_unpacked_are_freed_at_the_end_of_backward():
    refs = []
    y = checkpoint(partial(Double.apply, refs, None), leaf(1))
    y.backward()
    assert refs and refs[0].expired()


@devices
def test_tensors_saved_by_a_custom_function_are_freed_when_another_node_asks(devices):
    refs, alive = [], []
    double = partial(Double.apply, refs, alive)
    checkpoint(lambda x: double(double(double(x))), leaf(1, device=devices.first)).backward()
    assert alive == [3, 2, 1]


def test_the_graph_of_a_recomputation_is_freed_when_it_ends():
    """Its nodes may own more than their saved tensors."""
    refs, log = [], []

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.own = x * 2
            if is_recomputing():
                refs.append(memory_of(ctx.own))
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad

    def function(x):
        y = Own.apply(x).exp()
        y.register_hook(lambda _: log.append([ref.expired() for ref in refs]))
        return y

    checkpoint(function, leaf(1)).backward()
    assert log == [[True]]


def test_tensors_for_recomputation_are_freed_by_backward():
    function = nn.Linear(3, 3)
    ref = weakref.ref(function)
    y = checkpoint(function, leaf(3))
    del function
    y.sum().backward(retain_graph=True)
    assert ref() is not None
    y.sum().backward()
    assert ref() is None


@devices
def test_the_input_is_freed_by_backward(devices):
    x = leaf(3, device=devices.first) * 1
    ref = memory_of(x)
    y = checkpoint(torch.exp, x)
    del x
    assert not ref.expired()
    y.sum().backward()
    assert ref.expired()


def test_hooks_that_an_interrupt_left_behind_in_a_recomputation_are_dropped():
    def function(x):
        if is_recomputing():
            # As if Ctrl-C came when a context has pushed them and does not count as entered.
            torch._C._autograd._push_saved_tensors_default_hooks(id, id)
            raise KeyboardInterrupt
        return x.exp()

    y = checkpoint(function, leaf(3))
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward()
    assert ThreadState.capture().plain


def test_a_recomputation_that_failed_can_be_tried_again():
    state = {'fail': True}

    def function(x):
        if is_recomputing() and state['fail']:
            raise ZeroDivisionError('here')
        return x.exp()

    x = leaf(3)
    y = checkpoint(function, x)
    with pytest.raises(ZeroDivisionError, match='here'):
        y.sum().backward(retain_graph=True)
    state['fail'] = False
    y.sum().backward()
    assert torch.allclose(x.grad, x.exp())


@devices
def test_another_path_is_noticed(devices):
    for first, again, message in [
        (lambda x: x.exp().exp(), lambda x: x.exp(), 'took another path'),
        (lambda x: x.exp(), lambda x: x.exp().exp(), 'took another path'),
        (
            lambda x: x.relu() * 1,
            lambda x: x * 1,
            'saved 0 tensors for backward, the first pass 1',
        ),
        (
            lambda x: x * 1,
            lambda x: x.relu() * 1,
            'saved 1 tensors for backward, the first pass 0',
        ),
        (lambda x: x.exp(), lambda x: x.repeat(2).exp(), r'is now torch.float32 of shape \(2,\)'),
    ]:
        y = checkpoint(
            lambda x: (again(x) if is_recomputing() else first(x)).sum(),
            leaf(1, device=devices.first),
        )
        with pytest.raises(RuntimeError, match=message):
            y.backward()


def test_a_layer_that_asks_for_gradients_within_its_forward_or_its_recomputation():
    def function(x):
        if is_recomputing() or at_once:
            torch.autograd.grad(x.exp().sum(), x, retain_graph=True)
        return x.exp()

    for at_once in (True, False):
        with pytest.raises(RuntimeError, match="within its own forward.*checkpoint='never'"):
            checkpoint(function, leaf(3)).sum().backward()
