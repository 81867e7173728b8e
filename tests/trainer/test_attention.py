"""Heads of attention: their order, and parts of them."""

import pytest
import torch

from torchgpipe.trainer.attention import attend, by_heads, heads_of


def test_a_weight_in_the_order_of_heads():
    """Queries, keys and values of a head stand together."""
    weight = torch.arange(12)  # q0 q0 q1 q1 k0 k0 …
    assert by_heads(weight, 2).tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    assert heads_of(by_heads(weight, 2), 3, 2).shape == (2, 3, 2)


def test_a_part_of_a_head_is_refused():
    with pytest.raises(ValueError, match='9 features are 1.50 heads of 6'):
        heads_of(torch.zeros(9), 3, 2)


def test_attention_to_earlier_tokens_only():
    q, k, v = torch.randn(3, 1, 5, 2, 4).unbind()
    y = attend(q, k, v, causal=True)
    later = v.clone()
    later[:, 3:] = 7.0
    changed = attend(q, k, later, causal=True)
    assert torch.equal(y[:, :3], changed[:, :3]) and not torch.equal(y[:, 3:], changed[:, 3:])
    assert torch.allclose(y[:, 0].view(2, 4), v[0, 0])
