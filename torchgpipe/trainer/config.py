"""The options of ``train-gpt``: a field of :class:`Config` is an option of the command.

An option needs a row in ``docs/guide/train-gpt.md`` as well. If a training cannot continue with
another value of it, it belongs to the description in ``command.py``.
"""

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any

import click
import torch

from torchgpipe.base.devices import CPU, accelerators, current_device
from torchgpipe.plan import MACHINES
from torchgpipe.schedule import NAMES
from torchgpipe.schedule.generators import stages_per_device
from torchgpipe.trainer.blocks import balance_of
from torchgpipe.trainer.gpt import GPT2, MINGPT, Sizes
from torchgpipe.trainer.tokenizer import BYTES, load_tokenizer

MODELS = {**GPT2, **MINGPT}

#: The dtype of parameters, by `--dtype`.
PARAMETER_DTYPES = {'float64': torch.float64, 'float32': torch.float32, 'bfloat16': torch.float32}


class Size(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4
    """A number of bytes, such as 80GiB."""

    name = 'size'

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Return the number."""
        match = re.fullmatch(r'(\d+(?:\.\d+)?) ?([KMGT]?)(i?)B', str(value))
        if match is None or not float(match[1]):
            self.fail(f'{value!r} is no size above zero, such as 80GiB or 24GB', param, ctx)
        unit = (1024 if match[3] else 1000) ** ' KMGT'.index(match[2] or ' ')
        return int(float(match[1]) * unit)


FILE = click.Path(exists=True, dir_okay=False)
FOLDER = click.Path(exists=True, file_okay=False)
COUNT = click.IntRange(1)
COUNT_OR_ZERO = click.IntRange(0)
NUMBER = click.FloatRange(0)


def option(default: Any, kind: Any, help: str, names: str = '') -> Any:
    """Return a field that is an option.

    Args:
        default: The value without the option; 0, '' or None for one that :func:`complete` sets.
        kind: The type for click: a list of choices, or ``bool`` for a flag.
        help: The help text.
        names: Further names, such as ``--dp``.
    """
    return field(default=default, metadata={'kind': kind, 'help': help, 'names': names})


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of a training.

    :func:`complete` checks them, and sets sizes that are left out.
    """

    # The model.
    model: str = option('', [*MODELS], 'A published model; the next five options change it.')
    n_layer: int = option(0, COUNT, 'Blocks.  [default: 4]')
    n_head: int = option(0, COUNT, 'Heads.  [default: 4]')
    n_embd: int = option(0, COUNT, 'Features of a token.  [default: 128]')
    block_size: int = option(
        0, COUNT, "Tokens of a sample.  [default: the model's context, or 64]"
    )
    vocab_size: int = option(
        0, COUNT, "Different tokens.  [default: 256 for bytes, the tokenizer's, or 50304]"
    )
    experts: int = option(0, COUNT_OR_ZERO, 'Experts in place of the network of each block.')

    # The mesh, and the order of a step.
    data: int = option(1, COUNT, 'Replicas.', '--dp')
    pipe: int = option(1, COUNT, 'Ranks that share the layers of a replica.', '--pp')
    tensor: int = option(1, COUNT, 'Ranks that share each layer.', '--tp')
    sequence_parallel: bool = option(
        False, bool, 'Divide norms by tokens over the ranks of --tensor.'
    )
    schedule: str = option('1f1b', [*NAMES], 'The order of a step.')
    virtual: int = option(2, COUNT, 'Stages on each rank, for schedules that take several.')
    checkpoint: str = option(
        'never',
        ['never', 'except_last', 'selective', 'always'],
        'Micro-batches whose activations are recomputed; by selective, without products.',
    )
    plan: str = option(
        '', ['auto'], 'Let a plan choose schedule, micro-batches, recomputation and balance.'
    )
    devices: int = option(0, COUNT, 'With --plan auto, also choose the mesh of as many devices.')
    machine: str = option(
        '', [*MACHINES], 'The machine of this plan.  [default: this one, measured]'
    )
    #: The number of layers of each stage.
    balance: tuple[int, ...] = ()
    #: The token that begins a generated text.
    first_token: int = 0

    # Memory and speed.
    shard: bool = option(False, bool, 'Shard parameters over replicas (FSDP2).')
    offload: bool = option(
        False, bool, 'Shard, and keep parameters, gradients and optimizer on the host.'
    )
    cpu: bool = option(False, bool, 'Train on the CPU, also where there are accelerators.')
    chunked_loss: int = option(
        0, COUNT, 'Compute scores for so many tokens at a time, within the loss.'
    )
    dtype: str = option(
        'float32', [*PARAMETER_DTYPES], 'bfloat16: autocast, with parameters in float32.'
    )
    compile: bool = option(False, bool, 'Compile each block (torch.compile).')

    # The data.
    text: str = option('', FILE, 'A file, each byte of which is a token.  [default: the license]')
    tokens: str = option(
        '', FOLDER, 'A folder with train.bin and val.bin of uint16, as of nanoGPT.'
    )
    dataset: str = option(
        '',
        str,
        'A dataset of Hugging Face, NAME or NAME:CONFIG, or a folder of text; it is streamed.',
    )
    tokenizer: str = option(
        '', str, 'Its tokenizer: a name of Hugging Face, or a folder.  [default: bytes]'
    )
    mock_data: bool = option(False, bool, 'Random tokens.')

    # The optimizer.
    global_batch_size: int = option(32, COUNT, 'Samples of a step, on all replicas.')
    micro_batch_size: int = option(
        0,
        COUNT,
        'Samples of a micro-batch.  [default: for 4 micro-batches '
        'for each rank of the pipe, 8 with experts, else 1]',
    )
    steps: int = option(300, COUNT, 'Steps in all.')
    lr: float = option(1e-3, NUMBER, 'The largest learning rate.')
    min_lr: float = option(
        None, NUMBER, 'The learning rate of the last step.  [default: a tenth of --lr]'
    )
    warmup_steps: int = option(20, COUNT_OR_ZERO, 'Steps in which the learning rate grows.')
    weight_decay: float = option(0.1, NUMBER, 'Of matrices, by AdamW.')
    grad_clip: float = option(1.0, NUMBER, 'The largest norm of gradients; 0 for any.')
    seed: int = option(0, click.IntRange(0, 2**31 - 1), 'For initial values and samples.')
    deterministic: bool = option(False, bool, 'Deterministic algorithms only.')

    # Checkpoints.
    save: str = option('', str, 'A folder for checkpoints.')
    save_interval: int = option(100, COUNT, 'Steps between checkpoints.')
    async_save: bool = option(False, bool, 'Write checkpoints while training goes on.')
    keep_last: int = option(2, COUNT, 'Checkpoints to keep.')
    resume: bool = option(False, bool, 'Continue from the newest checkpoint, if there is one.')
    restarts: int = option(0, COUNT_OR_ZERO, 'How often to start all ranks again when one fails.')

    # Logs, validation and text.
    log: str = option(
        '', str, 'A file of JSON lines. torchrun takes the first name itself.', '--log-file'
    )
    log_interval: int = option(1, COUNT, 'Steps between lines.')
    log_samples: bool = option(
        False, bool, "Log the samples of each replica, to the log's name + '.0', …"
    )
    tensorboard: str = option('', str, 'A folder for curves of TensorBoard.')
    eval_interval: int = option(100, COUNT, 'Steps between validations.')
    eval_batches: int = option(16, COUNT_OR_ZERO, 'Global batches of a validation; 0 for all.')
    generate: int = option(200, COUNT_OR_ZERO, 'Tokens to generate in the end.')
    peak_tflops: float = option(0.0, NUMBER, "A device's peak, for MFU.  [default: by its name]")
    output: str = option('results', str, 'A folder for the pictures.')

    # Before a training.
    dry_run: bool = option(False, bool, 'Print the needs of each rank, and end.')
    devices_per_host: int = option(
        8, COUNT, 'Devices of a host, to tell links apart in a dry run.'
    )
    memory: int = option(0, Size(), 'Memory of a device, such as 80GiB, for a dry run or a plan.')

    @property
    def sizes(self) -> Sizes:
        """The sizes of the model."""
        published = MODELS.get(self.model)
        return Sizes(
            vocabulary=self.vocab_size,
            context=published.context if published else self.block_size,
            width=self.n_embd,
            heads=self.n_head,
            depth=self.n_layer,
            tied=published.tied if published else True,
        )

    @property
    def chunks(self) -> int:
        """The number of micro-batches of a replica."""
        return self.global_batch_size // self.data // self.micro_batch_size

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens of a mini-batch, of all replicas."""
        return self.global_batch_size * self.block_size

    @property
    def max_norm(self) -> float:
        """The largest norm of gradients."""
        return self.grad_clip or inf

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.data * self.pipe * self.tensor

    def is_validated(self, step: int) -> bool:
        """Return whether a step, counted from 1, ends with a validation."""
        return step % self.eval_interval == 0 or step == self.steps

    def resumed(self) -> 'Config':
        """Return the options to continue from the newest checkpoint."""
        return replace(self, resume=True)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return current_device() if accelerators() and not self.cpu else CPU


def add_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command with an option for each field of :class:`Config`."""
    for item in reversed(option_fields()):
        name = '--' + item.name.replace('_', '-')
        kind = item.metadata['kind']
        help = item.metadata['help']
        if item.default:
            help += f'  [default: {item.default}]'
        command = click.option(
            name,
            *item.metadata['names'].split(),
            item.name,
            type=click.Choice(kind) if isinstance(kind, list) else kind,
            is_flag=kind is bool,
            default=False if kind is bool else None,
            help=help,
        )(command)
    return command


def option_fields() -> list[Field[Any]]:
    """Return the fields that are options."""
    return [item for item in fields(Config) if item.metadata]


def config_of(options: Mapping[str, Any]) -> Config:
    """Return the options that a command line has; the others have their defaults."""
    return Config(**{name: value for name, value in options.items() if value is not None})


def require(condition: object, text: str) -> None:
    """Raise a :exc:`click.UsageError` unless a condition holds."""
    if not condition:
        raise click.UsageError(text)


def complete(config: Config) -> Config:
    """Return the options with all defaults: sizes of the model, stages, micro-batches.

    Raises:
        click.UsageError: Some do not fit the others, or the machine.
    """
    config = _complete_data(config)
    config = _complete_sizes(config)
    config = _complete_stages(config)
    config = _complete_batch(config)
    config = _complete_rate(config)
    _check_plan(config)
    if not config.dry_run:
        _check_processes(config)
        _check_folders(config)
    return config


def _complete_data(config: Config) -> Config:
    sources = {
        '--text': config.text,
        '--tokens': config.tokens,
        '--dataset': config.dataset,
        '--mock-data': config.mock_data,
    }
    chosen = [name for name, value in sources.items() if value]
    require(len(chosen) <= 1, f'{_enumerated(sources)} exclude each other')
    require(
        config.dataset or not config.tokenizer,
        '--tokenizer is for --dataset, which may also be a folder with the text',
    )
    if not chosen:
        config = replace(config, text=default_text())
    if config.tokenizer:
        return _complete_tokenizer(config)
    if config.text or config.dataset:
        config = replace(config, vocab_size=config.vocab_size or BYTES.vocabulary)
    config = replace(config, vocab_size=config.vocab_size or 50304)
    return replace(config, first_token=BYTES.end % config.vocab_size)


def _complete_tokenizer(config: Config) -> Config:
    try:
        tokenizer = load_tokenizer(config.tokenizer)
    except ImportError:
        raise click.UsageError('--tokenizer takes a package: pip install transformers') from None
    except (OSError, ValueError) as error:
        raise click.UsageError(f'cannot load --tokenizer {config.tokenizer}: {error}') from None
    size = config.vocab_size or tokenizer.vocabulary
    require(
        size >= tokenizer.vocabulary,
        f'--vocab-size {size} is less than the {tokenizer.vocabulary} of --tokenizer',
    )
    return replace(config, vocab_size=size, first_token=tokenizer.end)


def _complete_sizes(config: Config) -> Config:
    published = MODELS.get(config.model)
    defaults = published or Sizes(0, config.block_size or 64, 128, 4, 4)
    config = replace(
        config,
        block_size=config.block_size or defaults.context,
        n_embd=config.n_embd or defaults.width,
        n_head=config.n_head or defaults.heads,
        n_layer=config.n_layer or defaults.depth,
    )
    block, tensor, sizes = config.block_size, config.tensor, config.sizes
    require(
        block <= defaults.context,
        f'--block-size {block} is more than the {defaults.context} of --model {config.model}',
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
    return config


def _complete_stages(config: Config) -> Config:
    pipe, depth = config.pipe, config.n_layer
    layers = depth + 2
    least, most = stages_per_device(config.schedule)
    require(
        pipe > 1 or most == 1 or config.offload,
        f'--schedule {config.schedule} takes --pipe 2 or more',
    )
    require(not (config.offload and config.plan), '--offload is without --plan')
    if config.offload:
        # A device has the parameters of one stage, so stages are as small as possible.
        virtual = max(1, layers // pipe)
    else:
        virtual = min(max(config.virtual, least), most)
    stages = pipe * virtual
    require(
        stages <= layers,
        f'--n-layer {depth}, the embedding and the head are fewer layers than the {stages} '
        f'stages of --pipe {pipe} --schedule {config.schedule}',
    )
    # A plan for a mesh has chosen a balance.
    balance = config.balance
    if not balance:
        balance = tuple(balance_of(config.sizes, config.experts, config.block_size, stages))
    return replace(config, virtual=virtual, balance=balance)


def _complete_batch(config: Config) -> Config:
    share = config.global_batch_size // config.data
    chunks = 4 * config.pipe if config.pipe > 1 else 1
    if config.experts:
        # Auxiliary losses of experts are of a micro-batch, so its size is the same on all meshes.
        chunks = 8
    config = replace(config, micro_batch_size=config.micro_batch_size or max(1, share // chunks))
    samples = config.chunks * config.micro_batch_size * config.data
    require(
        samples == config.global_batch_size > 0,
        f'--global-batch-size {config.global_batch_size} is not a multiple of --data '
        f'{config.data} × --micro-batch-size {config.micro_batch_size}',
    )
    return config


def _complete_rate(config: Config) -> Config:
    least = config.lr / 10 if config.min_lr is None else config.min_lr
    require(least <= config.lr, f'--min-lr {least:g} is more than --lr {config.lr:g}')
    return replace(config, min_lr=least)


def _check_plan(config: Config) -> None:
    require(
        config.plan or not (config.devices or config.machine),
        '--devices and --machine are for --plan auto',
    )
    require(
        config.devices or not config.machine,
        '--machine is for --devices, the number of them for which to plan a mesh',
    )
    require(
        not (config.dry_run and config.plan),
        '--plan measures layers on a device, which a --dry-run does not have',
    )


def _check_processes(config: Config) -> None:
    is_launched = 'RANK' in os.environ
    world_size = os.environ.get('WORLD_SIZE', '')
    require(
        not is_launched or world_size.isdigit(),
        'RANK is set, but WORLD_SIZE is no number: start with torchrun, or unset RANK',
    )
    mesh = f'--data {config.data} × --pipe {config.pipe} × --tensor {config.tensor}'
    if is_launched:
        require(
            config.world == int(world_size),
            f'{mesh} take {config.world} processes, but there are {world_size} of torchrun',
        )
    elif accelerators() and not config.cpu:
        count = len(accelerators())
        require(
            config.world <= count,
            f'{mesh} take {config.world} processes, but there are {count} devices: add --cpu',
        )
    require(
        not (is_launched and config.restarts),
        'torchrun has started these processes, so that '
        '--restarts cannot: run torchrun again, with --resume',
    )


def _check_folders(config: Config) -> None:
    require(
        config.save or not (config.resume or config.restarts),
        '--resume and --restarts take checkpoints: --save FOLDER',
    )
    require(config.log or not config.log_samples, '--log-samples takes --log FILE')
    require(
        not config.tensorboard or importlib.util.find_spec('tensorboard'),
        '--tensorboard takes a package: pip install tensorboard',
    )


def default_text() -> str:
    """Return the path of the license: English, 11 thousand bytes."""
    in_clone = Path(__file__).parents[2] / 'LICENSE'
    if in_clone.exists():
        return str(in_clone)
    for path in importlib.metadata.files('torchgpipe') or ():
        if path.name == 'LICENSE':
            return str(path.locate())
    raise click.UsageError('there is no license to train with: give a text, by --text FILE')


def _enumerated(names: Iterable[str]) -> str:
    *first, last = names
    return f'{", ".join(first)} and {last}'
