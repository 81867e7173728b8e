"""References for sharded layers: the plain layers, in one process."""

import itertools

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchgpipe.shard as ts
from torchgpipe.shard.parameter import global_shape, storage_dim


def over_groups(groups, check, *grid):
    """Check for groups of several sizes, and all that a grid has."""
    for group in groups:
        ts.distributed.init_process_group(group)
        for values in itertools.product(*grid):
            check(*values)
        ts.distributed.destroy_process_group()


def double(*shape):
    """Draw a tensor that is the same on all ranks."""
    return torch.randn(*shape, dtype=torch.double)


def close(found, expected):
    """Compare numbers of double precision."""
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def seeded(make, seed=1):
    """Make something after a seed, and give the next random number, too."""
    torch.manual_seed(seed)
    return make(), torch.rand(1)


def cut(whole, dim):
    """Return this rank's part of a tensor that is split along a dimension in memory."""
    if dim is None:
        return whole
    return ts.slice(whole, ts.distributed.get_group_size(), dim)[ts.distributed.get_rank()]


def same_start(plain, sharded):
    """Check each initial value, and the next random number. Return both layers."""
    (plain, after), (sharded, after_sharded) = seeded(plain), seeded(sharded)
    assert after.equal(after_sharded)
    same_parameters(plain, sharded)
    return plain, sharded


def same_parameters(plain, sharded):
    """Check that parameters are the plain layer's, to the bit."""
    expected, found = dict(plain.named_parameters()), dict(sharded.named_parameters())
    assert list(expected) == list(found)
    for name, whole in expected.items():
        assert global_shape(found[name]) == whole.shape
        part = cut(whole, storage_dim(found[name]))
        assert found[name].equal(part) and found[name].dtype == whole.dtype
        assert found[name].requires_grad == whole.requires_grad
        assert type(found[name]) is torch.nn.Parameter


def same_gradients(plain, sharded):
    """Check gradients of parameters."""
    found = dict(sharded.named_parameters())
    for name, whole in plain.named_parameters():
        assert found[name].grad.is_sparse == whole.grad.is_sparse
        close(found[name].grad.to_dense(), cut(whole.grad.to_dense(), storage_dim(found[name])))


class Operations(TorchDispatchMode):
    """List the called operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is not torch.ops.aten.detach.default:
            self.names.append(operation.overloadpacket.__name__)
        return operation(*args, **(kwargs or {}))


def operations(function, *args):
    """List the operations that a function calls."""
    with Operations() as found:
        function(*args)
    return found.names
