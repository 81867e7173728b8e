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


@pytest.mark.parametrize(
    'tag', [ts.register_parallel_attribute, ts.set_attribute, ts.nn.functional.set_attribute]
)
@pytest.mark.parametrize(
    'order, expected', [(0, {None: None, 0: 1, 1: 0, -1: 0}), (1, {None: None, 0: 0, 1: 1, -1: 1})]
)
def test_order_and_parallel_dim_give_the_dimension_in_memory(order, expected, tag):
    """In v0.8.0, `set_attribute` took the name of an attribute, other than TorchShard's."""
    found = {}
    for dim in (None, 0, 1, -1):
        weight = torch.zeros(2, 2)
        assert storage_dim(weight) is None
        tag(weight, dim, order_type=order)
        assert getattr(weight, ts._ORDER_ATTR) == order
        found[dim] = storage_dim(weight)
    assert found == expected


@pytest.mark.parametrize('dim', [2, -2, '1', True])
def test_a_wrong_dimension_raises(dim):
    with pytest.raises(ValueError, match='None, 0, 1 or -1, not'):
        ts.register_parallel_dim(torch.zeros(2), dim)


def test_a_wrong_order_raises_and_leaves_no_tag():
    weight = torch.zeros(2)
    with pytest.raises(ValueError, match='not 2'):
        ts.register_parallel_attribute(weight, 0, 2)
    assert not is_tagged(weight)
