"""The options of ``train-gpt``, and whether they fit each other."""

import os
import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from torchgpipe.base.devices import accelerators
from torchgpipe.plan import MACHINES
from torchgpipe.schedule import NAMES
from torchgpipe.schedule.generators import stages_per_device
from torchgpipe.trainer.blocks import balance_of
from torchgpipe.trainer.files import output_folder
from torchgpipe.trainer.gpt import GPT2, MINGPT, Sizes
from torchgpipe.trainer.log import check_log, sample_logs
from torchgpipe.trainer.tokens import digest_of, read
from torchgpipe.trainer.training_folder import TrainingFolder, new_name

#: The default text is the repository's license: English, 11 thousand bytes.
LICENSE = Path(__file__).parents[2] / 'LICENSE'
MODELS = {**GPT2, **MINGPT}
#: The dtype of parameters.
DTYPES = {'float64': torch.float64, 'float32': torch.float32, 'bfloat16': torch.float32}

FILE, FOLDER = click.Path(exists=True, dir_okay=False), click.Path(exists=True, file_okay=False)
COUNT, NUMBER = click.IntRange(1), click.FloatRange(0)


class Bytes(click.ParamType):
    """A number of bytes, such as 80GiB."""

    name = 'size'

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return the number."""
        found = re.fullmatch(r'(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B', str(value))
        if found is None or not float(found[1]):
            self.fail(f'{value!r} is no size above zero, such as 80GiB or 24GB', param, ctx)
        unit = (1024 if found[3] else 1000) ** ' KMGT'.index(found[2] or ' ')
        return int(float(found[1]) * unit)


#: Names, type (or a list of choices), default and help of each option.
OPTIONS: list[tuple[str, Any, Any, str]] = [
    ('--model', [*MODELS], None, 'A published model; the next five options change it.'),
    ('--n-layer', COUNT, None, 'Blocks.  [default: 4]'),
    ('--n-head', COUNT, None, 'Heads.  [default: 4]'),
    ('--n-embd', COUNT, None, 'Features of a token.  [default: 128]'),
    ('--block-size', COUNT, None, "Tokens of a sample.  [default: the model's context, or 64]"),
    ('--vocab-size', COUNT, None, 'Different tokens.  [default: 256 with text, else 50304]'),
    ('--experts', click.IntRange(0), 0, 'Experts in place of the network of each block.'),
    ('--data --dp', COUNT, 1, 'Replicas.'),
    ('--pipe --pp', COUNT, 1, 'Ranks that share the layers of a replica.'),
    ('--tensor --tp', COUNT, 1, 'Ranks that share each layer.'),
    (
        '--chunked-loss',
        COUNT,
        None,
        'Compute scores for so many tokens at a time, within the loss.',
    ),
    ('--sequence-parallel', bool, False, 'Divide norms by tokens over the ranks of --tensor.'),
    ('--schedule', [*NAMES], '1f1b', 'The order of a step.'),
    ('--virtual', COUNT, 2, 'Stages on each rank, for schedules that take several.'),
    (
        '--checkpoint',
        ['never', 'except_last', 'selective', 'always'],
        'never',
        'Micro-batches to recompute; by selective, without products.',
    ),
    ('--plan', ['auto'], None, 'Choose schedule, micro-batches, checkpoints and balance by it.'),
    ('--devices', COUNT, None, 'With --plan auto, also choose the mesh of as many devices.'),
    ('--machine', [*MACHINES], None, 'The machine of this plan.  [default: this one, measured]'),
    ('--shard', bool, False, 'Shard parameters over replicas (FSDP2).'),
    ('--cpu', bool, False, 'Train on the CPU, also where there are accelerators.'),
    ('--offload', bool, False, 'Shard, and keep parameters, gradients and optimizer on the host.'),
    (
        '--micro-batch-size',
        COUNT,
        None,
        'Samples of a micro-batch.  [default: for 4 micro-batches '
        'for each rank of the pipe, 8 with experts, else 1]',
    ),
    ('--global-batch-size', COUNT, 32, 'Samples of a step, on all replicas.'),
    ('--steps', COUNT, 300, 'Steps in all.'),
    ('--lr', NUMBER, 1e-3, 'The largest learning rate.'),
    ('--min-lr', NUMBER, 1e-4, 'The learning rate of the last step.'),
    ('--warmup-steps', click.IntRange(0), 20, 'Steps in which the learning rate grows.'),
    ('--weight-decay', NUMBER, 0.1, 'Of matrices, by AdamW.'),
    ('--grad-clip', NUMBER, 1.0, 'The largest norm of gradients; 0 for any.'),
    ('--dtype', [*DTYPES], 'float32', 'bfloat16: autocast, with parameters in float32.'),
    ('--compile', bool, False, 'Compile each block (torch.compile).'),
    ('--seed', click.IntRange(0, 2**31 - 1), 0, 'For initial values and samples.'),
    ('--deterministic', bool, False, 'Deterministic algorithms only.'),
    ('--text', FILE, None, 'A file, each byte of which is a token.  [default: the license]'),
    ('--tokens', FOLDER, None, 'A folder with train.bin and val.bin of uint16, as of nanoGPT.'),
    ('--mock-data', bool, False, 'Random tokens.'),
    ('--save', str, None, 'A folder for checkpoints.'),
    ('--save-interval', COUNT, 100, 'Steps between checkpoints.'),
    ('--async-save', bool, False, 'Write checkpoints while training goes on.'),
    ('--keep-last', COUNT, 2, 'Checkpoints to keep.'),
    ('--resume', bool, False, 'Continue from the newest checkpoint, if there is one.'),
    ('--restarts', click.IntRange(0), 0, 'How often to start all ranks again when one fails.'),
    ('--log --log-file', str, None, 'A file of JSON lines. torchrun takes the first name itself.'),
    ('--log-interval', COUNT, 1, 'Steps between lines.'),
    ('--log-samples', bool, False, "Log the samples of each replica, to the log's name + '.0', …"),
    ('--eval-interval', COUNT, 100, 'Steps between validations.'),
    ('--eval-batches', click.IntRange(0), 16, 'Batches of a validation; 0 for all.'),
    ('--generate', click.IntRange(0), 200, 'Tokens to generate in the end.'),
    ('--peak-tflops', NUMBER, None, "A device's peak, for MFU.  [default: by its name]"),
    ('--dry-run', bool, False, 'Print the needs of each rank, and end.'),
    ('--devices-per-host', COUNT, 8, 'Devices of a host, to tell links apart in a dry run.'),
    ('--memory', Bytes(), None, 'Memory of a device, such as 80GiB, for a dry run.'),
    ('--output', str, 'results', 'A folder for the pictures.'),
]


def add_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with all options."""
    for names, kind, default, text in reversed(OPTIONS):
        command = click.option(
            *names.split(),
            type=click.Choice(kind) if isinstance(kind, list) else kind,
            default=default,
            is_flag=kind is bool,
            help=text,
        )(command)
    return command


def require(condition: object, text: str) -> None:
    """Raise a :exc:`click.UsageError` unless a condition holds."""
    if not condition:
        raise click.UsageError(text)


def checked(config: Namespace) -> Namespace:
    """Return the options with all defaults: sizes of the model, micro-batches, processes.

    Raises:
        click.UsageError: Some do not fit the others, or the machine.
    """
    data, pipe, tensor = config.data, config.pipe, config.tensor
    require(
        bool(config.text) + bool(config.tokens) + config.mock_data <= 1,
        '--text, --tokens and --mock-data exclude each other',
    )
    config.text = config.text or (None if config.tokens or config.mock_data else str(LICENSE))
    known = MODELS.get(config.model, Sizes(0, config.block_size or 64, 128, 4, 4))
    config.block_size = block = config.block_size or known.context
    require(
        block <= known.context,
        f'--block-size {block} is more than the {known.context} of --model {config.model}',
    )
    config.vocab_size = config.vocab_size or (256 if config.text else 50304)
    config.sizes = sizes = Sizes(
        config.vocab_size,
        known.context,
        config.n_embd or known.width,
        config.n_head or known.heads,
        config.n_layer or known.depth,
        known.tied,
    )
    require(
        sizes.width % sizes.heads == 0,
        f'--n-embd {sizes.width} is not a multiple of --n-head {sizes.heads}',
    )
    require(
        sizes.heads % tensor == 0, f'--n-head {sizes.heads} is not a multiple of --tensor {tensor}'
    )
    require(
        sizes.vocabulary >= tensor,
        f'--vocab-size {sizes.vocabulary} is less than --tensor {tensor}, so a rank has no words',
    )
    if config.sequence_parallel:
        require(
            tensor > 1 and not config.experts,
            '--sequence-parallel divides tokens over ranks: with --tensor 2 or more, and without '
            '--experts',
        )
        require(
            block % tensor == 0,
            f'--block-size {block} is not a multiple of --tensor {tensor}, so ranks cannot divide '
            'a sequence equally: --sequence-parallel',
        )
    least, most = stages_per_device(config.schedule)
    config.virtual = min(max(config.virtual, least), most)
    require(pipe > 1 or most == 1, f'--schedule {config.schedule} takes --pipe 2 or more')
    require(
        pipe * config.virtual <= sizes.depth + 2,
        f'--n-layer {sizes.depth}, the embedding and the head are fewer layers than the '
        f'{pipe * config.virtual} stages of --pipe {pipe} --schedule {config.schedule}',
    )
    require(
        not config.offload or pipe == 1 and not config.plan,
        '--offload runs one layer after the other: with --pipe 1, and without --plan',
    )
    require(
        config.plan or not (config.devices or config.machine),
        '--devices and --machine are for --plan auto',
    )
    require(
        config.devices or not config.machine,
        '--machine is for --devices, the number of them for which to plan a mesh',
    )
    config.virtual = sizes.depth + 2 if config.offload else config.virtual
    if not getattr(config, 'balance', None):  # a plan for a mesh has chosen one
        config.balance = balance_of(sizes, config.experts, block, pipe * config.virtual)
    share = config.global_batch_size // data
    # Auxiliary losses of experts are of a micro-batch, so its size is the same on all meshes.
    chunks = 8 if config.experts else 4 * pipe if pipe > 1 else 1
    config.micro_batch_size = config.micro_batch_size or max(1, share // chunks)
    config.chunks = share // config.micro_batch_size
    require(
        config.chunks * config.micro_batch_size * data == config.global_batch_size > 0,
        f'--global-batch-size {config.global_batch_size} is not a multiple of --data {data} × '
        f'--micro-batch-size {config.micro_batch_size}',
    )
    config.world, launched = data * pipe * tensor, 'RANK' in os.environ
    require(
        not launched or os.environ.get('WORLD_SIZE', '').isdigit(),
        'RANK is set, but WORLD_SIZE is no number: start with torchrun, or unset RANK',
    )
    config.accelerated = bool(accelerators()) and not config.cpu
    require(
        not (config.dry_run and config.plan),
        '--plan measures layers on a device, which a --dry-run does not have',
    )
    if config.dry_run:
        return config
    there = (
        int(os.environ['WORLD_SIZE'])
        if launched
        else (len(accelerators()) if config.accelerated else config.world)
    )
    require(
        config.world == there or config.world < there and not launched,
        f'--data {data} × --pipe {pipe} × --tensor {tensor} take {config.world} processes, '
        f'but there are {there} ' + ('of torchrun' if launched else 'devices: add --cpu'),
    )
    require(
        config.save or not (config.resume or config.restarts),
        '--resume and --restarts take checkpoints: --save FOLDER',
    )
    require(
        not (launched and config.restarts),
        'torchrun has started these processes, so that '
        '--restarts cannot: run torchrun again, with --resume',
    )
    require(config.log or not config.log_samples, '--log-samples takes --log FILE')
    return config


def check_files(config: Namespace) -> None:
    """Check the data, the folder of checkpoints and the logs, and name the training."""
    output_folder(config.output)
    block = config.block_size
    try:
        train, val = read(config)
    except (OSError, RuntimeError, ValueError) as error:
        raise click.UsageError(f'cannot read the data: {error}') from None
    require(
        len(train) >= 2 * block and len(val) > block,
        f'there are {len(train)} tokens to train and {len(val)} to validate with, but '
        f'--block-size {block} takes {2 * block} and {block + 1}',
    )
    config.training = {
        **config.sizes._asdict(),
        'experts': config.experts,
        'block_size': block,
        'seed': config.seed,
        'global_batch_size': config.global_batch_size,
        'tokens': len(train),
        'weight_decay': config.weight_decay,
        'dtype': config.dtype,
        'digest': digest_of(train, val),
    }
    last = 0
    name = new_name()
    if config.save:
        folder = TrainingFolder(config.save)
        name = folder.check(config.training, config.resume, config.steps)
        last = max(folder.steps(), default=0)
    config.training['name'] = name
    if config.log and os.environ.get('RANK', '0') == '0':
        for path in (config.log, *(sample_logs(config.log) if config.log_samples else ())):
            check_log(path, name, last, regular=config.log_samples)
