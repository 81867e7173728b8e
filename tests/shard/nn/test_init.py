"""Initial values and the next random number equal those in one process, bit by bit."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchgpipe.shard as ts
from tests.shard.nn.oracle import cut
from tests.shard.processes import run
from torchgpipe.shard.nn import init
from torchgpipe.shard.parameter import storage_dim

SHAPES = [(5, 7), (31, 7), (5, 1), (1, 40), (64, 64), (2, 8), (40,), (0, 5), (5, 0), (0,)]


def own(tensor):
    """Set values as nn.init does not."""
    tensor.data.normal_().mul_(2).clamp_(-0.1, 0.1)


def reads(tensor):
    """Look at values."""
    if tensor.uniform_().sum() > 0:
        tensor.neg_()


def adds(tensor):
    """Draw in another tensor."""
    tensor.copy_(torch.randn(tensor.shape))


def unused(tensor):
    """Compute something that is not used."""
    tensor.uniform_().mul(2).add_(1)


def adds_up(tensor):
    """Let values depend on others."""
    tensor.uniform_().cumsum_(0)


#: Methods, their keyword arguments, and whether they never hold the whole tensor.
METHODS = [
    (nn.init.uniform_, {'a': -2}, True),
    (nn.init.normal_, {'std': 2.0}, True),
    (nn.init.constant_, {'val': 3}, True),
    (nn.init.zeros_, {}, True),
    (own, {}, True),
    (nn.init.kaiming_uniform_, {'a': 2.0}, True),
    (nn.init.xavier_normal_, {}, True),
    (nn.init.orthogonal_, {}, False),
    (nn.init.eye_, {}, False),
    (nn.init.trunc_normal_, {}, None),
    (reads, {}, False),
    (adds, {}, False),
    (unused, {}, False),
    (adds_up, {}, False),
]

ONLY_2D = {nn.init.kaiming_uniform_, nn.init.xavier_normal_, nn.init.orthogonal_, nn.init.eye_}


class Part(ts.nn.ParallelModule):
    """Have one parameter."""

    def __init__(self, shape, dim, dtype):
        super().__init__()
        self.register_part('weight', shape, dim, 1, dtype=dtype)


class Largest(TorchDispatchMode):
    """See how many elements a tensor has at most."""

    found = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.found = max(self.found, result.untyped_storage().nbytes() // result.itemsize)
        return result


def values():
    """Compare each method for each shape, dimension and type."""
    init.BLOCK = 32
    for method, kwargs, _ in METHODS:
        for shape in SHAPES:
            if len(shape) == 1 and method in ONLY_2D:
                continue
            for dtype in (torch.float, torch.bfloat16):
                if method is nn.init.orthogonal_ and (dtype.itemsize == 2 or 0 in shape):
                    continue
                whole = torch.empty(shape, dtype=dtype)
                torch.manual_seed(3)
                with warnings.catch_warnings():
                    warnings.simplefilter('ignore')  # where there are no elements
                    method(whole, **kwargs)
                after = torch.rand(1)
                for dim in (None, 0, 1)[: 1 + len(shape)]:
                    weight = Part(shape, dim, dtype).weight
                    torch.manual_seed(3)
                    assert ts.nn.init.shard_init_helper_(method, weight, **kwargs) is weight
                    assert weight.equal(cut(whole, storage_dim(weight))), (method, shape, dim)
                    assert torch.rand(1).equal(after), (method, shape, dim)


@pytest.mark.parametrize('world', [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_method_gives_the_values_of_one_process(world):
    run(world, values, group=world)


def sizes_in_memory():
    """Check the sizes of temporary tensors."""
    init.BLOCK = 32
    for method, kwargs, in_blocks in METHODS:
        for dim in (0, 1):
            weight = Part((128, 128), dim, torch.float).weight
            with Largest() as largest:
                ts.nn.init.shard_init_helper_(method, weight, **kwargs)
            if in_blocks is not None:  # as it is with one release, and not with another
                assert (largest.found <= weight.numel()) == in_blocks, (method, largest.found)


@pytest.mark.slow
def test_the_whole_is_never_made_where_it_need_not_be():
    run(2, sizes_in_memory, group=2)


def default_device():
    """Set values where another device is the default one."""
    for method in (nn.init.uniform_, reads):
        whole, weight = torch.empty(7, 5), Part((7, 5), 0, torch.float).weight
        torch.manual_seed(3)
        method(whole)
        torch.manual_seed(3)
        with torch.device('meta'):
            ts.nn.init.shard_init_helper_(method, weight)
        assert weight.equal(cut(whole, 0))


@pytest.mark.slow
def test_another_default_device():
    run(2, default_device, group=2)


def own_generator():
    """Draw from a generator that is not the default one."""
    for method in (nn.init.uniform_, nn.init.orthogonal_):
        generator = torch.Generator().manual_seed(7)
        whole = method(torch.empty(7, 5), generator=generator)
        after, default = torch.rand(1, generator=generator), torch.default_generator.get_state()
        generator.manual_seed(7 + ts.distributed.get_rank())
        weight = Part((7, 5), 0, torch.float).weight
        ts.nn.init.shard_init_helper_(method, weight, generator=generator)
        assert weight.equal(cut(whole, 0))
        assert torch.rand(1, generator=generator).equal(after) == (ts.distributed.get_rank() == 0)
        assert default.equal(torch.default_generator.get_state())


def test_another_generator():
    run(2, own_generator, group=2)


def untagged():
    """Set the values of a parameter of a plain layer; and say it where a part is of no whole."""
    torch.manual_seed(ts.distributed.get_rank())
    weight = nn.Linear(5, 5).weight
    ts.nn.init.shard_init_helper_(nn.init.normal_, weight)
    assert ts.distributed.gather(weight.detach()[None], 0).std(0).max() == 0
    ts.register_parallel_attribute(weight, 1)
    with pytest.raises(ValueError, match='register_part'):
        ts.nn.init.shard_init_helper_(nn.init.normal_, weight)
    with pytest.raises(TypeError, match='unexpected'):
        ts.nn.init.shard_init_helper_(nn.init.normal_, Part((5, 5), 0, torch.float).weight, c=1)


def test_parameters_that_are_whole_or_untagged():
    run(2, untagged, group=2)
