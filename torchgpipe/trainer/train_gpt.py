"""Train a GPT on a mesh of data × pipe × tensor: the whole trainer, to read from top to bottom.

::

    python -m benchmarks train-gpt                                    a small model, one process
    python -m benchmarks train-gpt --data 2 --pipe 2                  four processes of its own
    torchrun --nproc-per-node 8 -m torchgpipe.trainer.train_gpt --pipe 8      processes of torchrun
    python -m benchmarks train-gpt --plan auto --devices 4            a mesh that a plan chooses
    python -m benchmarks train-gpt --pipe 64 --dry-run                the needs of 64 ranks

    options ─▶ checked ─▶ launch ─▶ train: plan, model, optimizer, newest checkpoint
                            ▲ │       each step: samples ─▶ model.step ─▶ clip ─▶ AdamW ─▶ log
                            └─┘ a rank was killed: all start again from the newest checkpoint

Initial values follow from the seed, and samples from seed and step. So losses match on all meshes,
and a training resumes on any mesh with the samples that an uninterrupted one would have next.
"""

import json
import os
import sys
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from math import cos, inf, isfinite, pi
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import torch.distributed as dist
from click.core import ParameterSource
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from benchmarks.harness.curves import Panel, draw_curves, draw_if_possible
from torchgpipe.base.devices import CPU, accelerator, current_device, is_cpu
from torchgpipe.base.errors import format_bytes, table
from torchgpipe.base.settings import Settings
from torchgpipe.distributed import DistributedGPipe, dry_run, init_mesh
from torchgpipe.distributed.agreement import NotBegun
from torchgpipe.plan import MACHINES, ParameterBytes, Plan, Transformer, plan
from torchgpipe.plan.mesh_search import USABLE
from torchgpipe.schedule.generators import places
from torchgpipe.shard.nn.functional import parallel_cross_entropy
from torchgpipe.timeline import measure
from torchgpipe.trainer.blocks import LARGE, plan_blocks, profiles_of
from torchgpipe.trainer.config import DTYPES, add_options, check_files, checked, require
from torchgpipe.trainer.files import output_folder, replacing
from torchgpipe.trainer.gpt import (
    GPT,
    Block,
    Mixture,
    Sizes,
    chunked_cross_entropy,
    init_gpt2,
    layers,
    layers_with_experts,
    tensor_plan,
)
from torchgpipe.trainer.launch import launch
from torchgpipe.trainer.log import Log, line_of, sample_logs
from torchgpipe.trainer.measuring import measure_machine, peak_tflops
from torchgpipe.trainer.tokens import read, samples_at, starts_of
from torchgpipe.trainer.training_folder import TrainingFolder

#: The exit code after a loss that is not finite: another attempt would end the same way.
NOT_FINITE = 3


@click.command('train-gpt', context_settings={'show_default': True})
@add_options
def train_gpt(**options: Any) -> None:
    """Train a GPT on a mesh of data × pipe × tensor, by the processes that this takes.

    Each step logs the loss (the exact mean over all tokens), the norm of gradients, the learning
    rate and tokens/s. It logs TFLOP/s of a device (6·N + 12·layers·width·block per token, of N
    parameters) and its part of the peak (MFU). It also logs the largest memory of a rank, and the
    bubble: the share of the step's time in which ranks wait.
    """
    config = Namespace(**options)
    if config.plan and config.devices:
        choose_mesh(config)
    config = checked(config)
    if config.dry_run:
        rehearse(config)
        return
    writes = config.save and os.environ.get('RANK', '0') == '0'
    with TrainingFolder(config.save).locked() if writes else nullcontext() as config.lock:
        check_files(config)
        if 'RANK' in os.environ or config.world == 1 and not config.restarts:
            train(config)
        else:
            launch(train, config, [2, NOT_FINITE])


#: The options that a plan for a mesh sets.
CHOSEN = ('data', 'pipe', 'tensor', 'schedule', 'virtual', 'checkpoint', 'micro_batch_size')


def choose_mesh(config: Namespace) -> None:
    """Set the mesh and the step by a plan, and print it."""
    require('RANK' not in os.environ, '--devices starts processes, but torchrun has started some')
    source, typed = click.get_current_context().get_parameter_source, ParameterSource.COMMANDLINE
    given = [f'--{name.replace("_", "-")}' for name in CHOSEN if source(name) is typed]
    require(not given, f'--devices chooses {", ".join(given)}: leave it out, or --devices')
    require(
        not (config.experts or config.offload or config.chunked_loss),
        '--devices is without --experts, --offload and --chunked-loss',
    )
    devices, plan_for = config.devices, config.machine
    sizes = checked(
        Namespace(
            **{
                **vars(config),
                'plan': None,
                'devices': None,
                'machine': None,
                'dry_run': True,
                'sequence_parallel': False,  # checked again with the mesh
            }
        )
    )
    known, device = sizes.sizes, CPU if config.cpu or not accelerator() else current_device()
    limit: dict[str, Any] = {'memory_limit': USABLE * config.memory} if config.memory else {}
    machine = MACHINES[plan_for] if plan_for else measure_machine(device)
    model: Any = Transformer(
        known.depth,
        known.width,
        known.heads,
        known.vocabulary,
        sizes.block_size,
        tied=known.tied,
        dtype=config.dtype,
        sequence_parallel=config.sequence_parallel,
        eager=True,
    )
    state = ParameterBytes(4, 4, 8)
    if is_cpu(device) and not plan_for:
        ranks = [t for t in range(1, devices + 1) if devices % t == 0 and known.heads % t == 0]
        model, machine = profiles_of(
            known._replace(context=sizes.block_size),
            devices,
            ranks,
            machine,
            state,
            config.sequence_parallel,
        )
        limit['micro_batches'] = (1, 2, 4, LARGE)  # as far as they are measured
    try:
        found = plan(
            model,
            mesh=devices,
            machine=machine,
            batch=config.global_batch_size,
            state=state,
            **limit,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    click.echo(f'{found}\n')
    for axis, size in found.mesh.items():
        setattr(config, axis, size)
    config.schedule, config.checkpoint = found.schedule, found.checkpoint
    if found.recomputation == 'selective':
        config.checkpoint = 'selective'
    config.balance = [*found.balance]
    config.virtual, config.micro_batch_size = len(found.balance) // config.pipe, found.micro_batch
    config.shard = config.shard or found.data == 'shard'
    config.sequence_parallel = config.sequence_parallel and config.tensor > 1
    config.plan = config.devices = config.machine = None


def rehearse(config: Namespace) -> None:
    """Print and draw the needs of each rank; exit with 1 if a rank has too little memory."""
    module, options = arguments_of(config, CPU)
    settings = settings_of(config)
    options['places'] = [*places(settings.schedule, config.pipe, config.virtual)]
    samples = torch.empty(
        config.chunks * config.micro_batch_size, config.block_size, dtype=torch.long, device='meta'
    )
    try:
        with autocast(config, CPU):
            found = dry_run(
                module,
                settings.balance,
                samples,
                samples,
                partial(loss_of, config),
                mesh={'data': config.data, 'pipe': config.pipe, 'tensor': config.tensor},
                schedule=settings.schedule,
                chunks=config.chunks,
                checkpoint=settings.checkpoint,
                keep=settings.keep or None,
                optimizer=partial(optimizer_of, config),
                devices_per_host=config.devices_per_host,
                memory_limit=config.memory,
                **options,
            )
    except (RuntimeError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    click.echo(found)
    path = Path(output_folder(config.output)) / 'dry-run'
    with replacing(path.with_suffix('.json')) as new:
        new.write_text(json.dumps(found.to_dict()) + '\n')
    click.echo(f'\n{path.with_suffix(".json")}')

    def draw() -> list[Path]:
        found.save(path.with_suffix('.png'))
        return [path.with_suffix('.png')]

    for picture in draw_if_possible(draw):
        click.echo(picture)
    if found.problems:
        raise SystemExit(1)


def cross_entropy(config: Namespace, output: Any, target: Tensor) -> Tensor:
    """Return the mean over tokens; scores may be split by vocabulary, or made by chunks."""
    scores = output[0] if config.experts else output
    if config.chunked_loss:
        return chunked_cross_entropy(scores, target, config.chunked_loss)
    return parallel_cross_entropy(scores, target)


def loss_of(config: Namespace, output: Any, target: Tensor) -> Tensor:
    """Return the mean over tokens, of auxiliary losses of experts as well."""
    loss = cross_entropy(config, output, target)
    return loss + output[1].mean() if config.experts else loss


def layers_of(config: Namespace, sizes: Sizes) -> nn.Sequential:
    """Return the layers: the embedding, each block, the head."""
    with_scores = not config.chunked_loss
    if config.experts:
        module = layers_with_experts(sizes, config.experts, with_scores)
    else:
        module = layers(GPT(sizes), with_scores)
    return module.to(DTYPES[config.dtype])


def planned(config: Namespace, device: torch.device) -> Plan:
    """Return schedule, balance and micro-batches, with their predicted time and memory.

    The first rank measures an embedding, a block and a head for it.
    """
    result: list[Any] = [None]
    if dist.get_rank() == 0:
        share = config.chunks * config.micro_batch_size
        few = layers_of(config, config.sizes._replace(depth=1))
        sample = torch.zeros(min(share, 4 * config.micro_batch_size), config.block_size).long()
        with autocast(config, device):
            result[0] = plan_blocks(
                few,
                sample,
                device,
                depth=config.sizes.depth,
                batch=share,
                ranks=config.pipe,
                tensor=config.tensor,
                virtual=config.virtual,
                settings=None if config.plan else settings_of(config),
            ).to_dict()
    dist.broadcast_object_list(result, device=device)
    return Plan.from_dict(result[0])


def settings_of(config: Namespace) -> Settings:
    """Return the settings of a training without a plan, and of its dry run."""
    # Layers of the host's memory are stages of one rank, through which all micro-batches run.
    schedule = 'looped-bfs' if config.offload else config.schedule
    devices = tuple(f'cpu:{k}' for k in places(schedule, config.pipe, config.virtual))
    balance = tuple(config.balance)
    if config.checkpoint == 'selective':
        return Settings(schedule, balance, devices, config.chunks, 'always', (), keep='products')
    return Settings(schedule, balance, devices, config.chunks, config.checkpoint, ())


def autocast(config: Namespace, device: torch.device) -> torch.autocast:
    """Return the context of forward passes."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == 'bfloat16')


def arguments_of(config: Namespace, device: torch.device) -> tuple[nn.Sequential, dict[str, Any]]:
    """Return the layers, on the meta device, and the options of the model."""
    with torch.device('meta'):
        module = layers_of(config, config.sizes)
    shards = (
        {
            name: style
            for name, style in tensor_plan(
                config.sequence_parallel, with_scores=not config.chunked_loss
            ).items()
            if not (config.experts and name == '*.c_fc')
        }
        if config.tensor > 1
        else None
    )
    options: dict[str, Any] = {'data': 'shard'} if config.shard or config.offload else {}
    if options and config.dtype == 'bfloat16':
        options['mp_policy'] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if config.offload:
        options['offload_policy'] = CPUOffloadPolicy(pin_memory=not is_cpu(device))
    return module, {**options, 'tensor_plan': shards}


def optimizer_of(config: Namespace, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW, with weight decay for matrices."""
    groups = [
        {'params': [x for x in parameters if x.dim() > 1]},
        {'params': [x for x in parameters if x.dim() < 2], 'weight_decay': 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group['params']],
        config.lr,
        (0.9, 0.95),
        weight_decay=config.weight_decay,
    )


def made(
    config: Namespace, mesh: Any, found: Plan, device: torch.device
) -> tuple[DistributedGPipe, torch.optim.Optimizer]:
    """Return the model and its optimizer."""
    module, options = arguments_of(config, device)
    model = DistributedGPipe(
        module,
        found,
        mesh=mesh,
        seed=config.seed,
        init=partial(init_gpt2, depth=config.sizes.depth),
        **options,
    )
    if config.compile:
        for block in [x for x in model.modules() if isinstance(x, (Block, Mixture))]:
            block.compile()
    return model, optimizer_of(config, [*model.parameters()])


def parameters_of(config: Namespace) -> tuple[int, int]:
    """Return the number of parameters, and of those that a token uses."""
    with torch.device('meta'):
        module = layers_of(config, config.sizes)
    experts = sum(
        x.numel()
        for name, x in module.named_parameters()
        if '.experts.' in name and '.router' not in name
    )
    total = sum(x.numel() for x in module.parameters())
    return total, total - experts + (experts * min(2, config.experts) // max(1, config.experts))


def rate_of(config: Namespace, step: int) -> float:
    """Return the learning rate of a step: it grows, then falls as a cosine."""
    if step < config.warmup_steps:
        return float(config.lr * (step + 1) / config.warmup_steps)
    part = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    return float(config.min_lr + (config.lr - config.min_lr) * (1 + cos(pi * min(part, 1))) / 2)


def loaded(
    config: Namespace, model: DistributedGPipe, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Load the newest checkpoint that is complete, and return its further state."""
    # The first rank decides: its training has the name, and others may see an older folder.
    shared = [(config.training, TrainingFolder(config.save).steps() if config.resume else [])]
    dist.broadcast_object_list(shared, device=model.devices[0])
    config.training, steps = shared[0]
    if not config.save:
        return {'step': 0}
    folder, is_first = TrainingFolder(config.save), dist.get_rank() == 0
    if is_first and not steps:
        folder.describe(config.training)
    for step in reversed(steps):
        try:
            state = model.load(folder.checkpoint(step), optimizer)
        except (OSError, RuntimeError, ValueError) as error:
            if isinstance(error, RuntimeError) and not isinstance(error.__cause__, NotBegun):
                raise  # Such as after the end of a rank, which does not damage a checkpoint.
            if is_first:
                click.echo(f'step-{step} is not loaded: {error}', err=True)
            continue
        for damaged in steps[steps.index(step) + 1 :] if is_first else ():
            click.echo(f'it is now {folder.set_aside(damaged)}', err=True)
        return state
    if steps:
        dist.destroy_process_group()
        raise click.UsageError(f'no checkpoint in {config.save} can be loaded')
    return {'step': 0}


def check_finite(model: nn.Module, step: int, loss: float, norm: float) -> None:
    """Stop all ranks before the optimizer would spread values that are not finite."""
    if not (isfinite(loss) and isfinite(norm)):
        grads = [
            x.grad.to_local() if isinstance(x.grad, DTensor) else x.grad
            for x in model.parameters()
            if x.grad is not None
        ]
        finite: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(finite, all(bool(grad.isfinite().all()) for grad in grads))
        click.echo(
            f'step {step}: the loss is {loss}, the norm of gradients {norm}; gradients are '
            f'not finite on ranks {[k for k, each in enumerate(finite) if not each]}. The '
            'optimizer has not used them',
            err=True,
        )
        dist.destroy_process_group()
        raise SystemExit(NOT_FINITE)


@torch.no_grad()
def validated(config: Namespace, model: DistributedGPipe, val: Tensor, replica: int) -> float:
    """Return the exact mean over the tokens of some batches, or of all."""
    block, batch, total, count = config.block_size, config.global_batch_size, 0.0, 0
    starts = block * torch.arange((len(val) - 1) // block)[: config.eval_batches * batch or None]
    model.eval()
    # Experts take equally many samples of each replica. So the samples that replicas cannot share
    # evenly run on all of them, which does not change their mean.
    rest = len(starts) % batch % config.data
    shared, common = starts.split([len(starts) - rest, rest])
    parts = [(len(x), x.tensor_split(config.data)[replica]) for x in shared.split(batch) if len(x)]
    parts += [(rest, common)] if rest else []
    loss_fn = partial(cross_entropy, config)
    for number, own in tqdm(
        parts, 'validation', leave=False, disable=None if dist.get_rank() == 0 else True
    ):
        x, y = samples_at(config, val, own, model.devices[0])
        with autocast(config, model.devices[0]):
            loss, _ = model.evaluate(x, y, loss_fn)
        total, count = total + loss.item() * number, count + number
    model.train()
    return total / count


def generated(config: Namespace, model: DistributedGPipe) -> list[int]:
    """Return tokens that the model draws one after the other, at a temperature of 0.8."""
    tokens = [ord('\n') % config.vocab_size]
    generator = torch.Generator().manual_seed(config.seed)
    model.eval()
    for _ in tqdm(
        range(config.generate), 'text', leave=False, disable=None if dist.get_rank() == 0 else True
    ):
        seen = tokens[-config.block_size :]
        # Ranks that divide a sequence get equal parts of it. No token sees the later ones.
        padding = -len(seen) % config.tensor if config.sequence_parallel else 0
        with autocast(config, model.devices[0]):
            # on ranks with the last stage
            output = model(torch.tensor([seen + [0] * padding], device=model.devices[0]))
        drawn = torch.full((1,), -1, device=model.devices[0])
        if output is not None:
            scores = last_scores(config, output, len(seen) - 1)
            chances = (scores.double().cpu() / 0.8).softmax(-1)
            drawn[0] = chances.multinomial(1, generator=generator)
        dist.all_reduce(drawn, dist.ReduceOp.MAX)
        tokens.append(int(drawn))
    return tokens[1:]


def last_scores(config: Namespace, output: Any, place: int) -> Tensor:
    """Return the scores of all tokens after the token at a place of the only sample."""
    scores = output[0] if config.experts else output
    if config.chunked_loss:
        features, weight = (x.full_tensor() if isinstance(x, DTensor) else x for x in scores)
        return features[0, place] @ weight.t()
    if isinstance(scores, DTensor):
        scores = scores.full_tensor()
    return scores[0, place]


def described(config: Namespace, model: DistributedGPipe, found: Plan, parameters: int) -> str:
    """Return the description of model, mesh, micro-batches and prediction."""
    own = [x.to_local() if isinstance(x, DTensor) else x for x in model.parameters()]
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, sum(x.numel() for x in own))
    each = (
        f'{counts[0]:,} on each'
        if len({*counts}) == 1
        else f'by rank {", ".join(f"{count:,}" for count in counts)}'
    )
    return (
        f'{parameters:,} parameters, {each}\n'
        f'mesh of data {config.data} × pipe {config.pipe} × tensor {config.tensor} on '
        f'{model.devices[0].type}, balance {[*found.balance]}, schedule {found.schedule}, '
        f'checkpoint {"selective" if found.keep else found.checkpoint}\n'
        f'{config.data} replicas × {config.chunks} micro-batches × '
        f'{config.global_batch_size // config.data // config.chunks} samples × '
        f'{config.block_size} tokens = {config.global_batch_size * config.block_size:,} tokens'
        f' per step\npredicted for the layers alone: {found.seconds * 1e3:.1f} ms, '
        f'bubble {found.bubble:.1%}, {format_bytes(max(found.bytes.values()))}\n'
    )


def train(config: Namespace) -> None:
    """Run one rank, from its place in the mesh to the end of the training."""
    torch.use_deterministic_algorithms(config.deterministic)
    mesh = init_mesh(
        config.data, config.pipe, config.tensor, device_type=None if config.accelerated else 'cpu'
    )
    rank, replica = dist.get_rank(), mesh.get_local_rank('data')
    device = current_device() if config.accelerated else CPU
    tokens, val = read(config)
    found = planned(config, device)
    config.chunks = found.chunks
    model, optimizer = made(config, mesh, found, device)
    loss_fn = partial(loss_of, config)
    state, saving = loaded(config, model, optimizer), None
    first = state['step']
    parameters, used = parameters_of(config)
    flops = 6 * used + 12 * config.sizes.depth * config.sizes.width * config.block_size
    number = config.global_batch_size * config.block_size
    peak = config.peak_tflops or peak_tflops(device)
    text = described(config, model, found, parameters)
    name = config.training['name']
    first_of_replica = mesh.get_local_rank('pipe') == mesh.get_local_rank('tensor') == 0
    sample_log = f'{config.log}.{replica}' if config.log_samples and first_of_replica else None
    logs = Log(config.log if rank == 0 else None, name, first)
    samples = Log(sample_log, name, first)
    if rank == 0:
        for path in sample_logs(config.log) if config.log else ():
            Log(path, name, first)  # also of replicas that this mesh does not have
        click.echo(text + (f'continues after step {first}\n' if first else ''))
    # The step of the checkpoint, if its rank was killed before the step was validated and logged.
    unlogged = [None if logs.has(first) else state.get('entry')]
    dist.broadcast_object_list(unlogged, device=device)
    step, entry = first, unlogged[0]
    bar = tqdm(total=config.steps, initial=first, unit='step', disable=None if rank == 0 else True)
    while True:
        if entry:
            if step % config.eval_interval == 0 or step == config.steps:
                entry['val_loss'] = validated(config, model, val, replica)
            if rank == 0:
                bar.write(line_of(entry), file=sys.stdout)
            logs.add(entry)
        if step == config.steps:
            break
        step += 1
        last = step == config.steps
        starts = starts_of(config, len(tokens), step - 1)[:, replica].flatten()
        x, y = samples_at(config, tokens, starts, device)
        for group in optimizer.param_groups:
            group['lr'] = rate_of(config, step - 1)
        validates = step % config.eval_interval == 0 or last
        shows = step % config.log_interval == 0 or validates
        measurement: Any = nullcontext()
        if shows:
            measurement = measure(
                model,
                tokens=number,
                flops=flops * number,
                peak_flops=None if peak is None else peak * 1e12,
            )
        with measurement as metrics:
            with autocast(config, device):
                loss = model.step(x, y, loss_fn, schedule='auto').item()
            norm = model.clip_grad_norm_(config.grad_clip or inf).item()
            check_finite(model, step, loss, norm)
            optimizer.step()
            optimizer.zero_grad()
        entry = None
        if metrics is not None:
            entry = {
                'step': step,
                'loss': loss,
                'grad_norm': norm,
                'lr': group['lr'],
                'tokens_per_second': metrics.tokens_per_second,
                'seconds': metrics.seconds,
                'tokens_per_second_per_device': metrics.tokens_per_second_per_device,
                'tflops_per_device': metrics.tflops_per_device,
                'mfu': metrics.mfu,
                'peak_memory': metrics.peak_bytes,
                'bubble': metrics.bubble,
            }
        samples.add({'step': step, 'starts': starts.tolist()})
        # A checkpoint comes before its validation, which may fail. It has the entry of the log.
        if config.save and (step % config.save_interval == 0 or last):
            if saving is not None:
                saving.result()
            shared = [entry]
            dist.broadcast_object_list(shared, device=device)
            saving = model.save(
                TrainingFolder(config.save).checkpoint(step),
                optimizer,
                extra={'step': step, 'entry': shared[0]},
                wait=not config.async_save,
            )
            if saving is not None and validates:
                saving.result()
            if rank == 0:
                TrainingFolder(config.save).delete_old(config.keep_last, step)
        bar.update()
    bar.close()
    generated_tokens = generated(config, model)
    if rank == 0 and logs.lines:
        report(config, found, logs.lines, generated_tokens)
    dist.destroy_process_group()


def report(config: Namespace, found: Plan, logs: list[dict[str, Any]], tokens: list[int]) -> None:
    """Print predictions beside measurements, draw the losses, and print the text."""

    def typical(name: str) -> float:
        return median([entry[name] for entry in logs])

    click.echo(
        '\n'
        + table(
            ['', 'predicted', 'measured'],
            [
                ['step, ms', f'{found.seconds * 1e3:.1f}', f'{typical("seconds") * 1e3:.1f}'],
                ['bubble', f'{found.bubble:.1%}', f'{typical("bubble"):.1%}'],
                [
                    'memory',
                    format_bytes(max(found.bytes.values())),
                    format_bytes(max(entry['peak_memory'] for entry in logs)),
                ],
            ],
        )
        + '\n'
    )
    curves: dict[str, Any] = {
        name: tuple(zip(*((entry['step'], entry[key]) for entry in logs if key in entry)))
        for name, key in (('training', 'loss'), ('validation', 'val_loss'))
    }
    stem = Path(config.output) / 'train-gpt'
    for path in draw_if_possible(lambda: draw_curves([Panel('step', 'loss', curves)], stem)):
        click.echo(path)
    if 'val_loss' in logs[-1]:
        click.echo(f'validation loss {logs[-1]["val_loss"]:.4f}\n')
    click.echo(bytes(k % 256 for k in tokens).decode(errors='replace') if config.text else tokens)


if __name__ == '__main__':
    from benchmarks.__main__ import main

    sys.argv.insert(1, 'train-gpt')
    main()
