"""Nothing that a skip needed is alive after a step, however the step ended."""

import gc

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.helpers import (
    STEPS,
    WeakLog,
    call,
    compare_all_pending,
    drop_failed_backward,
    memory_of,
)
from tests.skip.layers import Pop, StashLinear, popping, stashing
from tests.skip.models import WIDTH
from torchgpipe import GPipe, is_recomputing
from torchgpipe.skip import Namespace, skippable, stash
from torchgpipe.skip.transfer import current_skip_tracker


def make(devices, mode, layer=None):
    """Return a pipeline with two skips, and weak references to tensors that pass its layers."""
    one = Namespace()
    layers = [
        stashing('a')(),
        nn.Linear(4, 4),
        StashLinear().isolate(one),
        layer or nn.Tanh(),
        Pop().isolate(one),
        nn.Linear(4, 4),
        popping('a')(),
    ]
    gpipe = GPipe(
        nn.Sequential(*layers), [1, 2, 1, 3], devices=devices(4), chunks=4, checkpoint=mode
    )
    return gpipe, WeakLog(*gpipe)


@devices
def test_nothing_is_alive_after_a_step(devices):
    for step in list(STEPS.values()):
        gpipe, log = make(devices, 'except_last')
        for _ in range(10):
            step(gpipe)
            assert log.alive() == 0
            log.refs.clear()


class Fail(nn.Module):
    """Raise in one pass or the other."""

    recomputing = False

    def forward(self, x):
        if is_recomputing() == self.recomputing:
            raise ZeroDivisionError
        return x * 2


@devices
@pytest.mark.parametrize('where', ['between', 'same partition'])
def test_nothing_is_alive_after_a_failure_between_stash_and_pop(devices, where):
    if where == 'between':
        gpipe, log = make(devices, 'except_last', Fail())
    else:
        model = nn.Sequential(nn.Linear(4, 4), StashLinear(), Fail(), Pop())
        gpipe = GPipe(model, [1, 3], devices=devices(2), chunks=2, checkpoint='except_last')
        log = WeakLog(*gpipe)
    for _ in range(3):
        try:
            gpipe(torch.rand(8, 4, device=devices.first))
        except ZeroDivisionError:
            pass
        else:
            raise AssertionError
        assert log.refs and log.alive() == 0
        log.refs.clear()
    assert not current_skip_tracker().tensors


@devices
def test_nothing_is_alive_after_a_recomputation_that_fails(devices):
    layer = Fail()
    layer.recomputing = True
    gpipe, log = make(devices, 'always', layer)
    output = gpipe(torch.rand(8, 4, device=devices.first)).sum()
    try:
        output.backward()
    except ZeroDivisionError:
        pass
    else:
        raise AssertionError
    del output
    drop_failed_backward(gpipe)
    assert log.alive() == 0


@devices
@pytest.mark.parametrize('grad', [True, False])
def test_a_skip_dies_within_the_layer_that_pops_it(devices, grad):
    """It does not wait for the end of the cell, if no layer saves it."""
    alive = []
    refs = []

    @skippable(stash=['skip'])
    class Make(nn.Module):
        def forward(self, x):
            tensor = x.detach() * 2
            refs.append(memory_of(tensor))
            yield stash('skip', tensor)
            return x

    class Look(nn.Module):
        def forward(self, x):
            alive.append([not ref.expired() for ref in refs])
            return x

    model = nn.Sequential(Make(), nn.Linear(4, 4), Look(), Pop(), Look())
    gpipe = GPipe(model, [1, 2, 2], devices=devices(3), chunks=1, checkpoint='never')
    with torch.set_grad_enabled(grad):
        gpipe(torch.rand(2, 4, device=devices.first))
    assert alive == [[True], [False]]


def tensors(gpipe):
    """Count all tensors that Python knows, but those that wait to be compared."""
    compare_all_pending(gpipe)
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


@pytest.mark.slow
@devices
def test_a_long_training_does_not_grow(devices):
    gpipe, _ = make(devices, 'except_last')
    gc.collect()
    for _ in range(3):
        gpipe(torch.rand(8, 4, device=devices.first)).sum().backward()
    before = tensors(gpipe)
    for _ in range(30):
        gpipe(torch.rand(8, 4, device=devices.first)).sum().backward()
    assert tensors(gpipe) <= before


@pytest.mark.slow
@devices
@pytest.mark.filterwarnings('ignore:Using backward.. with create_graph')
@pytest.mark.parametrize('create_graph', [False, True])
def test_skips_die_after_a_backward_that_does_not_get_through(devices, create_graph):
    def fail(grad):
        raise ZeroDivisionError

    @skippable(stash=['skip'])
    class StashAndFail(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            x = self.fc(x)
            if x.requires_grad:
                x.register_hook(fail)
            yield stash('skip', x * 2)
            return x

    model = nn.Sequential(StashAndFail(), nn.Linear(WIDTH, WIDTH), Pop())
    gpipe = GPipe(model, [1, 1, 1], devices=devices(3), chunks=2, checkpoint='except_last')

    def count():
        gc.collect()
        drop_failed_backward(gpipe)
        return tensors(gpipe)

    def train():
        with pytest.raises(ZeroDivisionError):
            call(gpipe, torch.rand(4, WIDTH)).square().sum().backward(create_graph=create_graph)
        gpipe.zero_grad()  # gradients that were made with create_graph own graphs

    train()  # A first pass makes tensors that are kept for each device.
    before = count()
    for _ in range(5):
        train()
    assert count() == before


@pytest.mark.slow
@devices
def test_a_gradient_penalty_leaks_nothing(devices):
    @skippable(stash=['skip'])
    class StashParameter(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(WIDTH))

        def forward(self, x):
            yield stash('skip', self.weight * x.detach())
            return x

    model = nn.Sequential(StashParameter(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), Pop())
    gpipe = GPipe(model, [1, 2, 1], devices=devices(3), chunks=2, checkpoint='except_last')

    def step():
        x = torch.rand(4, WIDTH, requires_grad=True, device=devices.first)
        (grad,) = torch.autograd.grad(gpipe(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()

    def count():
        gc.collect()
        return tensors(gpipe)

    step()
    before = count()
    for _ in range(5):
        step()
    assert count() <= before
