"""Initial values of Transformers models on the meta device, compared with constructors."""

import pytest
import torch

from tests.shard.processes import run
from torchgpipe import Arguments, GPipe
from torchgpipe.sequential import original_names, to_sequential

transformers = pytest.importorskip('transformers')

pytestmark = [pytest.mark.tools]

SIZES = {'num_hidden_layers': 2, 'num_attention_heads': 4, 'vocab_size': 300}
WIDE = {'hidden_size': 48, 'intermediate_size': 96}
CONFIGS = {
    'GPT2LMHeadModel': {
        'n_embd': 48,
        'n_layer': 2,
        'n_head': 4,
        'vocab_size': 300,
        'n_positions': 32,
        'bos_token_id': 0,
        'eos_token_id': 0,
    },
    'LlamaForCausalLM': {**SIZES, **WIDE, 'num_key_value_heads': 2},
    'OPTForCausalLM': {
        **SIZES,
        'hidden_size': 48,
        'ffn_dim': 96,
        'word_embed_proj_dim': 48,
        'max_position_embeddings': 32,
    },
    'BloomForCausalLM': {'hidden_size': 48, 'n_layer': 2, 'n_head': 4, 'vocab_size': 300},
    'BertForMaskedLM': {**SIZES, **WIDE},
    'ViTForImageClassification': {**SIZES, **WIDE, 'image_size': 32, 'patch_size': 8},
}


def made(name):
    """Return a model of a small configuration."""
    settings = dict(CONFIGS[name])
    if name.startswith('ViT'):
        del settings['vocab_size']
    kind = getattr(transformers, name)
    config = kind.config_class(**settings)
    config.use_cache = False
    return kind(config)


def layers(name):
    """Return the layers of a model on the meta device."""
    with torch.device('meta'):
        model = made(name)
        sample = (
            Arguments(pixel_values=torch.zeros(2, 3, 32, 32))
            if name.startswith('ViT')
            else Arguments(input_ids=torch.zeros(2, 8, dtype=torch.long))
        )
        return to_sequential(model, sample)


def on_mesh(name, axes):
    """Return the values that a rank makes."""
    from torchgpipe.distributed import DistributedGPipe, init_mesh

    module = layers(name)
    stages = axes.get('pipe', 1)
    n = len(module) // stages
    balance = [n] * (stages - 1) + [len(module) - n * (stages - 1)]
    model = DistributedGPipe(module, balance, mesh=init_mesh(**axes), seed=3)
    return dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.parametrize('name', CONFIGS)
def test_values_are_distributed_as_by_the_constructor(name):
    torch.manual_seed(0)
    expected = made(name)
    module = layers(name)
    model = GPipe(module, [len(module)], devices=['cpu'], seed=3)
    found = original_names(model.state_dict())
    for key, x in expected.state_dict().items():
        if x.is_floating_point():
            y = found[key]
            spread = x.std(unbiased=False)
            assert (y.std(unbiased=False) - spread).abs() <= 0.2 * spread, key
            assert (y.mean() - x.mean()).abs() <= spread * 6 / x.numel() ** 0.5, key
    buffers = {key.partition('.')[2]: x for key, x in model.named_buffers()}
    for key, x in expected.named_buffers():
        torch.testing.assert_close(buffers[key], x)


@pytest.mark.distributed
@pytest.mark.parametrize('name', CONFIGS)
def test_values_are_equal_on_all_meshes(name):
    module = layers(name)
    model = GPipe(module, [len(module)], devices=['cpu'], seed=3)
    expected = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    for axes in ({'pipe': 2}, {'data': 2, 'pipe': 2}):
        found = run(2 * axes.get('data', 1), on_mesh, name, axes)
        assert {key for rank in found for key in rank} == {
            *dict(model.named_parameters()),
            *dict(model.named_buffers()),
        } | {key for rank in found for key in rank if key in expected}
        for rank in found:
            for key, x in rank.items():
                assert torch.equal(x, expected[key]), key


def test_layers_without_their_model_are_refused():
    with torch.device('meta'):
        model = made('OPTForCausalLM')
    layers = torch.nn.Sequential(*model.model.decoder.layers)
    with pytest.raises(ValueError, match='other initial values than the constructor.*init='):
        GPipe(layers, [len(layers)], devices=['cpu'])
