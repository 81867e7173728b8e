"""Batches of torchgpipe 0.0.7: a value and its tensors."""

from typing import NamedTuple

import pytest
import torch

from torchgpipe.microbatch import Batch, check


def test_an_atomic_batch_has_one_tensor():
    x = torch.tensor(42)
    batch = Batch(x)
    assert batch.atomic and len(batch) == 1 and list(batch) == [x]
    assert batch.tensor is batch[0] is batch.value is batch.tensor_or_tensors is x
    with pytest.raises(AttributeError):
        batch.tensors


def test_a_non_atomic_batch_has_a_tuple():
    x, y = torch.tensor(42), torch.tensor(21)
    batch = Batch((x, y))
    assert not batch.atomic and len(batch) == 2 and list(batch) == [x, y]
    assert batch.tensors is batch.value and batch[1] is y
    with pytest.raises(AttributeError):
        batch.tensor


def test_call_keeps_the_type_of_the_result():
    assert Batch(torch.tensor(1)).call(lambda x: x + 1).tensor.item() == 2
    assert Batch(torch.tensor(1)).call(lambda x: (x, x)).tensors
    assert Batch((torch.tensor(1),)).call(lambda xs: xs[0]).atomic


def test_the_cpu_comes_last_among_tensors_that_require_grad():
    constant, here = torch.ones(1), torch.ones(1, requires_grad=True)
    elsewhere = torch.ones(1, device='meta', requires_grad=True)
    assert Batch(here).find_grad() == 0 and Batch(constant).find_grad() is None
    assert Batch((constant, here, here)).find_grad() == 1
    assert Batch((constant, here, elsewhere, elsewhere)).find_grad() == 2
    assert Batch((constant,)).find_grad() is None


def test_assignment_by_index():
    atomic, pair = Batch(torch.tensor(1)), Batch((torch.tensor(1), torch.tensor(2)))
    atomic[0] = torch.tensor(5)
    pair[1] = torch.tensor(6)
    assert atomic.tensor.item() == 5 and [x.item() for x in pair] == [1, 6]
    with pytest.raises(IndexError):
        atomic[1] = torch.tensor(0)
    with pytest.raises(IndexError):
        atomic[1]


def test_assignment_by_slice():
    atomic, pair = Batch(torch.tensor(1)), Batch((torch.tensor(1), torch.tensor(2)))
    atomic[:] = (torch.tensor(5),)
    pair[:] = (torch.tensor(6),)
    assert atomic.atomic and atomic.tensor.item() == 5
    assert not pair.atomic and len(pair) == 1
    with pytest.raises(IndexError):
        atomic[:] = (torch.tensor(1), torch.tensor(2))
    with pytest.raises(NotImplementedError):
        pair[1:] = (torch.tensor(1),)


def test_check_names_the_type_that_it_got():
    for value, name in [
        ('str', 'str'),
        (None, 'NoneType'),
        ([1], 'list'),
        ({}, 'dict'),
        ((torch.zeros(1), object()), 'object'),
        ((None, 'x'), 'tuple'),
    ]:
        with pytest.raises(TypeError, match=f'expected Tensor, but got {name}'):
            check(value)


def test_check_takes_tensors_and_tuples_of_them():
    check(torch.zeros(1))
    check((torch.zeros(1), torch.zeros(2)))
    check(())


class Pair(NamedTuple):
    """A named tuple."""

    x: torch.Tensor
    y: torch.Tensor


def test_assignment_keeps_a_named_tuple():
    batch = Batch(Pair(torch.tensor(1), torch.tensor(2)))
    batch[1] = torch.tensor(3)
    assert batch.value == Pair(1, 3)
    batch[:] = (torch.tensor(4), torch.tensor(5))
    assert batch.value == Pair(4, 5) and isinstance(batch.value, Pair)
    batch[:] = (torch.tensor(4),)
    assert type(batch.value) is tuple
