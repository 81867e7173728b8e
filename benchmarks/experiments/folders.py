"""Models of Transformers from a folder onto a mesh, trained, and into a folder again."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.experiments.zoo.libraries import sample_of
from benchmarks.harness.page import Section
from benchmarks.harness.report import Rows, output_option, write_json
from torchgpipe import Arguments
from torchgpipe.base.errors import table
from torchgpipe.base.structure import call
from torchgpipe.trainer.files import output_folder
from torchgpipe.trainer.processes import Processes

#: Of all architectures, by their names for it.
_SIZES = {
    'vocab_size': 100,
    'hidden_size': 32,
    'intermediate_size': 48,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'max_position_embeddings': 64,
    'pad_token_id': 0,
    'bos_token_id': 1,
    'eos_token_id': 2,
}
_GROUPS = {**_SIZES, 'num_key_value_heads': 2}
_HEADS = {**_GROUPS, 'head_dim': 8}

#: By class of the model, the class of its configuration, and its values.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    'GPT2LMHeadModel': (
        'GPT2Config',
        {
            'vocab_size': 100,
            'n_positions': 64,
            'n_embd': 32,
            'n_layer': 2,
            'n_head': 4,
            'bos_token_id': 1,
            'eos_token_id': 2,
        },
    ),
    'LlamaForCausalLM': ('LlamaConfig', _GROUPS),
    'Qwen3ForCausalLM': ('Qwen3Config', _HEADS),
    'Qwen3MoeForCausalLM': (
        'Qwen3MoeConfig',
        {
            **_HEADS,
            'num_experts': 12,
            'num_experts_per_tok': 2,
            'moe_intermediate_size': 16,
            # Without the devices of experts in its program, it converts on the meta device.
            'experts_implementation': 'batched_mm',
        },
    ),
    'Gemma3ForCausalLM': (
        'Gemma3TextConfig',
        {**_HEADS, 'layer_types': ['sliding_attention', 'full_attention'], 'sliding_window': 8},
    ),
    'Phi3ForCausalLM': ('Phi3Config', _GROUPS),
    'Olmo2ForCausalLM': ('Olmo2Config', _GROUPS),
    'GPTNeoXForCausalLM': ('GPTNeoXConfig', _SIZES),
    'BertForMaskedLM': ('BertConfig', _SIZES),
    'T5ForConditionalGeneration': (
        'T5Config',
        {
            'vocab_size': 100,
            'd_model': 32,
            'd_kv': 8,
            'd_ff': 48,
            'num_layers': 2,
            'num_heads': 4,
            'decoder_start_token_id': 0,
        },
    ),
    'WhisperForConditionalGeneration': (
        'WhisperConfig',
        {
            'vocab_size': 100,
            'd_model': 32,
            'encoder_layers': 2,
            'decoder_layers': 2,
            'encoder_attention_heads': 4,
            'decoder_attention_heads': 4,
            'encoder_ffn_dim': 48,
            'decoder_ffn_dim': 48,
            'num_mel_bins': 8,
            'max_source_positions': 16,
            'max_target_positions': 32,
            'pad_token_id': 0,
            'bos_token_id': 1,
            'eos_token_id': 2,
            'decoder_start_token_id': 3,
        },
    ),
    'ViTForImageClassification': (
        'ViTConfig',
        {
            'hidden_size': 32,
            'intermediate_size': 48,
            'num_hidden_layers': 2,
            'num_attention_heads': 4,
            'image_size': 16,
            'patch_size': 4,
            'num_labels': 5,
        },
    ),
}

#: Sizes of the axes data, pipe and tensor.
MESHES = ((1, 2, 1), (2, 2, 1))
#: Samples of a mini-batch, on all replicas together.
SAMPLES = 8
STEPS = 3

MEANING = (
    'Each model has a small random configuration of two blocks, in float32. `weights=folder` '
    'spreads the files of `save_pretrained` over a mesh of data × pipe × tensor. After three '
    "steps of AdamW, the mesh's `save_pretrained` writes a folder, which `from_pretrained` reads. "
    'The columns are the largest difference of a parameter from the model that was trained '
    'without a mesh; without a step, parameters are equal to the bit.'
)


def model_of(name: str) -> Any:
    """Return a small model by the name of its class; ``None`` if Transformers does not have it."""
    import transformers

    kind, values = CONFIGS[name]
    if not hasattr(transformers, name):
        return None
    values = dict(values)
    experts = values.pop('experts_implementation', None)
    config = getattr(transformers, kind)(**values)
    config.use_cache = False
    for key, value in vars(config).items():
        if isinstance(value, float) and 'drop' in key:
            setattr(config, key, 0.0)
    if experts is not None:
        config._experts_implementation = experts
    return getattr(transformers, name)(config)


def batches(model: Any) -> list[tuple[Arguments, Tensor]]:
    """Return the samples and targets of all steps."""
    torch.manual_seed(1)
    results = []
    for _ in range(STEPS):
        sample = sample_of(model, SAMPLES)
        with torch.no_grad():
            shape = call(model, sample).logits.shape
        results.append((sample, torch.randn(shape)))
    return results


def loss_of(output: Any, target: Tensor) -> Tensor:
    """Return a mean over samples."""
    return F.mse_loss(output['logits'], target)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of which rounding errors of gradients near zero make no steps."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)


class Rank:
    """A rank of a mesh, as a worker of a process."""

    def __init__(self) -> None:
        warnings.simplefilter('ignore')

    def train(self, name: str, source: str, folder: str, mesh: tuple[int, ...], path: str) -> None:
        """Train a model on a mesh, from a folder into a folder: first without a step."""
        from torchgpipe.distributed import DistributedGPipe, init_mesh
        from torchgpipe.sequential import to_sequential

        steps = torch.load(path, weights_only=False)
        with torch.device('meta'):
            model = model_of(name)
            layers = to_sequential(model, sample_of(model, SAMPLES))
        n = len(layers)
        data, pipe, tensor = mesh
        axes = init_mesh(data=data, pipe=pipe, tensor=tensor, device_type='cpu')
        pipeline = DistributedGPipe(
            layers, [n - n // 2, n // 2], mesh=axes, chunks=2, weights=source
        )
        pipeline.save_pretrained(f'{folder}/before')
        optimizer = optimizer_of(pipeline)
        replica = axes.get_local_rank('data')
        rows = slice(replica * SAMPLES // data, (replica + 1) * SAMPLES // data)
        for sample, target in steps:
            part = Arguments(**{key: x[rows] for key, x in sample.kwargs.items()})
            pipeline.step(part, target[rows], loss_of)
            optimizer.step()
            optimizer.zero_grad()
        pipeline.save_pretrained(f'{folder}/after', max_shard_size='20kB')


def row_of(name: str) -> dict[str, Any]:
    """Return the differences of a model on all meshes."""
    torch.manual_seed(0)
    model = model_of(name)
    if model is None:
        return {'reason': 'not in this version of Transformers'}
    row: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        source = f'{folder}/source'
        model.save_pretrained(source)
        steps = batches(model)
        torch.save(steps, f'{folder}/steps.pt')
        before = _copied(model)
        optimizer = optimizer_of(model)
        for sample, target in steps:
            loss_of(call(model, sample), target).backward()
            optimizer.step()
            optimizer.zero_grad()
        for mesh in MESHES:
            target_folder = Path(folder, 'x'.join(map(str, mesh)))
            target_folder.mkdir()
            number = mesh[0] * mesh[1] * mesh[2]
            with Processes(number, Rank) as ranks:
                ranks.call('train', name, source, str(target_folder), mesh, f'{folder}/steps.pt')
            unchanged = _loaded(model, target_folder / 'before')
            row[f'{mesh}, equal'] = all(
                torch.equal(x, unchanged[key]) for key, x in before.items()
            )
            trained = _loaded(model, target_folder / 'after')
            row[f'{mesh}'] = max(
                float((x - trained[key]).abs().max()) for key, x in _copied(model).items()
            )
    return row


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def _loaded(model: Any, folder: Path) -> dict[str, Tensor]:
    """Return the state of the model in a folder, after checks that it is complete."""
    loaded, report = type(model).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report['missing_keys'] and not report['unexpected_keys'], report
    return dict(loaded.state_dict())


@click.command()
@click.option(
    '--model',
    'models',
    type=click.Choice([*CONFIGS]),
    multiple=True,
    default=[*CONFIGS],
    help='Some of these only, by name.',
)
@output_option
def folders(models: tuple[str, ...], output: str) -> None:
    """Train models of Transformers from a folder on a mesh, and save them for from_pretrained."""
    try:
        import transformers
    except ImportError as error:
        raise click.ClickException(f'it takes the package transformers: {error}') from None

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    results: dict[str, Any] = {'transformers': transformers.__version__, 'rows': {}}
    for name in models:
        results['rows'][name] = row_of(name)
        click.echo(f'{name}: {results["rows"][name]}')
        write_json(output_folder(output), 'folders', results)
    for part in _parts(results):
        click.echo((part if isinstance(part, str) else table(*part)) + '\n')


def _parts(results: dict[str, Any]) -> list[str | Rows]:
    rows = []
    for name, row in results['rows'].items():
        cells = [name]
        for mesh in MESHES:
            if 'reason' in row:
                cells.append(row['reason'])
                continue
            equal = 'equal' if row[f'{mesh}, equal'] else 'not equal'
            cells.append(f'{equal}; {row[str(mesh)]:.0e}')
        rows.append(cells)
    heads = ['model', *[f'{"×".join(map(str, mesh))}: before; after' for mesh in MESHES]]
    return [MEANING, f'transformers {results["transformers"]}:', (heads, rows)]


COMMANDS = [folders]
SECTIONS = [Section('Models from a folder onto a mesh', 'folders', _parts)]
