"""Counters: memory until it is freed, FLOPs, collectives, and values that do not exist."""

import pytest
import torch
from torch import nn

from torchgpipe.base.private import FakeTensorMode
from torchgpipe.dry_run.counters import Counter, calls_seen
from torchgpipe.schedule import Action


def entries(function, *counter):
    """Return the entries of a counter that sees a function."""
    found = Counter(*counter)
    with found:
        function(found)
    found.at(None)
    return found.entries


@pytest.mark.parametrize('fake', [True, False])
def test_memory_counts_until_it_is_freed(fake):
    def run(counter):
        x = torch.zeros(100)
        view, y = x.view(10, 10), x + 1
        counter.at(Action(0, 'F', 0))
        del x, view
        z = y * 2
        del y, z

    first, second = entries(run, *([FakeTensorMode()] if fake else []))
    assert (first.item, first.bytes, first.peak) == (None, 800, 800)
    assert (second.item, second.bytes, second.peak) == (Action(0, 'F', 0), -800, 0)


def test_a_memory_that_was_there_before_does_not_count():
    x = torch.zeros(100)
    counter = Counter()
    counter.others = {id(x.untyped_storage())}
    with counter:
        x.view(10, 10).add_(1)
    counter.at(None)
    assert counter.entries[0].peak == 0


def test_sizes_that_change_count_only_where_they_are_seen():
    def run(counter):
        kept.append(torch.zeros(100))
        kept[-1].untyped_storage().resize_(0)
        counter.at(None)
        kept[-1].untyped_storage().resize_(800)

    kept, before = [], torch.zeros(100)

    with calls_seen():
        first, second = entries(run)
        (entry,) = entries(lambda counter: before.untyped_storage().resize_(800))
    assert entry.bytes == 0
    assert (first.bytes, first.peak, second.bytes) == (0, 400, 800)
    first, second = entries(run)
    assert (first.bytes, second.bytes) == (400, 0)


def test_flops_of_forward_and_backward():
    linear = nn.Linear(4, 8, bias=False)
    x = torch.zeros(2, 4, requires_grad=True)
    (entry,) = entries(lambda counter: linear(x).sum().backward())
    assert entry.flops == 3 * 2 * 2 * 4 * 8


def test_flops_of_attention_on_the_cpu():
    q = torch.zeros(1, 2, 16, 8)
    (entry,) = entries(lambda counter: nn.functional.scaled_dot_product_attention(q, q, q))
    assert entry.flops == 2 * 2 * 2 * 16 * 16 * 8


def test_a_value_is_one_where_no_cell_reads_it():
    found = []
    entries(lambda counter: found.append(torch.zeros(3).sum().item()), FakeTensorMode())
    assert found == [1]
    entries(lambda counter: found.append(torch.tensor(7).item()), FakeTensorMode())
    assert found == [1, 7]  # This one has a value.


def test_tensors_of_another_fake_mode_do_not_count():
    def run(counter):
        with FakeTensorMode():
            torch.zeros(100)

    (entry,) = entries(run)
    assert entry.peak == 0


@torch.library.custom_op('torchgpipe_tests::product_in_a_sum', mutates_args=())
def product_in_a_sum(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of a large product."""
    return (x @ x.t()).sum()


@product_in_a_sum.register_fake
def _(x):
    return x.new_empty(())


def test_operations_within_a_custom_one_count():
    def run(counter):
        with FakeTensorMode():
            x = torch.zeros(64, 4)
        counter.at(Action(0, 'F', 0))
        product_in_a_sum(x)

    _, entry = entries(run, FakeTensorMode(allow_non_fake_inputs=True))
    assert entry.flops == 2 * 64 * 64 * 4
    assert entry.peak >= 4 * 64 * 64
    assert entry.bytes == 0


@pytest.mark.parametrize('fake', [True, False])
def test_tensors_on_the_meta_device_have_no_memory(fake):
    def run(counter):
        torch.empty(100, device='meta') + 1

    (entry,) = entries(run, *([FakeTensorMode()] if fake else []))
    assert entry.peak == 0
