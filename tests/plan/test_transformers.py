"""Transformers: formulas against the published ones, and against a GPT that runs."""

from dataclasses import replace

import pytest
import torch

from torchgpipe.distributed import dry_run
from torchgpipe.plan import MACHINES, ParameterBytes, Transformer
from torchgpipe.shard.nn.functional import parallel_cross_entropy
from torchgpipe.trainer.gpt import GPT, Sizes, layers, tensor_plan

A100 = MACHINES['A100']

#: The models of Korthikanti et al., 2022.
GPT_22B = Transformer(48, 6144, 64, 51200, 2048, dropout=True, fused=False)


def llama(layers, width, heads, features):
    """Return a Llama 3."""
    sizes = {'key_heads': 8, 'features': features}
    options = {'gated': True, 'tied': False, 'biases': False}
    return Transformer(layers, width, heads, 128256, 8192, **sizes, **options)


def test_saved_tensors_match_the_paper():
    """Korthikanti et al., 2022, equations 1 to 4."""
    for parallel in [False, True]:
        for recomputation in ['none', 'attention']:
            s, b, h, a, t = 2048, 4, 6144, 64, 8
            model = replace(GPT_22B, sequence_parallel=parallel)
            block = model.profile(A100, t, b, recomputation).layers[1]
            scores = 0 if recomputation == 'attention' else 5 * a * s / (h * t)
            assert block.activation_bytes == pytest.approx(
                s * b * h * ((10 / t if parallel else 10) + 24 / t + scores), abs=1
            )


def test_a_full_recomputation_is_up_to_the_schedule():
    full, none = (GPT_22B.profile(A100, 8, 4, mode) for mode in ('full', 'none'))
    assert full == none


def test_flops_match_the_paper():
    """72 B l s h² (1 + s / 6h + v / 12hl): Narayanan et al., 2021, without recomputation."""
    for depth, width, heads, batch, petaflops in [
        (48, 6144, 64, 4, 1.143),
        (96, 12288, 96, 64, 141.1),
    ]:
        s, v, h = 2048, 51200, width
        paper = 72 * batch * depth * s * h**2 * (1 + s / (6 * h) + v / (12 * h * depth))
        found = Transformer(depth, width, heads, v, s).flops(batch)
        assert found == pytest.approx(paper), (depth, width, heads, batch, petaflops)
        assert found / 1e15 == pytest.approx(petaflops, rel=0.002)


def test_parameters_of_published_models():
    """GPT-2 XL, Llama 3 8B and 70B, to the last one."""
    for model, billions in [
        (Transformer(48, 1600, 25, 50257, 1024), 1.557611200),
        (llama(32, 4096, 32, 14336), 8.030261248),
        (llama(80, 8192, 64, 28672), 70.553706496),
    ]:
        assert model.parameters == round(billions * 1e9)


def test_a_gpt_that_runs():
    """FLOPs, parameters and saved tensors of each layer, as a dry run counts them."""
    for tensor in [1, 2, 4]:
        sizes = Sizes(256, 128, 64, 4, 3, tied=False)
        with torch.device('meta'):
            module = layers(GPT(sizes))
        tokens = torch.empty(2, 128, dtype=torch.long, device='meta')
        report = dry_run(
            module,
            [1] * 5,
            tokens,
            tokens,
            parallel_cross_entropy,
            mesh={'pipe': 5, 'tensor': tensor},
            checkpoint='never',
            tensor_plan=tensor_plan() if tensor > 1 else None,
        )
        model = Transformer(3, 64, 4, 256, 128, tied=False, dtype='float32')
        profile = model.profile(A100, tensor, 2)
        ranks = report.ranks[::tensor]
        assert [x.parameter_bytes for x in profile.layers] == [x.parameters for x in ranks], tensor
        # Backward has twice as many, and computes the scores of fused attention again.
        assert sum(x.forward_flops for x in report.stages) * tensor == model.flops(2) / 3
        block, one = ranks[2], profile.layers[2]
        assert (
            one.activation_bytes
            < block.activations
            < (one.activation_bytes + one.backward_bytes + 4 * one.output_bytes)
        ), tensor


def test_ranks_share_products_and_their_collectives_take_time():
    one, eight = (GPT_22B.profile(A100, t, 4).layers[1] for t in (1, 8))
    assert one.forward_seconds / 8 < eight.forward_seconds < one.forward_seconds / 2
    free = GPT_22B.profile(A100.without_links(), 8, 4).layers[1]
    exchange = A100.all_reduce(2 * 4 * 2048 * 6144, 8)
    for name in ('forward_seconds', 'backward_seconds'):
        assert getattr(eight, name) - getattr(free, name) == pytest.approx(2 * exchange)
    hidden = GPT_22B.profile(A100, 8, 4, overlap=True).layers[1]
    assert hidden.forward_seconds - free.forward_seconds == pytest.approx(2 * exchange / 8)


def test_sequence_parallelism_divides_messages():
    whole, parts = (
        replace(GPT_22B, sequence_parallel=x).profile(A100, 8, 4).layers[1] for x in (False, True)
    )
    assert parts.output_bytes == whole.output_bytes / 8


def test_fused_attention_is_half_masked_and_saves_no_scores():
    whole, fused = (
        replace(GPT_22B, fused=x, dropout=False).profile(A100, 8, 4).layers[1]
        for x in (False, True)
    )
    assert fused.activation_bytes < whole.activation_bytes
    assert fused.forward_seconds < whole.forward_seconds
    again = replace(GPT_22B, dropout=False).profile(A100, 8, 4, 'attention').layers[1]
    assert again.backward_seconds > whole.backward_seconds


def test_halves_of_backward():
    for layer in GPT_22B.profile(A100, 8, 4).layers[1:]:
        # Collectives are in the backward, but a split does not repeat them.
        assert 1 + A100.split / 2 < layer.input_share + layer.weight_share <= 1 + A100.split
        assert 0.2 < layer.weight_share < 0.5


def test_a_host_that_starts_operations_slowly():
    small = Transformer(1, 128, 4, 256, 64)
    slow = small.profile(replace(A100, launch=1e-3)).layers[1]
    assert slow.forward_seconds >= 1e-2
    large = GPT_22B.profile(replace(A100, launch=1e-5), 1, 4)
    assert large == GPT_22B.profile(A100, 1, 4)


def test_ranks_that_cannot_share():
    for model, tensor, text in [
        (GPT_22B, 3, '3 ranks cannot share 64 heads'),
        (replace(GPT_22B, key_heads=4), 8, '8 ranks cannot share 4 key_heads'),
        (replace(GPT_22B, features=4 * 6144 + 1), 2, '2 ranks cannot share 24577 features'),
    ]:
        with pytest.raises(ValueError, match=text):
            model.profile(A100, tensor)


def test_refused_sizes():
    for change, error, text in [
        ({'layers': 0}, ValueError, 'layers must be a positive integer, but is 0'),
        ({'length': 2.5}, TypeError, 'length must be an integer'),
        ({'features': -5}, ValueError, 'features must be a positive integer'),
        ({'key_heads': 3}, ValueError, 'heads of key_heads, but they are 6144, 64 and 3'),
        ({'heads': 5, 'key_heads': 5}, ValueError, 'must be a multiple of heads'),
    ]:
        with pytest.raises(error, match=text):
            replace(GPT_22B, **change)


def test_refused_recomputation():
    with pytest.raises(ValueError, match='tensor must be a positive integer'):
        GPT_22B.profile(A100, 0)
    with pytest.raises(ValueError, match="must be one of .*'full', 'attention'.*, but is 'some'"):
        GPT_22B.profile(A100, recomputation='some')


def test_bytes_of_a_parameter():
    assert ParameterBytes().on_a_rank('replicate', 4) == 18
    assert ParameterBytes().on_a_rank('shard', 4) == 9
    assert ParameterBytes(4, 4, 8).on_a_rank('shard', 4) == 11
    assert ParameterBytes(4, 4, 8).traffic == 36
