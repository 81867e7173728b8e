"""Tags of tensors."""

import pytest
import torch

import torchgpipe.shard as ts
from torchgpipe.shard.parameter import is_split, is_tagged, storage_dim


def test_a_tag_is_an_attribute_of_one_tensor():
    assert (ts._PARALLEL_DIM, ts._ORDER_ATTR) == ('parallel_dim', 'order_type')  # as TorchShard
    x = torch.zeros(2)
    assert not is_tagged(x) and ts.get_parallel_dim(x) is None
    ts.register_parallel_dim(x, -1)
    assert ts.get_parallel_dim(x) == getattr(x, ts._PARALLEL_DIM) == -1
    assert is_split(x) and is_tagged(x) and not is_tagged(x + 1)
    ts.register_parallel_dim(x, 1)
    assert is_split(x)
    ts.set_attribute(x)
    assert is_tagged(x) and not is_split(x)


def test_order_and_parallel_dim_give_the_dimension_in_memory():
    """In v0.8.0, `set_attribute` took the name of an attribute, other than TorchShard's."""
    functions = ts.register_parallel_attribute, ts.set_attribute, ts.nn.functional.set_attribute
    for function in functions:
        for dim, *expected in ((None, None, None), (0, 1, 0), (1, 0, 1), (-1, 0, 1)):
            for order in (0, 1):
                weight = torch.zeros(2, 2)
                assert storage_dim(weight) is None
                function(weight, dim, order_type=order)
                assert getattr(weight, ts._ORDER_ATTR) == order
                assert storage_dim(weight) == expected[order], (function, dim, order)


def test_a_wrong_dimension_raises():
    for dim in (2, -2, '1', True):
        with pytest.raises(ValueError, match='None, 0, 1 or -1, not'):
            ts.register_parallel_dim(torch.zeros(2), dim)


def test_a_wrong_order_raises_and_leaves_no_tag():
    weight = torch.zeros(2)
    with pytest.raises(ValueError, match='not 2'):
        ts.register_parallel_attribute(weight, 0, 2)
    assert not is_tagged(weight)
