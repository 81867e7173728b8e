"""The captured state on its own: its contents, its restoration, its use in recomputation."""

import contextvars
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import Spy, assert_same, nothing
from torchgpipe import GPipe
from torchgpipe.base.context import ThreadState, context
from torchgpipe.base.private import DISPATCH_MODES, FUNCTION_MODES


class See(TorchFunctionMode):
    """See calls, and change nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class SeeOperations(TorchDispatchMode):
    """The same, for operations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def hooks():
    """Return hooks for saved tensors that do nothing."""
    return saved_tensors_hooks(lambda x: x, lambda x: x)


def autocast():
    """Return a context of autocast that differs from the default in every setting."""
    return torch.autocast('cpu', torch.float16, cache_enabled=False)


def phase(name):
    """Return a context of a cell that is checkpointed, or of a recomputation."""
    return mock.patch.object(context, name, True)


STATES = {
    'grad': torch.no_grad,
    'inference': torch.inference_mode,
    'autocast': autocast,
    'hooks': hooks,
    'function_modes': See,
    'dispatch_modes': SeeOperations,
    'checkpointing': partial(phase, 'checkpointing'),
    'recomputing': partial(phase, 'recomputing'),
}


@pytest.mark.parametrize('field', [*STATES, 'workers'])
def test_a_captured_state_is_entered_and_taken_back_afterwards(field, monkeypatch):
    with STATES.get(field, nothing)():
        if field == 'workers':
            monkeypatch.setattr(context, 'workers', frozenset({-1}))
        state = ThreadState.capture()
    monkeypatch.undo()
    before = ThreadState.capture()
    inside, after = state.run(ThreadState.capture, 1), ThreadState.capture()
    assert getattr(inside, field) == getattr(state, field) != getattr(before, field)
    assert getattr(after, field) == getattr(before, field)


def test_cells_take_turns_where_code_of_the_user_sees_their_calls():
    for enter, is_serialized in [
        (nothing, False),
        (torch.no_grad, False),
        (autocast, False),
        (partial(phase, 'recomputing'), False),
        (lambda: torch.device('cpu'), False),
        (hooks, True),
        (See, True),
        (SeeOperations, True),
    ]:
        with enter():
            assert ThreadState.capture().is_serialized is is_serialized


def test_messages_left_by_an_interrupt_are_dropped():
    entered = [phase('checkpointing'), phase('recomputing')]
    with hooks(), See(), SeeOperations():
        state = ThreadState.capture()
        for each in entered:
            each.__enter__()
        for _ in range(3):
            torch._C._autograd._push_saved_tensors_default_hooks(id, id)
            FUNCTION_MODES.push(See())
            DISPATCH_MODES.push(SeeOperations())
        torch.set_num_threads(3)
        state.repair()
        assert torch.get_num_threads() == state.num_threads != 3
        now = ThreadState.capture()
        assert (now.hooks, now.function_modes, now.dispatch_modes) == (
            state.hooks,
            state.function_modes,
            state.dispatch_modes,
        )
    assert ThreadState.capture().plain
    for each in reversed(entered):
        each.__exit__(None, None, None)


def test_a_forward_pass_leaves_nothing_behind_that_an_interrupt_has_cut_short():
    def interrupt(_):
        # As if Ctrl-C came when a context has pushed them and does not count as entered.
        torch._C._autograd._push_saved_tensors_default_hooks(id, id)
        raise KeyboardInterrupt

    gpipe = GPipe(nn.Sequential(Spy(interrupt)), [1], devices=['cpu'])
    with pytest.raises(KeyboardInterrupt):
        gpipe(torch.rand(2, 2))
    assert ThreadState.capture().plain


def test_a_context_variable_that_a_layer_sets_is_as_before_in_each_recomputation():
    number = contextvars.ContextVar('number', default=1.0)

    class Next(nn.Linear):
        def forward(self, x):
            number.set(number.get() + 1)
            return super().forward(x * number.get())

    layer = Next(2, 2).double()
    gpipe = GPipe(nn.Sequential(layer), [1], devices=['cpu'], checkpoint='always')
    x = torch.rand(3, 2, dtype=torch.double)
    loss = gpipe(x).sum()
    for step in (1, 2, 3):
        loss.backward(retain_graph=True)
        assert_same([layer.weight.grad], [step * 2 * x.sum(0).expand(2, 2)])


class Look(torch.autograd.Function):
    """A function that notes autocast's flags in backward."""

    @staticmethod
    def forward(ctx, log, x):
        ctx.log = log
        return x.exp()

    @staticmethod
    def backward(ctx, grad):
        ctx.log.append(
            (
                torch.is_autocast_enabled('cpu'),
                torch.get_autocast_dtype('cpu'),
                torch.is_autocast_cache_enabled(),
            )
        )
        return None, grad


class Looking(nn.Module):
    """A layer that does so."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def forward(self, x):
        return Look.apply(self.log, x)


def test_nodes_have_autocast_as_in_backward_after_a_recomputation_had_it_as_in_forward():
    for forward, backward in [(autocast, nothing), (nothing, autocast)]:
        logs = [], []
        for net in (
            Looking(logs[0]),
            GPipe(nn.Sequential(Looking(logs[1])), [1], devices=['cpu'], checkpoint='always'),
        ):
            with forward():
                loss = net(torch.rand(2, 2, requires_grad=True)).sum()
            with backward():
                loss.backward()
        assert logs[0] == logs[1] and len(logs[0]) == 1, (forward, backward)


def test_a_recomputation_leaves_the_casts_of_the_autocast_around_backward_alone():
    layer, x = nn.Linear(2, 2), torch.rand(2, 2)
    gpipe = GPipe(nn.Sequential(nn.Linear(2, 2)), [1], devices=['cpu'], checkpoint='always')
    loss = gpipe(x).sum()

    def cast():
        # addmm ─▶ t ─▶ the cast of the weight
        return layer(x).grad_fn.next_functions[2][0].next_functions[0][0]

    with torch.autocast('cpu', torch.bfloat16):
        first = cast()
        loss.backward()
        assert cast() is first


def test_a_recomputation_drops_the_casts_that_it_has_made():
    layer, x = nn.Linear(2, 2), torch.rand(2, 2)
    gpipe = GPipe(nn.Sequential(nn.Linear(2, 2), layer), [2], devices=['cpu'], checkpoint='always')
    with torch.autocast('cpu', torch.bfloat16):
        loss = gpipe(x).float().sum()
    loss.backward()
    with torch.no_grad():
        layer.weight.zero_()
    # A thread may also set the values of `torch.autocast` by these functions.
    torch.set_autocast_dtype('cpu', torch.bfloat16)
    torch.set_autocast_enabled('cpu', True)
    try:
        assert torch.equal(layer(x), layer.bias.bfloat16().expand(2, 2))
    finally:
        torch.set_autocast_enabled('cpu', False)
        torch.clear_autocast_cache()
