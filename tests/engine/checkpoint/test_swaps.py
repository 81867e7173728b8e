"""Substitutes take the places of other objects for a while, which are then restored."""

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.engine.checkpoint import swaps
from torchgpipe.engine.checkpoint.swaps import Swap, entry, substituted


def test_entries_are_restored_and_new_ones_are_removed():
    holder = {'a': 1}
    with substituted([entry(holder, 'a', 2), entry(holder, 'b', 3)]):
        assert holder == {'a': 2, 'b': 3}
    assert holder == {'a': 1}


@pytest.mark.parametrize('where', ['put', 'within'])
def test_also_after_an_error(where):
    holder = {'a': 1}

    def fail():
        raise KeyError(where)

    swaps = [entry(holder, 'a', 2), *[Swap(fail, bool)] * (where == 'put')]
    with pytest.raises(KeyError), substituted(swaps):
        fail()
    assert holder == {'a': 1}


def test_an_interrupt_waits_until_all_is_back():
    holder, interrupts = {'a': 1, 'b': 1}, [KeyboardInterrupt]

    def interrupted():
        if interrupts:
            raise interrupts.pop()

    with (
        pytest.raises(KeyboardInterrupt),
        substituted([entry(holder, 'a', 2), Swap(bool, interrupted), entry(holder, 'b', 2)]),
    ):
        assert holder == {'a': 2, 'b': 2}
    assert holder == {'a': 1, 'b': 1}


def test_a_step_has_its_parameters_back_when_it_was_interrupted(monkeypatch):
    interrupts, call_all = [], swaps._restore_all

    def interrupt(functions):
        if interrupts:
            raise interrupts.pop()
        call_all(functions)

    gpipe = GPipe(nn.Sequential(nn.Linear(4, 4)), [1], devices=['cpu'])
    weight, x = gpipe[0].weight, torch.rand(4, 4)

    def loss(output, target):
        interrupts.append(KeyboardInterrupt)  # when the loss's own leaves are put back
        return (output - target).square().mean()

    monkeypatch.setattr(swaps, '_restore_all', interrupt)
    with pytest.raises(KeyboardInterrupt):
        gpipe.step(x, x, loss)
    assert not interrupts and gpipe[0].weight is weight and weight.grad is None
