"""State that a step leaves unchanged, and state carried from one micro-batch to the next."""

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.engine.steps import loss_of
from tests.helpers import in_partitions
from torchgpipe import GPipe
from torchgpipe.base.context import ThreadState, context
from torchgpipe.base.private import DISPATCH_MODES
from torchgpipe.engine.checkpoint.random import Drawing


def two(devices, **options):
    """Return a model in two partitions, and an input and a target for it."""
    model = GPipe(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        [1, 1],
        devices=devices.distinct(2),
        chunks=4,
        **options,
    )
    x = torch.randn(8, 4, device=devices.first)
    return model, x, torch.randn(8, 4).to(model.devices[-1])


@devices
def test_a_loss_that_draws_for_some_micro_batches_is_one_that_draws(devices):
    model, x, y = two(devices, checkpoint='never')
    calls = []

    def loss_fn(output, target):
        calls.append(output)
        if len(calls) == 1:
            torch.rand(())
        return loss_of(output, target)

    model.step(x, y, loss_fn)
    assert len(calls) == 4 and model._engine.loss_draws is Drawing.YES


@devices
def test_a_loss_that_does_not_draw_is_looked_at_once(devices):
    model, x, y = two(devices, checkpoint='never')
    modes = []

    def loss_fn(output, target):
        modes.append(len(DISPATCH_MODES.read()))
        return loss_of(output, target)

    for _ in range(2):
        model.step(x, y, loss_fn)
    assert modes[:4] == [1] * 4 and modes[4:] == [0] * 4


@devices
def test_workers_forget_why_they_may_not_communicate(devices):
    """Each but the last one is told in a step, and all in a call."""
    model, x, y = two(devices)
    for run in (lambda: model.step(x, y, loss_of), lambda: model(x)):
        for _ in range(2):
            run()
        told = model._engine.workers.submit(
            [(device, lambda: context.no_order) for device in model.devices]
        )
        assert [each.result() for each in told] == [None, None] and context.no_order is None


def test_remains_of_an_interrupt_in_a_hook_are_dropped():
    def interrupt(grad):
        # As if Ctrl-C came when a context has pushed them and does not count as entered.
        torch._C._autograd._push_saved_tensors_default_hooks(id, id)
        raise KeyboardInterrupt

    model = in_partitions(['cpu'], nn.Linear(4, 4), chunks=2)
    model[0].weight.register_hook(interrupt)
    x = torch.randn(4, 4)
    with pytest.raises(KeyboardInterrupt):
        model.step(x, x, loss_of)
    assert ThreadState.capture().plain


class FailBack(torch.autograd.Function):
    """Fail in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


def test_a_weight_that_a_layer_has_kept_is_a_usual_one_after_a_step_that_failed():
    """Its gradient is not put off to a second half that never comes."""
    kept = []

    class Keep(nn.Linear):
        def forward(self, x):
            kept.append(self.weight)
            return super().forward(FailBack.apply(x))

    model = in_partitions(
        ['cpu', 'cpu'], nn.Linear(4, 4), Keep(4, 4), chunks=2, checkpoint='never'
    )
    x = torch.randn(4, 4)
    with pytest.raises(ZeroDivisionError):
        model.step(x, x, loss_of, schedule='zb-h1')
    weight = kept[0]
    weight.grad = None
    nn.functional.linear(x, weight).sum().backward()
    assert torch.allclose(weight.grad, x.sum(0).expand(4, 4))
