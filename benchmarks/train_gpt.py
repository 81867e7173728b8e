"""Train a GPT on a mesh of data × pipe × tensor: the whole trainer, to read from top to bottom.

::

    python -m benchmarks train-gpt                                    a small model, one process
    python -m benchmarks train-gpt --data 2 --pipe 2                  four processes of its own
    torchrun --nproc-per-node 8 -m benchmarks.train_gpt --pipe 8      processes of torchrun
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
import resource
import shutil
import sys
import time
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
from torch.nn import functional as F
from tqdm import tqdm

from benchmarks.experiments.machine import measure_machine
from benchmarks.harness.blocks import LARGE, plan_blocks, profiles_of
from benchmarks.harness.curves import Panel, draw_curves
from benchmarks.harness.gpt_options import DTYPES, add_options, checked, require
from benchmarks.harness.launch import launch
from benchmarks.harness.report import (add_line, kept_lines, output_folder, peak_tflops, replacing,
                                       table)
from benchmarks.harness.tokens import read, samples_at, starts_of
from benchmarks.models.gpt import (GPT, Block, Mixture, Sizes, init_gpt2, layers,
                                   layers_with_experts, tensor_plan)
from torchgpipe.base.devices import CPU, accelerator, current_device, is_cpu, synchronize
from torchgpipe.base.errors import format_bytes
from torchgpipe.distributed import DistributedGPipe, dry_run, init_mesh
from torchgpipe.plan import MACHINES, ParameterBytes, Plan, Transformer, plan
from torchgpipe.schedule import NAMES
from torchgpipe.schedule.generators import places
from torchgpipe.timeline import record

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
    given = [f"--{name.replace('_', '-')}" for name in CHOSEN if source(name) is typed]
    require(not given, f"--devices chooses {', '.join(given)}: leave it out, or --devices")
    require(not (config.experts or config.offload), '--devices is without --experts and --offload')
    devices, plan_for = config.devices, config.machine
    sizes = checked(Namespace(**{**vars(config), 'plan': None, 'devices': None, 'machine': None,
                                 'dry_run': True}))
    known, device = sizes.sizes, CPU if config.cpu or not accelerator() else current_device()
    limit: dict[str, Any] = {'memory_limit': config.memory} if config.memory else {}
    machine = MACHINES[plan_for] if plan_for else measure_machine(device)
    model: Any = Transformer(known.depth, known.width, known.heads, known.vocabulary,
                             sizes.block_size, tied=known.tied, dtype=config.dtype)
    # Autocast and FSDP keep parameters in bfloat16 during a step, beside those in float32.
    state = ParameterBytes(2, 4, 12) if config.dtype == 'bfloat16' else ParameterBytes(4, 4, 8)
    if is_cpu(device) and not plan_for:
        ranks = [t for t in range(1, devices + 1) if devices % t == 0 and known.heads % t == 0]
        model, machine = profiles_of(known._replace(context=sizes.block_size), devices, ranks,
                                     machine, state)
        limit['micro_batches'] = (1, 2, 4, LARGE)  # as far as they are measured
    try:
        found = plan(model, mesh=devices, machine=machine, batch=config.global_batch_size,
                     state=state, **limit)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    click.echo(f'{found}\n')
    for axis, size in found.mesh.items():
        setattr(config, axis, size)
    config.schedule, config.checkpoint = found.schedule, found.checkpoint
    config.virtual, config.micro_batch_size = len(found.balance) // config.pipe, found.micro_batch
    config.shard = config.shard or found.data == 'shard'
    config.plan = config.devices = config.machine = None


def rehearse(config: Namespace) -> None:
    """Print and draw the needs of each rank; exit with 1 if a rank has too little memory.

    Blocks are divided evenly, with the embedding and the head beside the first and the last one.
    """
    module, options = arguments_of(config, CPU)
    stages = config.pipe * config.virtual
    each, more = divmod(config.sizes.depth, stages)
    balance = [each + (j < more) + (j == 0) + (j == stages - 1) for j in range(stages)]
    options['places'] = [*places(config.schedule, config.pipe, config.virtual)]
    samples = torch.empty(config.chunks * config.micro_batch_size, config.block_size,
                          dtype=torch.long, device='meta')
    try:
        with autocast(config, CPU):
            found = dry_run(
                module, balance, samples, samples, loss_of,
                mesh={'data': config.data, 'pipe': config.pipe, 'tensor': config.tensor},
                schedule=config.schedule, chunks=config.chunks, checkpoint=config.checkpoint,
                optimizer=partial(optimizer_of, config), devices_per_host=config.devices_per_host,
                memory_limit=config.memory, **options)
    except (RuntimeError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    click.echo(found)
    path = Path(output_folder(config.output)) / 'dry-run'
    found.save(path.with_suffix('.png'))
    with replacing(path.with_suffix('.json')) as new:
        new.write_text(json.dumps(found.to_dict()) + '\n')
    click.echo(f"\n{path.with_suffix('.png')}\n{path.with_suffix('.json')}")
    if found.problems:
        raise SystemExit(1)


def check_files(config: Namespace) -> None:
    """Check the data, and that the folder of checkpoints has none of another training."""
    for folder in (config.output, config.save, config.log and str(Path(config.log).parent)):
        output_folder(folder or config.output)
    block = config.block_size
    path = Path(config.save or '') / 'training.json'
    try:
        train, val = (len(tokens) for tokens in read(config))
        there = json.loads(path.read_text()) if config.save and path.exists() else None
    except (OSError, RuntimeError, ValueError) as error:
        raise click.UsageError(f'cannot read the data, or {path}: {error}') from None
    require(train >= 2 * block and val > block,
            f'there are {train} tokens to train and {val} to validate with, but --block-size '
            f'{block} takes {2 * block} and {block + 1}')
    config.training = {**config.sizes._asdict(), 'experts': config.experts, 'block_size': block,
                       'seed': config.seed, 'global_batch_size': config.global_batch_size,
                       'tokens': train}
    if there is not None:
        differ = [f'{name} {there.get(name)} there, {value} here'
                  for name, value in config.training.items() if there.get(name) != value]
        require(not differ, f"{config.save} has another training's checkpoints "
                f'({"; ".join(differ)}): give the options that it had, or another folder')
        require(config.resume or not checkpoints(config),
                f'{config.save} has checkpoints already: give --resume, or another folder')


def cross_entropy(output: Any, target: Tensor) -> Tensor:
    """Return the mean over tokens."""
    scores = output[0] if isinstance(output, tuple) else output
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def loss_of(output: Any, target: Tensor) -> Tensor:
    """Return the mean over tokens, of auxiliary losses of experts as well."""
    loss = cross_entropy(output, target)
    return loss + output[1].mean() if isinstance(output, tuple) else loss


def layers_of(config: Namespace, sizes: Sizes) -> nn.Sequential:
    """Return the layers: the embedding, each block, the head."""
    found = layers_with_experts(sizes, config.experts) if config.experts else layers(GPT(sizes))
    return found.to(DTYPES[config.dtype])


def planned(config: Namespace, device: torch.device) -> Plan:
    """Return schedule, balance and micro-batches, with their predicted time and memory.

    The first rank measures an embedding, a block and a head for it.
    """
    said: list[Any] = [None]
    if dist.get_rank() == 0:
        share = config.chunks * config.micro_batch_size
        with autocast(config, device):
            said[0] = plan_blocks(
                layers_of(config, config.sizes._replace(depth=1)),
                torch.zeros(min(share, 4 * config.micro_batch_size), config.block_size).long(),
                device, depth=config.sizes.depth, batch=share, ranks=config.pipe,
                tensor=config.tensor, virtual=config.virtual, choices={
                    'schedules': [*NAMES],
                    'chunks': [m for m in range(1, share + 1) if share % m == 0]}
                if config.plan else {'schedules': [config.schedule], 'chunks': [config.chunks],
                                     'checkpoints': [config.checkpoint]}).to_dict()
    dist.broadcast_object_list(said, device=device)
    return Plan.from_dict(said[0])


def autocast(config: Namespace, device: torch.device) -> torch.autocast:
    """Return the context of forward passes."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == 'bfloat16')


def arguments_of(config: Namespace, device: torch.device) -> tuple[nn.Sequential, dict[str, Any]]:
    """Return the layers, on the meta device, and the options of the model."""
    with torch.device('meta'):
        module = layers_of(config, config.sizes)
    shards = {name: style for name, style in tensor_plan().items()
              if not (config.experts and name == '*.c_fc')} if config.tensor > 1 else None
    options: dict[str, Any] = {'data': 'shard'} if config.shard or config.offload else {}
    if options and config.dtype == 'bfloat16':
        options['mp_policy'] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if config.offload:
        options['offload_policy'] = CPUOffloadPolicy(pin_memory=not is_cpu(device))
    return module, {**options, 'tensor_plan': shards}


def optimizer_of(config: Namespace, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW, with weight decay for matrices."""
    groups = [{'params': [x for x in parameters if x.dim() > 1]},
              {'params': [x for x in parameters if x.dim() < 2], 'weight_decay': 0.}]
    return torch.optim.AdamW([group for group in groups if group['params']], config.lr, (.9, .95),
                             weight_decay=config.weight_decay)


def made(config: Namespace, mesh: Any, found: Plan, device: torch.device
         ) -> tuple[DistributedGPipe, torch.optim.Optimizer]:
    """Return the model and its optimizer."""
    module, options = arguments_of(config, device)
    model = DistributedGPipe(module, found, mesh=mesh, seed=config.seed,
                             init=partial(init_gpt2, depth=config.sizes.depth), **options)
    if config.compile:
        for block in [x for x in model.modules() if isinstance(x, (Block, Mixture))]:
            block.compile()
    return model, optimizer_of(config, [*model.parameters()])


def parameters_of(config: Namespace) -> tuple[int, int]:
    """Return the number of parameters, and of those that a token uses."""
    with torch.device('meta'):
        module = layers_of(config, config.sizes)
    experts = sum(x.numel() for name, x in module.named_parameters() if '.experts.' in name)
    total = sum(x.numel() for x in module.parameters())
    return total, total - experts + (experts * min(2, config.experts) // max(1, config.experts))


def rate_of(config: Namespace, step: int) -> float:
    """Return the learning rate of a step: it grows, then falls as a cosine."""
    if step < config.warmup_steps:
        return float(config.lr * (step + 1) / config.warmup_steps)
    part = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    return float(config.min_lr + (config.lr - config.min_lr) * (1 + cos(pi * min(part, 1))) / 2)


def checkpoints(config: Namespace) -> list[int]:
    """Return the steps of complete checkpoints, in order."""
    return sorted(int(path.name[5:]) for path in Path(config.save).glob('step-*')
                  if path.name[5:].isdigit())


def delete_old(config: Namespace, step: int) -> None:
    """Delete all but the newest complete checkpoints, and the one of a step."""
    kept = {f'step-{k}' for k in checkpoints(config)[-config.keep_last:]}
    for path in Path(config.save).glob('step-*'):
        if path.name not in kept and path.stem != f'step-{step}':  # which ranks may be writing
            shutil.rmtree(path, ignore_errors=True)


def loaded(config: Namespace, model: DistributedGPipe, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint, if there is one, and return its number of steps."""
    steps = [checkpoints(config)[-1:] if config.save and config.resume else []]
    dist.broadcast_object_list(steps, device=model.devices[0])  # of the first rank
    for step in steps[0]:
        return int(model.load(Path(config.save) / f'step-{step}', optimizer)['step'])
    if config.save and dist.get_rank() == 0:
        with replacing(Path(output_folder(config.save)) / 'training.json') as new:
            new.write_text(json.dumps(config.training) + '\n')
    return 0


def check_finite(model: nn.Module, step: int, loss: float, norm: float) -> None:
    """Stop all ranks before the optimizer would spread values that are not finite."""
    if not (isfinite(loss) and isfinite(norm)):
        grads = [x.grad.to_local() if isinstance(x.grad, DTensor) else x.grad
                 for x in model.parameters() if x.grad is not None]
        finite: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(finite, all(bool(grad.isfinite().all()) for grad in grads))
        click.echo(f'step {step}: the loss is {loss}, the norm of gradients {norm}; gradients are '
                   f'not finite on ranks {[k for k, each in enumerate(finite) if not each]}. The '
                   'optimizer has not used them', err=True)
        dist.destroy_process_group()
        raise SystemExit(NOT_FINITE)


@torch.no_grad()
def validated(config: Namespace, model: DistributedGPipe, val: Tensor, replica: int) -> float:
    """Return the exact mean over the tokens of some batches, or of all."""
    block, batch, total, count = config.block_size, config.global_batch_size, 0., 0.
    starts = block * torch.arange((len(val) - 1) // block)[:config.eval_batches * batch or None]
    model.eval()
    batches = starts.tensor_split(-(-len(starts) // batch))
    for each in tqdm(batches, 'validation', leave=False, disable=None if dist.get_rank() == 0
                     else True):
        x, y = samples_at(config, val, each.tensor_split(config.data)[replica], model.devices[0])
        with autocast(config, model.devices[0]):
            loss, n = model.evaluate(x, y, cross_entropy)
        total, count = total + loss.item() * n, count + n
    model.train()
    return total / count


def generated(config: Namespace, model: DistributedGPipe) -> list[int]:
    """Return tokens that the model draws one after the other, at a temperature of 0.8."""
    tokens, generator = [ord('\n')], torch.Generator().manual_seed(config.seed)
    model.eval()
    for _ in tqdm(range(config.generate), 'text', leave=False, disable=None if dist.get_rank() == 0
                  else True):
        seen = torch.tensor([tokens[-config.block_size:]], device=model.devices[0])
        with autocast(config, model.devices[0]):
            output = model(seen)  # on ranks with the last stage
        drawn = torch.full((1,), -1, device=model.devices[0])
        if output is not None:
            scores = output[0] if isinstance(output, tuple) else output
            chances = (scores[0, -1].double().cpu() / .8).softmax(-1)
            drawn[0] = chances.multinomial(1, generator=generator)
        dist.all_reduce(drawn, dist.ReduceOp.MAX)
        tokens.append(int(drawn))
    return tokens[1:]


def described(config: Namespace, model: DistributedGPipe, found: Plan, parameters: int) -> str:
    """Return the description of model, mesh, micro-batches and prediction."""
    own = [x.to_local() if isinstance(x, DTensor) else x for x in model.parameters()]
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, sum(x.numel() for x in own))
    each = (f'{counts[0]:,} on each' if len({*counts}) == 1 else
            f"by rank {', '.join(f'{count:,}' for count in counts)}")
    return (f'{parameters:,} parameters, {each}\n'
            f'mesh of data {config.data} × pipe {config.pipe} × tensor {config.tensor} on '
            f'{model.devices[0].type}, balance {[*found.balance]}, schedule {found.schedule}, '
            f'checkpoint {found.checkpoint}\n'
            f'{config.data} replicas × {config.chunks} micro-batches × '
            f'{config.global_batch_size // config.data // config.chunks} samples × '
            f'{config.block_size} tokens = {config.global_batch_size * config.block_size:,} tokens'
            f' per step\npredicted for the layers alone: {found.seconds * 1e3:.1f} ms, '
            f'bubble {found.bubble:.1%}, {format_bytes(max(found.bytes.values()))}\n')


def line_of(entry: dict[str, Any]) -> str:
    """Return the entry of a step as a line of a table."""
    mfu = '' if entry['mfu'] is None else f" {entry['mfu']:.1%} MFU "
    return (f"step {entry['step']:>5}  loss {entry['loss']:<8.6g} norm {entry['grad_norm']:<7.4g} "
            f"lr {entry['lr']:.2e} {entry['tokens_per_second']:>9,.0f} tokens/s "
            f"{entry['tokens_per_second_per_device']:>9,.0f}/device "
            f"{entry['tflops_per_device']:>7.3g} TFLOP/s{mfu} "
            f"{format_bytes(entry['peak_memory']):>8} {entry['seconds'] * 1e3:>8.1f} ms  "
            f"bubble {entry['bubble']:5.1%}"
            + (f"  validation {entry['val_loss']:.4f}" if 'val_loss' in entry else ''))


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that were allocated on a device, or were resident in this process."""
    if is_cpu(device):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.accelerator.max_memory_allocated(device)


def train(config: Namespace) -> None:
    """Run one rank, from its place in the mesh to the end of the training."""
    torch.use_deterministic_algorithms(config.deterministic)
    mesh = init_mesh(config.data, config.pipe, config.tensor,
                     device_type=None if config.accelerated else 'cpu')
    rank, replica = dist.get_rank(), mesh.get_local_rank('data')
    device = current_device() if config.accelerated else CPU
    tokens, val = read(config)
    found = planned(config, device)
    config.chunks = found.chunks
    model, optimizer = made(config, mesh, found, device)
    first, saving = loaded(config, model, optimizer), None
    parameters, used = parameters_of(config)
    flops = 6 * used + 12 * config.sizes.depth * config.sizes.width * config.block_size
    peak = config.peak_tflops or peak_tflops(device)
    text = described(config, model, found, parameters)
    log = config.log if rank == 0 else None
    first_of_replica = mesh.get_local_rank('pipe') == mesh.get_local_rank('tensor') == 0
    sample_log = f'{config.log}.{replica}' if config.log_samples and first_of_replica else None
    logs, _ = kept_lines(log, first), kept_lines(sample_log, first)
    if rank == 0:
        click.echo(text + (f'continues after step {first}\n' if first else ''))
    bar = tqdm(total=config.steps, initial=first, unit='step', disable=None if rank == 0 else True)
    for step in range(first + 1, config.steps + 1):
        began, last = time.perf_counter(), step == config.steps
        starts = starts_of(config, len(tokens), step - 1)[:, replica].flatten()
        x, y = samples_at(config, tokens, starts, device)
        for group in optimizer.param_groups:
            group['lr'] = rate_of(config, step - 1)
        validates = step % config.eval_interval == 0 or last
        shows = step % config.log_interval == 0 or validates
        with record(model, merge=False) if shows else nullcontext() as timeline:
            with autocast(config, device):
                loss = model.step(x, y, loss_of, schedule='auto').item()
        norm = model.clip_grad_norm_(config.grad_clip or inf).item()
        check_finite(model, step, loss, norm)
        optimizer.step()
        optimizer.zero_grad()
        synchronize([device])
        seconds = time.perf_counter() - began
        if timeline is not None:
            # A lane has this rank's work. The longest one is the step, as ranks wait in it.
            most, work = (torch.tensor(x, dtype=torch.float64, device=device) for x in (
                [timeline.seconds, peak_memory(device)], timeline.utilisation * timeline.seconds))
            dist.all_reduce(most, dist.ReduceOp.MAX)
            dist.all_reduce(work)
            rate = config.global_batch_size * config.block_size / seconds
            tflops = flops * rate / config.world / 1e12
            logs.append({'step': step, 'loss': loss, 'grad_norm': norm, 'lr': group['lr'],
                         'tokens_per_second': rate, 'seconds': seconds,
                         'tokens_per_second_per_device': rate / config.world,
                         'tflops_per_device': tflops, 'mfu': peak and tflops / peak,
                         'peak_memory': int(most[1]),
                         'bubble': 1 - float(work / config.world / most[0])})
            if validates:
                logs[-1]['val_loss'] = validated(config, model, val, replica)
            if rank == 0:
                bar.write(line_of(logs[-1]), file=sys.stdout)
            add_line(log, logs[-1])
        add_line(sample_log, {'step': step, 'starts': starts.tolist()})
        if config.save and (step % config.save_interval == 0 or last):
            if saving is not None:
                saving.result()
            saving = model.save(Path(config.save) / f'step-{step}', optimizer,
                                extra={'step': step}, wait=not config.async_save)
            if saving is not None and last:
                saving.result()
            if rank == 0:
                delete_old(config, step)
        bar.update()
    bar.close()
    said = generated(config, model)
    if rank == 0 and logs:
        report(config, found, logs, said)
    dist.destroy_process_group()


def report(config: Namespace, found: Plan, logs: list[dict[str, Any]], said: list[int]) -> None:
    """Print predictions beside measurements, draw the losses, and print the text."""
    def typical(name: str) -> float:
        return median([entry[name] for entry in logs])

    click.echo('\n' + table(['', 'predicted', 'measured'], [
        ['step, ms', f'{found.seconds * 1e3:.1f}', f"{typical('seconds') * 1e3:.1f}"],
        ['bubble', f'{found.bubble:.1%}', f"{typical('bubble'):.1%}"],
        ['memory', format_bytes(max(found.bytes.values())),
         format_bytes(max(entry['peak_memory'] for entry in logs))]]) + '\n')
    curves: dict[str, Any] = {name: tuple(zip(*((entry['step'], entry[key]) for entry in logs
                                                if key in entry)))
                              for name, key in (('training', 'loss'), ('validation', 'val_loss'))}
    for path in draw_curves([Panel('step', 'loss', curves)], Path(config.output) / 'train-gpt'):
        click.echo(path)
    click.echo(f"validation loss {logs[-1]['val_loss']:.4f}\n")
    click.echo(bytes(k % 256 for k in said).decode(errors='replace') if config.text else said)


if __name__ == '__main__':
    from benchmarks.__main__ import main

    sys.argv.insert(1, 'train-gpt')
    main()
