"""Folders of Transformers: onto a mesh and back, with adapters of PEFT."""

import copy
import json
import warnings
from collections import ChainMap

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F

from tests.shard.processes import outcomes, run
from torchgpipe import Arguments, GPipe
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.model.weights import open_weights
from torchgpipe.sequential import original_names, to_sequential

transformers = pytest.importorskip('transformers')

pytestmark = [pytest.mark.tools, pytest.mark.filterwarnings('ignore')]

IDS = torch.arange(64).view(8, 8) * 7 % 50


def config(**values):
    settings = {
        'num_hidden_layers': 2,
        'num_attention_heads': 4,
        'num_key_value_heads': 2,
        'vocab_size': 50,
        'hidden_size': 32,
        'intermediate_size': 48,
        **values,
    }
    found = transformers.LlamaConfig(**settings)
    found.use_cache = False
    return found


def llama(**values):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config(**values))


def loss_fn(output, ids):
    return F.cross_entropy(output['logits'].flatten(0, 1), ids.flatten())


def steps(model, optimizer):
    """Take three steps of a model, or of a pipeline on its part of the samples."""
    for _ in range(3):
        if isinstance(model, (GPipe, DistributedGPipe)):
            rows = IDS
            if isinstance(model, DistributedGPipe):
                data = model._rank.mesh.data
                rows = IDS.chunk(data.size)[data.rank]
            model.step(rows, rows, loss_fn)
        else:
            loss_fn(model(IDS), IDS).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_states(actual, expected, tolerance=0.0):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(actual[name], x, rtol=0, atol=tolerance)


# Names and forms of tensors.


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_tied_weights_and_rotary_tables_of_another_dtype(tmp_path, dtype):
    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / 'a')
    with torch.device('meta'):
        # As from_pretrained, it leaves the rotary table in float32.
        meta = transformers.AutoModelForCausalLM.from_config(
            config(tie_word_embeddings=True), dtype=dtype
        )
        layers = to_sequential(meta, IDS)
    gpipe = GPipe(layers, [len(layers)], devices=['cpu'], weights=tmp_path / 'a')
    expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path / 'a', dtype=dtype)
    assert_states(original_names(gpipe.state_dict()), dict(expected.state_dict()))
    assert torch.equal(gpipe(IDS)['logits'], expected(IDS, use_cache=False).logits)
    for tied in ('model.embed_tokens.weight', 'lm_head.weight'):
        state = load_file(tmp_path / 'a' / 'model.safetensors')
        state[tied] = state.pop('model.embed_tokens.weight')
        gpipe = GPipe(layers, [len(layers)], devices=['cpu'], weights=state)
        assert torch.equal(gpipe(IDS)['logits'], expected(IDS, use_cache=False).logits)
    gpipe.save_pretrained(tmp_path / 'b')
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / 'b')
    assert again.dtype == dtype
    assert_states(dict(again.state_dict()), dict(expected.state_dict()))


def test_buffers_in_old_files_are_ignored(tmp_path):
    model = llama()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    state['model.layers.0.self_attn.rotary_emb.inv_freq'] = torch.zeros(4)
    state['model.rotary_emb.inv_freq'] = torch.zeros(4)
    save_file(state, tmp_path / 'model.safetensors')
    with torch.device('meta'):
        layers = to_sequential(transformers.LlamaForCausalLM(config()), IDS)
    gpipe = GPipe(layers, [len(layers)], devices=['cpu'], weights=tmp_path)
    torch.testing.assert_close(gpipe(IDS)['logits'], model(IDS).logits)


def test_names_that_transformers_stores_otherwise(tmp_path):
    """In both directions, the files are as Transformers writes them."""
    sizes = {
        'num_hidden_layers': 2,
        'num_attention_heads': 4,
        'vocab_size': 50,
        'hidden_size': 32,
        'intermediate_size': 48,
    }
    mixture = transformers.Qwen3MoeConfig(
        **sizes,
        num_key_value_heads=2,
        moe_intermediate_size=16,
        num_experts=12,
        head_dim=8,
    )
    mixture._experts_implementation = 'batched_mm'
    for kind, settings, names in (
        ('GPTNeoXForCausalLM', transformers.GPTNeoXConfig(**sizes), ['embed_out.weight']),
        (
            'Qwen3MoeForCausalLM',
            mixture,
            [f'model.layers.1.mlp.experts.{k}.up_proj.weight' for k in range(12)],
        ),
    ):
        settings.use_cache = False
        model = getattr(transformers, kind)(settings)
        model.save_pretrained(tmp_path / kind)
        expected = load_file(tmp_path / kind / 'model.safetensors')
        assert not {*names} & {*model.state_dict()}
        for state in (expected, dict(model.state_dict())):
            # With these names, a file may also have the module's own ones.
            with torch.device('meta'):
                layers = to_sequential(getattr(transformers, kind)(settings), IDS)
            gpipe = GPipe(layers, [len(layers)], devices=['cpu'], weights=state)
            assert_states(original_names(gpipe.state_dict()), dict(model.state_dict()))
        gpipe.save_pretrained(tmp_path / 'again')
        assert {*names} <= expected.keys()
        assert_states(load_file(tmp_path / 'again' / 'model.safetensors'), expected)
        assert {name for name, _ in gpipe.named_tensors()} == expected.keys()
    del expected[names[3]]
    with torch.device('meta'):
        layers = to_sequential(transformers.Qwen3MoeForCausalLM(mixture), IDS)
    with pytest.raises(ValueError, match="gate_up_proj' cannot be made from 23 tensors|other siz"):
        GPipe(layers, [len(layers)], devices=['cpu'], weights=expected)


def on_other_mesh(folder):
    """Load a folder of another architecture on two ranks."""
    with torch.device('meta'):
        layers = to_sequential(transformers.LlamaForCausalLM(config(hidden_size=64)), IDS)
    n = len(layers)
    DistributedGPipe(layers, [n - 1, 1], mesh=init_mesh(pipe=2), weights=folder)


def test_another_architecture_is_one_error_on_all_ranks(tmp_path):
    llama().save_pretrained(tmp_path)
    for outcome in outcomes(2, on_other_mesh, tmp_path, timeout=60):
        assert 'ValueError: the weights are of a module of other sizes' in outcome.text


# Adapters.


def lora(**values):
    peft = pytest.importorskip('peft')
    settings = {'r': 4, 'target_modules': ['q_proj', 'o_proj', 'down_proj'], **values}
    return peft.LoraConfig(task_type='CAUSAL_LM', **settings)


def adapted_layers(settings, **values):
    """Return the layers of a model with adapters, on the meta device."""
    from peft import get_peft_model

    with torch.device('meta'), warnings.catch_warnings():
        warnings.simplefilter('ignore')  # of deprecated names between these libraries
        model = get_peft_model(transformers.LlamaForCausalLM(config(**values)), settings)
        return to_sequential(model, IDS)


def optimizer_of(model):
    trained = [x for x in model.parameters() if x.requires_grad]
    return torch.optim.AdamW(trained, lr=0.01, eps=1e-4)


def adapted(folder, target, axes, data, settings):
    """Train adapters on a mesh, and save them, and the merged model."""
    layers = adapted_layers(settings)
    n = len(layers)
    plan = {
        '*.q_proj': ColwiseParallel(),
        '*.k_proj': ColwiseParallel(),
        '*.v_proj': ColwiseParallel(),
        '*.o_proj': RowwiseParallel(),
        '*.gate_proj': ColwiseParallel(),
        '*.up_proj': ColwiseParallel(),
        '*.down_proj': RowwiseParallel(),
    }
    stages = axes.get('pipe', 1)
    model = DistributedGPipe(
        layers,
        [n] if stages == 1 else [n - 2, 2],
        mesh=init_mesh(**axes),
        chunks=2,
        weights=folder,
        data=data,
        tensor_plan=plan if 'tensor' in axes else None,
        seed=3,
    )
    model.save_adapter(target / 'before')
    steps(model, optimizer_of(model))
    model.save_adapter(target / 'adapter')
    model.save_pretrained(target / 'merged')


ADAPTED = {
    'one process': ({}, 'replicate'),
    'pipe': ({'pipe': 2}, 'replicate'),
    'data and pipe': ({'data': 2, 'pipe': 2}, 'replicate'),
    'shards': ({'data': 2}, 'shard'),
    'tensor': ({'tensor': 2, 'pipe': 2}, 'replicate'),
}


@pytest.mark.distributed
@pytest.mark.parametrize('copied', [None, ['lm_head']])
def test_adapters_on_meshes(tmp_path, copied):
    """The files are the same on all meshes, and PEFT reads them."""
    from peft import PeftModel

    base = llama()
    base.save_pretrained(tmp_path / 'base')
    settings = lora(modules_to_save=copied)
    results = {}
    for name, (axes, data) in ADAPTED.items():
        ranks = 1
        for size in axes.values():
            ranks *= size
        run(ranks, adapted, tmp_path / 'base', tmp_path / name, axes, data, settings)
        results[name] = load_file(tmp_path / name / 'adapter' / 'adapter_model.safetensors')
        before = load_file(tmp_path / name / 'before' / 'adapter_model.safetensors')
        if name == 'one process':
            first = before
        assert_states(before, first)
        assert_states(results[name], results['one process'], 1e-6)
        files = sorted(path.name for path in (tmp_path / name / 'adapter').iterdir())
        assert files == ['adapter_config.json', 'adapter_model.safetensors']

        model = PeftModel.from_pretrained(llama(), tmp_path / name / 'adapter')
        merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / name / 'merged')
        torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
        assert (merged(IDS).logits - base(IDS).logits).abs().max() > 0.01

    # The oracle: PEFT by itself, from the same initial values.
    expected = PeftModel.from_pretrained(llama(), tmp_path / 'pipe' / 'before', is_trainable=True)
    steps(expected, optimizer_of(expected))
    expected.save_pretrained(tmp_path / 'expected')
    state = load_file(tmp_path / 'expected' / 'adapter_model.safetensors')
    assert_states(results['one process'], state, 1e-6)


def test_initial_values_of_adapters(tmp_path):
    """A is drawn as by PEFT, and B is zero, so that the model is unchanged."""
    base = llama()
    base.save_pretrained(tmp_path)
    for init, spread in ((True, 1 / (3 * 32) ** 0.5), ('gaussian', 1 / 4)):
        layers = adapted_layers(lora(init_lora_weights=init))
        gpipe = GPipe(layers, [len(layers)], devices=['cpu'], weights=tmp_path)
        state = original_names(gpipe.state_dict())
        firsts = torch.cat([x.flatten() for name, x in state.items() if 'q_proj.lora_A' in name])
        assert abs(firsts.std() / spread - 1) < 0.2
        assert not any(x.any() for name, x in state.items() if 'lora_B' in name)
        assert torch.equal(gpipe(IDS)['logits'], base(IDS).logits)
        trained = {name for name, x in gpipe.named_parameters() if x.requires_grad}
        assert len(trained) == 12 and all('lora_' in name for name in trained)


def test_adapters_that_need_values_are_refused(tmp_path):
    llama().save_pretrained(tmp_path)
    layers = adapted_layers(lora(use_dora=True))
    with pytest.raises(ValueError, match='lora_magnitude_vector'):
        GPipe(layers, [len(layers)], devices=['cpu'], weights=tmp_path)


def test_a_model_without_adapters_does_not_save_them(tmp_path):
    layers = to_sequential(llama(), IDS)
    with pytest.raises(
        ValueError, match=r'the model has no adapters of get_peft_model\(model, LoraConfig'
    ):
        GPipe(layers, [len(layers)], devices=['cpu']).save_adapter(tmp_path / 'adapter')
    assert not [*tmp_path.iterdir()]


def test_adapters_of_a_model_with_values(tmp_path):
    from peft import PeftModel, get_peft_model

    model = get_peft_model(llama(), lora())
    layers = to_sequential(model, IDS)
    gpipe = GPipe(layers, [len(layers)], devices=['cpu'])
    steps(gpipe, optimizer_of(gpipe))
    gpipe.save_adapter(tmp_path / 'a')
    model.save_pretrained(tmp_path / 'b')
    states = [load_file(tmp_path / name / 'adapter_model.safetensors') for name in 'ab']
    assert_states(*states)
    again = PeftModel.from_pretrained(llama(), tmp_path / 'a')
    torch.testing.assert_close(again(IDS).logits, gpipe(IDS)['logits'])


def sequence_parallel(folder):
    from torch.distributed.tensor import Shard

    DistributedGPipe(
        adapted_layers(lora()),
        [4],
        mesh=init_mesh(tensor=2),
        weights=folder,
        tensor_plan={'*.q_proj': ColwiseParallel(input_layouts=Shard(1))},
    )


def test_adapters_on_parts_of_a_sequence_are_refused(tmp_path):
    llama().save_pretrained(tmp_path)
    for outcome in outcomes(2, sequence_parallel, tmp_path, timeout=60):
        assert 'with an adapter by ColwiseParallel, but LoRA on linear layers' in outcome.text


@pytest.mark.parametrize(
    'options',
    [
        {'modules_to_save': ['embed_tokens']},
        {'modules_to_save': ['norm', 'input_layernorm']},
        {'bias': 'all'},
        {'bias': 'lora_only'},
        {'task_type': None},
    ],
    ids=str,
)
def test_files_of_adapters_are_as_peft_writes_them(tmp_path, options):
    """Also trained tensors of the base model, and a copy in another layer than its module."""
    from peft import LoraConfig, PeftModel, get_peft_model

    values = {'r': 4, 'target_modules': ['q_proj'], 'task_type': 'CAUSAL_LM', **options}
    base = transformers.LlamaForCausalLM(config(attention_bias=True))
    expected = copy.deepcopy(base)
    model = get_peft_model(base, LoraConfig(**values))
    layers = to_sequential(model, IDS)
    gpipe = GPipe(layers, [len(layers) - 1, 1], devices=['cpu:0', 'cpu:1'])
    steps(gpipe, optimizer_of(gpipe))
    gpipe.save_adapter(tmp_path / 'a')
    model.save_pretrained(tmp_path / 'b')
    states = [load_file(tmp_path / name / 'adapter_model.safetensors') for name in 'ab']
    assert_states(*states)
    configs = [(tmp_path / name / 'adapter_config.json').read_text() for name in 'ab']
    assert json.loads(configs[0]) == json.loads(configs[1])
    gpipe.save_pretrained(tmp_path / 'merged')
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / 'merged')
    adapted_model = PeftModel.from_pretrained(expected, tmp_path / 'b')
    oracle = dict(adapted_model.merge_and_unload().state_dict())
    assert_states(dict(merged.state_dict()), oracle, 1e-6)


def test_a_folder_has_merged_weights_or_an_adapter(tmp_path):
    """Transformers would add an adapter that is in the folder to the merged weights."""
    layers = adapted_layers(lora())
    llama().save_pretrained(tmp_path / 'base')
    gpipe = GPipe(layers, [len(layers)], devices=['cpu'], weights=tmp_path / 'base')
    gpipe.save_adapter(tmp_path / 'both')
    gpipe.save_pretrained(tmp_path / 'both')
    assert not [*(tmp_path / 'both').glob('adapter*')]
    with pytest.raises(FileExistsError, match='save the adapter to a folder of its own'):
        gpipe.save_adapter(tmp_path / 'both')


def test_an_adapter_that_is_not_active_stays_out(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), lora())
    model.add_adapter('other', LoraConfig(r=2, target_modules=['k_proj', 'q_proj']))
    layers = to_sequential(model, IDS)
    gpipe = GPipe(layers, [len(layers)], devices=['cpu'])
    gpipe.save_pretrained(tmp_path)
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert_states(dict(merged.state_dict()), dict(llama().state_dict()))


def test_tensors_that_a_file_leaves_out_because_the_model_makes_them(tmp_path):
    sizes = {
        'vocab_size': 50,
        'd_model': 32,
        'encoder_layers': 1,
        'decoder_layers': 1,
        'encoder_attention_heads': 4,
        'decoder_attention_heads': 4,
        'encoder_ffn_dim': 48,
        'decoder_ffn_dim': 48,
        'max_position_embeddings': 32,
        'pad_token_id': 0,
        'decoder_start_token_id': 0,
        'use_cache': False,
    }
    settings = transformers.MarianConfig(**sizes)
    torch.manual_seed(0)
    transformers.MarianMTModel(settings).save_pretrained(tmp_path)
    model = transformers.MarianMTModel.from_pretrained(tmp_path)
    sample = Arguments(input_ids=IDS, decoder_input_ids=IDS)
    with torch.device('meta'):
        layers = to_sequential(transformers.MarianMTModel(settings), sample)
    gpipe = GPipe(layers, [len(layers)], devices=['cpu'], weights=tmp_path)
    assert_states(original_names(gpipe.state_dict()), dict(model.state_dict()))
    gpipe.save_pretrained(tmp_path / 'again')
    expected = load_file(tmp_path / 'model.safetensors')
    assert_states(load_file(tmp_path / 'again' / 'model.safetensors'), expected)


def test_an_adapter_is_trained_on(tmp_path):
    """Its file follows the folder of the model; a part of an adapter is refused."""
    folders = tmp_path / 'base', tmp_path / 'adapter'
    llama().save_pretrained(folders[0])
    layers = adapted_layers(lora())
    first = GPipe(layers, [len(layers)], devices=['cpu'], weights=folders[0])
    steps(first, optimizer_of(first))
    first.save_adapter(folders[1])
    weights = ChainMap(*[open_weights(folder) for folder in reversed(folders)])
    layers = adapted_layers(lora())
    second = GPipe(layers, [len(layers)], devices=['cpu'], weights=weights)
    assert_states(second.state_dict(), first.state_dict())
    part = dict(open_weights(folders[1]))
    del part[min(part)]
    weights = ChainMap(part, open_weights(folders[0]))
    with pytest.raises(ValueError, match=r"missing \['1.base_model.*lora_A.default.weight'\]"):
        GPipe(adapted_layers(lora()), [len(layers)], devices=['cpu'], weights=weights)


def test_how_a_model_generates(tmp_path):
    model = llama()
    model.generation_config.eos_token_id = [7, 8]
    model.save_pretrained(tmp_path / 'a')
    with torch.device('meta'):
        layers = to_sequential(transformers.LlamaForCausalLM(config()), IDS)
    gpipe = GPipe(layers, [len(layers)], devices=['cpu'], weights=tmp_path / 'a')
    gpipe.save_pretrained(tmp_path / 'b')
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / 'b')
    assert again.generation_config.eos_token_id == [7, 8]


def test_adapters_that_cannot_be_merged_here(tmp_path):
    from peft import OFTConfig, get_peft_model

    settings = OFTConfig(target_modules=['q_proj'], r=0, oft_block_size=4)
    layers = to_sequential(get_peft_model(llama(), settings), IDS)
    gpipe = GPipe(layers, [len(layers)], devices=['cpu'])
    with pytest.raises(ValueError, match='cannot be merged, because .* is in no state dict'):
        gpipe.save_pretrained(tmp_path / 'merged')
