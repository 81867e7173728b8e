"""Tracking of memories through the cells of one micro-batch, tested on its own."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.devices import cpus
from tests.engine.steps import loss_of
from tests.helpers import Layer, assert_same, gradients, in_partitions, memory_of
from tests.skip.layers import Pop
from torchgpipe import Arguments, GPipe, NoChunk
from torchgpipe.engine.aliasing import Aliasing
from torchgpipe.engine.microbatches import Chunk
from torchgpipe.skip import skippable, stash

A, B = (None, 'a'), (None, 'b')


def copied(tensors):
    """Return tensors in another memory each."""
    return [x.clone() for x in tensors]


def same(tensors):
    """Return the same tensors."""
    return tensors


class Way:
    """The way of micro-batch 0 through cells, as a run leads it."""

    def __init__(self, shared=(), several=True):
        self.aliasing = Aliasing(
            [Chunk((torch.ones(1), *shared), tuple)] * (1 + several), range(1, 1 + len(shared))
        )
        self.j = 0

    def cell(self, batch, given, popped=(), stashed=(), change=None):
        """Run a cell, which may change a tensor."""
        popped, stashed = dict(popped), dict(stashed)
        cell = SimpleNamespace(popped=[*popped], stashed=[*stashed])
        partition = SimpleNamespace(j=self.j, incoming=[(0, key) for key in popped])
        before = self.aliasing.before(0, self.j, cell, [*batch, *popped.values()])
        if change is not None:
            change.add_(1)
        self.aliasing.after(0, partition, cell, before, [*given, *stashed.values()])
        self.j += 1

    def cross(self, tensors, copy=copied):
        """Let tensors cross a boundary."""
        return self.aliasing.cross(0, [*tensors], copy)


def test_aliases_are_tracked_over_several_boundaries():
    way, x = Way(), torch.ones(2)
    xs = way.cross([x, x[:]])
    way.cell(xs, xs)
    xs = way.cross(xs)
    with pytest.raises(RuntimeError, match='before both came from the partition before'):
        way.cell(xs, xs, change=xs[0])


def test_new_tensors_are_not_tracked():
    way, x = Way(), torch.ones(2)
    xs = way.cross([x, x[:]])
    new = [torch.ones(2), torch.ones(2)]
    way.cell(xs, new)
    new = way.cross(new)
    way.cell(new, new, change=new[0])


def test_a_skip_in_the_memory_of_a_batch_that_was_copied_may_not_change():
    way, x = Way(), torch.ones(2)
    way.cell([x], [x], stashed={A: x})
    (y,) = way.cross([x])
    with pytest.raises(RuntimeError, match="the skip tensor 'a', whose memory is also that"):
        way.cell([y], [y], popped={A: x}, change=x)


def test_nor_may_one_in_the_memory_of_another_skip():
    way, x = Way(), torch.ones(2)
    way.cell([x], [x * 2], stashed={A: x, B: x[:]})
    with pytest.raises(RuntimeError, match="the skip tensor 'a', whose memory is also that"):
        way.cell([x * 2], [x * 2], popped={A: x}, change=x)


def test_nor_may_a_batch_in_the_memory_of_a_skip_that_was_copied():
    way, x = Way(), torch.ones(2)
    way.cell([x], [x], stashed={A: x})
    for _ in range(2):
        (x,) = way.cross([x])
        way.cell([x], [x])
    with pytest.raises(RuntimeError, match="which is also the skip tensor 'a'"):
        way.cell([x], [x], change=x)


def test_nor_may_a_batch_that_was_a_skip_in_the_memory_of_another_one():
    way, x = Way(), torch.ones(2)
    way.cell([x], [x * 2], stashed={A: x, B: x[:]})
    way.cell([x * 2], [x], popped={A: x})
    assert 0 in way.aliasing.watched  # also in cells without skips
    (x,) = way.cross([x])
    with pytest.raises(RuntimeError, match="which is also the skip tensor 'b'"):
        way.cell([x], [x], change=x)


def test_a_batch_that_was_made_anew_may():
    way, x = Way(), torch.ones(2)
    way.cell([x], [x], stashed={A: x})
    y = x * 2
    way.cell([x], [y])
    way.cell([y], [y], change=y)


def test_a_copy_of_a_value_shared_by_all_micro_batches_may_not_change():
    shared = torch.ones(2)
    way = Way([shared])
    xs = way.cross([torch.ones(2), shared])
    way.cell(xs, xs)
    xs = way.cross(xs)
    assert [x is xs[1] for x in way.aliasing.common(0)] == [True]
    with pytest.raises(RuntimeError, match='that all micro-batches share'):
        way.cell(xs, xs, change=xs[1])


def test_nor_may_one_that_was_a_skip():
    shared = torch.ones(2)
    way = Way([shared])
    xs = way.cross([torch.ones(2), shared])
    way.cell(xs, xs[:1], stashed={A: xs[1]})
    skip = xs[1].clone()
    with pytest.raises(RuntimeError, match='that all micro-batches share'):
        way.cell(xs[:1], xs[:1], popped={A: skip}, change=skip)


@pytest.mark.parametrize('stashed', [{}, {A: torch.ones(2)}])
def test_an_output_may_not_change_before_the_next_output_of_its_cell(stashed):
    way, kept = Way(), torch.ones(2)
    way.cell([torch.ones(2)], [kept], stashed=stashed)
    way.j = 0
    with pytest.raises(RuntimeError, match='changed in place since it did so'):
        way.cell([torch.ones(2)], [kept.add_(1)], stashed=stashed)


def test_tensors_that_are_not_passed_on_are_not_kept():
    shared = torch.ones(2)
    way = Way([shared])
    xs = way.cross([torch.ones(2), shared])
    way.cell(xs, xs[:1])
    assert way.aliasing.common(0) == []
    x = torch.ones(2)
    memory = memory_of(x)
    way.aliasing.hand_on(0, [x])
    del x
    assert memory.expired()


class Silent(torch.Tensor):
    """A tensor on which no function may be called."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Refuse it."""
        raise AssertionError(func)


@pytest.mark.filterwarnings('ignore:.*nested tensors')
def test_tensors_without_versions_or_a_memory_of_their_own_are_handed_on():
    x = torch.ones(2)
    with torch.inference_mode():
        without_version = torch.ones(2)
    for each in (
        without_version,
        x.to_sparse(),
        torch.nested.nested_tensor([x, x]),
        x.as_subclass(Silent),
    ):
        Way().aliasing.hand_on(0, [each])


@cpus
@pytest.mark.parametrize('how', ['call', 'step'])
def test_a_single_micro_batch_may_change_shared_tensors(devices, how):
    def add(linear, xs):
        return linear(xs[0]) + xs[1].add_(1)

    layers = nn.Sequential(Layer(lambda linear, x, shared: (linear(x), shared)), Layer(add))
    model = GPipe(layers.double(), [1, 1], devices=devices(2), chunks=1, checkpoint='never')
    x, shared, target = [torch.randn(4, 4, dtype=torch.double) for _ in range(3)]
    loss_of(layers[1](layers[0](x, shared.clone())), target).backward()
    expected = gradients(layers)
    layers.zero_grad()
    if how == 'step':
        model.step(Arguments(x, NoChunk(shared)), target, loss_of)
    else:
        loss_of(model(x, NoChunk(shared)), target).backward()
    assert_same(gradients(layers), expected)


@cpus
@pytest.mark.parametrize('how', ['call', 'step'])
def test_a_skip_may_not_be_changed_by_a_layer_that_has_it_otherwise(devices, how):
    kept = []

    @skippable(stash=['skip'])
    class Stash(nn.Linear):
        def forward(self, x):
            kept.append(super().forward(x))
            yield stash('skip', kept[-1])
            return kept[-1] * 2

    def change(linear, x):
        kept[-1].detach().add_(1)
        return linear(x)

    model = in_partitions(devices, Stash(4, 4), Layer(change), Pop(), chunks=1, checkpoint='never')
    x = torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="the skip tensor 'skip' was changed in place"):
        model(x) if how == 'call' else model.step(x, x, loss_of)
