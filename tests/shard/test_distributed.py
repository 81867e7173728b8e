"""Collectives: their results, their gradients, and unchanged tensors of the caller."""

import itertools
import threading

import pytest
import torch
import torch.distributed as dist
from torch.autograd import gradcheck, gradgradcheck

import torchgpipe.shard as ts
from tests.shard.nn.oracle import operations
from tests.shard.plain import in_turn
from tests.shard.processes import run
from torchgpipe.shard import collectives
from torchgpipe.shard.parameter import is_tagged
from torchgpipe.shard.world import current

SIZES = [1, 2, 5, 7, 8, 31]
SHAPES = (
    [((size,), 0) for size in SIZES]
    + [((size, 3), 0) for size in SIZES]
    + [((2, 3, size), -1) for size in SIZES]
    + [((2, 7, 3), 1)]
)


def drawn(*shape):
    """Draw a tensor that is the same on all ranks of a group."""
    return torch.randn(*shape, dtype=torch.double, requires_grad=True)


def dot(x, y):
    """Multiply, and add up on this rank."""
    return (x * y).sum().detach()


def summed(value):
    """Add up over the group."""
    return collectives.all_reduce(value.clone(), current().tensor_group)


def mine(x, dim):
    """Give this rank's part."""
    return ts.slice(x, current().tensor_size, dim)[current().tensor_rank]


def moves(groups):
    """Check each function against its definition, and its backward against its adjoint."""
    for group in groups:
        ts.distributed.init_process_group(group)
        for shape, dim in SHAPES:
            pairs(shape, dim)
        ts.distributed.destroy_process_group()


def pairs(shape, dim):
    """Check both pairs for one shape. Whole tensors count once, parts and terms are added up."""
    n, rank = current().tensor_size, current().tensor_rank
    x, y = drawn(*shape), drawn(*shape).detach()

    part = ts.distributed.scatter(x, dim)
    assert part.equal(mine(x, dim))
    part.backward(mine(y, dim))
    assert x.grad.equal(y)
    torch.testing.assert_close(summed(dot(part, mine(y, dim))), dot(x, x.grad))

    for size in (None, shape[dim]):
        local = mine(x, dim).detach().clone().requires_grad_()
        whole = ts.distributed.gather(local, dim, size)
        assert whole.equal(x) and whole.is_contiguous()
        whole.backward(y)
        assert local.grad.equal(mine(y, dim))
        torch.testing.assert_close(summed(dot(local, local.grad)), dot(whole, y))

    terms = [drawn(*shape) for _ in range(n)]
    total = ts.distributed.reduce(terms[rank])
    torch.testing.assert_close(total, sum(terms))
    total.backward(y)
    assert terms[rank].grad.equal(y)
    torch.testing.assert_close(summed(dot(terms[rank], y)), dot(total, y))

    x.grad = None
    ts.distributed.copy(x).backward(terms[rank].detach())
    torch.testing.assert_close(x.grad, sum(terms).detach())
    torch.testing.assert_close(summed(dot(x, terms[rank])), dot(x, x.grad))


@pytest.mark.parametrize('world, groups', [(2, [1, 2]), (4, [2, 4])])
def test_each_pair_moves_its_tensors_and_is_adjoint(world, groups):
    run(world, moves, groups)


def odd_lengths():
    """Gather parts that ts.slice would not make."""
    lengths = [0, 3, 1, 4]
    rank = ts.distributed.get_rank()
    x = torch.arange(16.0).view(2, 8)
    part = x.split(lengths, 1)[rank].clone().requires_grad_()
    whole = ts.distributed.gather(part)
    assert whole.equal(x)
    whole.backward(x)
    assert part.grad.equal(x.split(lengths, 1)[rank])


def test_parts_of_any_length_are_gathered():
    run(4, odd_lengths, group=4)


def kinds():
    """Gather and add up numbers of other types."""
    for dtype in (
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
        torch.half,
        torch.bfloat16,
        torch.float,
        torch.complex64,
    ):
        x = torch.arange(7).to(dtype)
        assert ts.distributed.gather(mine(x, 0)).equal(x)
        assert ts.distributed.scatter(x).equal(mine(x, 0))
        if dtype != torch.bool:
            assert ts.distributed.reduce(x).equal(x + x)


def twice():
    """Go through backward a second time."""
    x = drawn(3)
    for function, factor in [
        (lambda x: ts.distributed.copy(x) ** 3, 2),
        (lambda x: ts.distributed.reduce(x**3), 1),
    ]:
        y = function(x)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        torch.testing.assert_close(grad, 3 * x**2 * factor)
        (second,) = torch.autograd.grad(grad.sum(), x)
        torch.testing.assert_close(second, 6 * x * factor)
    for dim, size in itertools.product((0, 1), (3, 5)):
        x = drawn(size, size)
        y = ts.distributed.gather(ts.distributed.scatter(x, dim) ** 3, dim, size)
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        torch.testing.assert_close(grad, 3 * x**2)
        (second,) = torch.autograd.grad(grad.sum(), x)
        torch.testing.assert_close(second, 6 * x)


def alone():
    """In a group of one, nothing is communicated; gradients agree with finite differences."""
    for function in (
        ts.distributed.scatter,
        ts.distributed.gather,
        ts.distributed.reduce,
        ts.distributed.copy,
    ):
        x = drawn(2, 3)
        assert function(x).data_ptr() == x.data_ptr()
        assert gradcheck(lambda x: function(x) ** 2, x)
        assert gradgradcheck(lambda x: function(x) ** 2, x)


def test_a_group_of_one():
    run(1, alone, group=1)


def untouched():
    """Leave the caller's tensors alone."""
    for requires_grad, function in itertools.product(
        (False, True),
        (
            ts.distributed.scatter,
            ts.distributed.gather,
            ts.distributed.reduce,
            ts.distributed.copy,
        ),
    ):
        x = drawn(4, 6).requires_grad_(requires_grad)
        before = x.detach().clone()
        for grad_mode in (True, False):
            with torch.set_grad_enabled(grad_mode):
                y = function(x)
            assert y is not x and not is_tagged(x) and x.equal(before) and is_tagged(y)
            assert ts.get_parallel_dim(y) == (-1 if function is ts.distributed.scatter else None)
    # A part of the batch, and outputs computed from it, have no tag of the last dimension.
    assert not is_tagged(ts.distributed.scatter(x, 0))
    # The part does not keep the whole in memory.
    part = ts.distributed.scatter(x)
    assert part.untyped_storage().nbytes() == part.nbytes


@pytest.mark.parametrize('world', [1, 2])
def test_the_tensors_of_the_caller_stay_as_they_are(world):
    run(world, untouched, group=world)


def in_threads():
    """Go backward in another thread than forward."""
    x = drawn(7)
    y = ts.distributed.gather(ts.distributed.scatter(ts.distributed.copy(x)))
    thread = threading.Thread(target=y.sum().backward)
    thread.start()
    thread.join()
    assert x.grad.equal(torch.full_like(x, dist.get_world_size()))


def sent_as_it_is():
    """See whether a part is copied before it is sent."""
    for size, copied in [(4, False), (3, ts.distributed.get_rank() == 1)]:
        part = mine(torch.ones(size), 0)
        names = operations(lambda: ts.distributed.gather(part, size=size))
        assert ('new_zeros' in names) == copied


def of_another_size():
    """Give a part that is none of the size."""
    with pytest.raises(
        ValueError,
        match='of a size of 5, the shard of rank . of 2 is . long; this one is 7: leave size out',
    ):
        ts.distributed.gather(torch.ones(7), size=5)


def test_parts_may_have_any_type_and_size_and_backward_runs_in_any_thread():
    run(2, in_turn, kinds, twice, in_threads, sent_as_it_is, of_another_size, group=2)
