"""Models of Transformers from a folder onto a mesh, trained, and into a folder again."""

import json
import math
import tempfile
import warnings
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.experiments.zoo.libraries import sample_of
from benchmarks.harness.options import choices_option, output_option
from benchmarks.harness.report import Part, Section, write_json
from torchgpipe import Arguments
from torchgpipe.base.structure import call
from torchgpipe.trainer.files import output_folder
from torchgpipe.trainer.processes import Processes

#: By class of model, the class of its configuration, and its values. With 'batched_mm', a mixture
#: also converts on the meta device, where it cannot ask for the devices of its experts.
CONFIGS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix('.json').read_text())

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

    if not hasattr(transformers, name):
        return None
    values = dict(CONFIGS[name]['values'])
    experts = values.pop('experts_implementation', None)
    config = getattr(transformers, CONFIGS[name]['config'])(**values)
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
        train(model, steps)
        after = _copied(model)

        for mesh in MESHES:
            target = Path(folder, 'x'.join(map(str, mesh)))
            target.mkdir()
            with Processes(math.prod(mesh), Rank) as ranks:
                ranks.call('train', name, source, str(target), mesh, f'{folder}/steps.pt')
            unchanged = _loaded(model, target / 'before')
            trained = _loaded(model, target / 'after')
            row[f'{mesh}, equal'] = all(torch.equal(before[key], unchanged[key]) for key in before)
            differences = [(after[key] - trained[key]).abs().max() for key in after]
            row[str(mesh)] = torch.stack(differences).max().item()
    return row


def train(model: nn.Module, steps: list[tuple[Arguments, Tensor]]) -> None:
    """Train a model in this process."""
    optimizer = optimizer_of(model)
    for sample, target in steps:
        loss_of(call(model, sample), target).backward()
        optimizer.step()
        optimizer.zero_grad()


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
@choices_option('--model', 'models', CONFIGS)
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
    folder = output_folder(output)
    for name in models:
        results['rows'][name] = row_of(name)
        click.echo(f'{name}: {results["rows"][name]}')
        write_json(folder, 'folders', results)
    SECTION.publish(results, folder)


def _parts(results: dict[str, Any]) -> list[Part]:
    header = ['model']
    for mesh in MESHES:
        header.append(f'{"×".join(map(str, mesh))}: before; after')
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
    return [MEANING, f'transformers {results["transformers"]}:', (header, rows)]


SECTION = Section('Models from a folder onto a mesh', 'folders', _parts)
COMMANDS = [folders]
SECTIONS = [SECTION]
