"""Formulas of machines and transformers, term by term."""

from dataclasses import replace

import pytest

from tests.plan.test_transformers import llama
from tests.plan.test_transformers_machines import MACHINE
from torchgpipe.plan import MACHINES, Link, Machine, Transformer
from torchgpipe.plan.transformers import Product, shares_of

#: One byte in a second; operations, links and the host take no time.
BYTES = Machine(
    'bytes',
    {'bfloat16': 1e99, 'float32': 1e99},
    ((1, 1.0),),
    1.0,
    1e99,
    1.0,
    0.0,
    0.0,
    Link(),
    Link(),
)
#: One operation on elements in a second.
OPERATIONS = replace(BYTES, bandwidth=1e99, latency=1.0)
SMALL = Transformer(2, 12, 3, 50, 8, fused=False)


def test_memory_of_products():
    small = Product(10, 10, 10)
    assert MACHINE.product_seconds(small._replace(batch=3)) == 0.25 + 3 * 300 * 2 / 10
    assert MACHINE.product_seconds(small, 'float32') == 0.25 + 300 * 4 / 10


def test_one_device_of_each_host_has_no_link_within_it():
    fast = replace(MACHINE, network=Link(0.0, 1e3))
    assert fast.gather(100.0, 2, 2) == 50 / 1e3
    assert fast.gather(100.0, 4, 2) == pytest.approx(3 * 25 / 1e3)


def test_shares_of_other_machines():
    """Products that take as long on a faster machine have the same share there."""
    slow, fast = (shares_of('any', peak, 0.5) for peak in (312e12, 8 * 312e12))
    assert [2 * size for size, _ in slow] == [size for size, _ in fast]
    assert [share for _, share in slow] == [share for _, share in fast]
    assert slow[-1] == (8192, 0.5)
    assert shares_of('H100', 989e12, 1.0)[4] == (2048, 1.0)  # as measured


def test_launches_and_latencies_of_known_machines():
    assert {(x.latency, x.launch) for x in MACHINES.values()} == {(1.2e-6, 1e-5)}


def elements(m, k, n, batch=1):
    return batch * (m * k + k * n + m * n)


def products(tokens, weights):
    """Return the elements that products with weights read and write, in forward and backward."""
    forward = sum(elements(tokens, *each) for each in weights)
    return forward, 2 * forward + 3 * sum(k * n for k, n in weights)


def test_bytes_of_a_block_by_hand():
    """Scores in memory: two sequences, each 8 tokens of 12 features and 3 heads of 4."""
    for dropout in [False, True]:
        for keys, gated, parallel, t in [
            (3, False, False, 1),
            (1, True, False, 1),
            (3, True, True, 3),
            (3, False, False, 3),
        ]:
            model = replace(
                SMALL, key_heads=keys, gated=gated, dropout=dropout, sequence_parallel=parallel
            )
            n, own, f = 16, 16 / t if parallel else 16, 48
            block = model.profile(BYTES, t, 2).layers[1]
            qkv, inner = (12 + 2 * keys * 4) / t, (2 if gated else 1) * f / t
            forward, backward = products(n, [(12, qkv), (12 / t, 12), (12, inner), (f / t, 12)])
            heads = 2 * 3 / t
            scores, both = heads * 64, elements(8, 4, 8, heads) + elements(8, 8, 4, heads)
            mask = 1 if dropout else 0
            assert block.forward_seconds == pytest.approx(
                2 * (forward + both)
                + scores * (4 + 5 * mask)
                + 2 * own * 12 * (10 + mask)
                + 2 * n * (inner + f / t)
            )
            assert block.backward_seconds == pytest.approx(
                2 * (backward + 2 * both)
                + scores * (6 + 5 * mask)
                + 2 * own * 12 * (12 + mask)
                + 2 * n * (2 * inner + f / t)
            )
            assert block.activation_bytes == round(
                scores * (2 + 3 * mask)
                + 2 * own * 12 * (2 + mask)
                + 2 * (own * 12 + n * qkv)
                + 2 * n * 12 / t
                + 2 * (own * 12 + n * (inner + f / t))
            )
            assert block.backward_bytes == round((4 * 12 * inner * t + 2 * n * inner * t) / t)


def test_bytes_of_fused_attention_by_hand():
    """Queries, keys, values and the result; logarithms of sums, in float32, are saved."""
    for keys in [1, 3]:
        whole, fused = (
            replace(SMALL, key_heads=keys, fused=x).profile(BYTES, 1, 2).layers[1]
            for x in (False, True)
        )
        scores, both = 6 * 64, elements(8, 4, 8, 6) + elements(8, 8, 4, 6)
        own = 2 * 16 * 4 * (3 + keys)
        assert whole.forward_seconds - fused.forward_seconds == 2 * both + 4 * scores - 2 * own
        assert (
            whole.backward_seconds - fused.backward_seconds == 4 * both + 6 * scores - 4 * own
        ), keys
        assert whole.activation_bytes - fused.activation_bytes == (2 * scores + 2 * 16 * 12) - (
            2 * 16 * 12 + 4 * 6 * 8
        ), keys


def test_operations_of_a_block_by_hand():
    """Two of each normalization, one of the others, two or three of attention, six products."""
    for dropout, forward in (False, 2 * 2 + 3 + 2 + 6), (True, 2 * 2 + 3 + 3 + 6):
        block = replace(SMALL, dropout=dropout).profile(OPERATIONS).layers[1]
        assert block.forward_seconds == forward
        assert block.backward_seconds == forward + 6  # two products for each
    fused = replace(SMALL, fused=True).profile(OPERATIONS).layers[1]
    assert fused.forward_seconds == 2 * 2 + 3 + 2 + 4
    assert fused.backward_seconds == 2 * 2 + 3 + 2 + 8


def test_operations_of_fused_attention_by_hand():
    """Half of the scores are masked; backward has five products for two."""
    slow = replace(BYTES, flops={'bfloat16': 1.0}, bandwidth=1e99, attention_share=0.5)
    fast = replace(slow, attention_share=1e99)
    one, other = (replace(SMALL, fused=True).profile(x, 1, 2).layers[1] for x in (slow, fast))
    seconds = 2 * 2 * 6 * 8 * 8 * 4 / 2 / 0.5
    assert one.forward_seconds - other.forward_seconds == pytest.approx(seconds)
    assert one.backward_seconds - other.backward_seconds == pytest.approx(2.5 * seconds)


def test_a_recomputation_of_attention_is_its_forward():
    none, again = (SMALL.profile(BYTES, 1, 2, x).layers[1] for x in ('none', 'attention'))
    both = elements(8, 4, 8, 6) + elements(8, 8, 4, 6)
    assert again.backward_seconds - none.backward_seconds == 2 * both + 4 * 6 * 64


def test_bytes_of_ends_by_hand():
    """The embedding and the head, with two sequences of 8 tokens and 50 words."""
    for parallel, t in [(False, 1), (False, 2), (True, 2)]:
        model = Transformer(1, 12, 4, 50, 8, sequence_parallel=parallel)
        profile = model.profile(BYTES, t, 2)
        first, last = profile.layers[0], profile.layers[-1]
        n, own, v = 16, 16 / t if parallel else 16, 50 / t
        assert first.forward_seconds == first.backward_seconds == 3 * 2 * n * 12, (parallel, t)
        assert first.activation_bytes == 0 and profile.input_bytes == 8 * n, (parallel, t)
        assert (
            replace(model, dropout=True).profile(BYTES, t, 2).layers[0].activation_bytes
            == own * 12
        )
        forward, backward = products(n, [(12, v)])
        assert last.forward_seconds == pytest.approx(2 * forward + 8 * own * 12 + 24 * n * v)
        assert last.backward_seconds == pytest.approx(2 * backward + 12 * own * 12 + 14 * n * v)
        assert last.activation_bytes == 4 * own * 12, (parallel, t)
        # The softmax in float32, and in backward a gradient beside the output's.
        assert (last.output_bytes, last.backward_bytes) == (4 * n * v, 4 * n * v), (parallel, t)
        assert first.backward_bytes == first.parameter_bytes, (parallel, t)
        assert last.parameter_bytes == 2 * (50 * 12 // t + 2 * 12)
        assert first.parameter_bytes == 2 * (50 * 12 // t + 8 * 12)
        plain = replace(model, biases=False).profile(BYTES, t, 2).layers
        assert plain[0].parameter_bytes == 2 * 50 * 12 // t
        assert plain[-1].parameter_bytes == 2 * (50 * 12 // t + 12)


def test_collectives_of_ends():
    """Forward of the embedding and backward of the head have one each."""
    free = replace(SMALL, heads=4)
    linked = replace(BYTES, host=Link(1.0, 4.0))
    (first, *_, last), (one, *_, other) = (free.profile(x, 2, 2).layers for x in (linked, BYTES))
    exchange = linked.all_reduce(2 * 16 * 12, 2)
    assert first.forward_seconds - one.forward_seconds == pytest.approx(exchange)
    assert last.backward_seconds - other.backward_seconds == pytest.approx(exchange)
    assert first.backward_seconds == one.backward_seconds
    assert last.forward_seconds == other.forward_seconds


def test_a_host_that_starts_operations_slowly_in_backward():
    slow = SMALL.profile(replace(BYTES, bandwidth=1e99, launch=1.0)).layers[1]
    assert (slow.forward_seconds, slow.backward_seconds) == (2 * 2 + 3 + 2 + 6, 2 * 15)


def test_the_dtype_of_products():
    """float32 has another peak, in forward and backward."""
    slow = replace(BYTES, flops={'bfloat16': 1e99, 'float32': 1.0}, bandwidth=1e99)
    model = replace(SMALL, dtype='float32')
    block = model.profile(slow).layers[1]
    scores = 2 * 2 * 3 * 64 * 4
    whole = 2 * 8 * (12 * 36 + 12 * 12 + 2 * 12 * 48) + scores
    assert block.forward_seconds == pytest.approx(whole)
    assert block.backward_seconds == pytest.approx(2 * whole)
    # Of a split backward, gradients of weights have no products of scores.
    assert block.weight_share == pytest.approx((whole - scores) / (2 * whole))


def test_flops_have_grouped_keys_and_gates():
    model = llama(32, 4096, 32, 14336)
    matrices = model.block_parameters() - 2 * 4096  # without norms
    assert model.flops(3) == 6 * 3 * 8192 * (32 * (matrices + 2 * 8192 * 4096) + 128256 * 4096)
