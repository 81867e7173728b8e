"""Before a training: a plan that chooses its mesh, and a dry run of all ranks."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from torchgpipe.balance import Profile
from torchgpipe.base.devices import CPU, is_cpu
from torchgpipe.dry_run import DryRun, dry_run
from torchgpipe.plan import MACHINES, MeshPlan, ParameterBytes, Transformer, plan
from torchgpipe.plan.mesh_search import USABLE
from torchgpipe.schedule.generators import places
from torchgpipe.trainer.blocks import LARGE, profiles_of
from torchgpipe.trainer.config import Config, complete, require
from torchgpipe.trainer.files import output_folder, replacing
from torchgpipe.trainer.measuring import measure_machine
from torchgpipe.trainer.prediction import settings_of
from torchgpipe.trainer.train_gpt import (
    autocast,
    build_layers,
    build_optimizer,
    model_options,
    training_loss,
)
from torchgpipe.trainer.training_report import draw_if_possible

#: The options that a plan for a mesh sets.
CHOSEN = ('data', 'pipe', 'tensor', 'schedule', 'virtual', 'checkpoint', 'micro_batch_size')

#: Bytes of a parameter in float32, its gradient and the state of Adam.
STATE = ParameterBytes(4, 4, 8)


def choose_mesh(config: Config, options: Mapping[str, Any]) -> Config:
    """Return options with the mesh and the step of a plan, and print the plan.

    Args:
        config: The options.
        options: Those of the command line; ``None`` if it does not have them.

    Raises:
        click.UsageError: The command line has options that the plan chooses, or there is no plan.
    """
    require('RANK' not in os.environ, '--devices starts processes, but torchrun has started some')
    typed = [name for name in CHOSEN if options.get(name) is not None]
    names = ', '.join(f'--{name.replace("_", "-")}' for name in typed)
    require(not typed, f'--devices chooses {names}: leave it out, or --devices')
    require(
        not (config.experts or config.offload or config.chunked_loss),
        '--devices is without --experts, --offload and --chunked-loss',
    )
    chosen = mesh_plan(config)
    click.echo(f'{chosen}\n')
    checkpoint: Any = chosen.checkpoint
    if chosen.recomputation == 'selective':
        checkpoint = 'selective'
    return replace(
        config,
        data=chosen.mesh['data'],
        pipe=chosen.mesh['pipe'],
        tensor=chosen.mesh['tensor'],
        schedule=chosen.schedule,
        checkpoint=checkpoint,
        balance=tuple(chosen.balance),
        virtual=len(chosen.balance) // chosen.mesh['pipe'],
        micro_batch_size=chosen.micro_batch,
        shard=config.shard or chosen.data == 'shard',
        sequence_parallel=config.sequence_parallel and chosen.mesh['tensor'] > 1,
        plan='',
        devices=0,
        machine='',
    )


def mesh_plan(config: Config) -> MeshPlan:
    """Return the fastest plan for the devices."""
    # The sizes of the model. The mesh, which sequences are divided by, is not chosen yet.
    alone = replace(config, plan='', devices=0, machine='', dry_run=True, sequence_parallel=False)
    sizes = complete(alone).sizes._replace(context=complete(alone).block_size)
    device = config.device
    machine = MACHINES[config.machine] if config.machine else measure_machine(device)
    limits: dict[str, Any] = {}
    if config.memory:
        limits['memory_limit'] = USABLE * config.memory
    model: Transformer | dict[int, Profile]
    if is_cpu(device) and not config.machine:
        tensors = []
        for ranks in range(1, config.devices + 1):
            if config.devices % ranks == 0 and sizes.heads % ranks == 0:
                tensors.append(ranks)
        model, machine = profiles_of(
            sizes, config.devices, tensors, machine, STATE, config.sequence_parallel
        )
        limits['micro_batches'] = (1, 2, 4, LARGE)  # as far as they are measured
    else:
        model = Transformer(
            sizes.depth,
            sizes.width,
            sizes.heads,
            sizes.vocabulary,
            sizes.context,
            tied=sizes.tied,
            dtype=config.dtype,
            sequence_parallel=config.sequence_parallel,
            eager=True,
        )
    try:
        return plan(
            model,
            mesh=config.devices,
            machine=machine,
            batch=config.global_batch_size,
            state=STATE,
            **limits,
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def rehearse(config: Config) -> None:
    """Print and draw the needs of each rank.

    Raises:
        click.UsageError: The settings cannot run.
        SystemExit: With 1, if a rank has too little memory.
    """
    needs = needs_of_ranks(config)
    click.echo(needs)
    path = Path(output_folder(config.output)) / 'dry-run'
    with replacing(path.with_suffix('.json')) as new:
        new.write_text(json.dumps(needs.to_dict()) + '\n')
    click.echo(f'\n{path.with_suffix(".json")}')

    def draw() -> list[Path]:
        picture = path.with_suffix('.png')
        needs.save(picture)
        return [picture]

    for picture in draw_if_possible(draw):
        click.echo(picture)
    if needs.problems:
        raise SystemExit(1)


def needs_of_ranks(config: Config) -> DryRun:
    """Return the report of a dry run of all ranks."""
    settings = settings_of(config)
    with torch.device('meta'):
        module = build_layers(config, config.n_layer)
    share = config.chunks * config.micro_batch_size
    tokens = torch.empty(share, config.block_size, dtype=torch.long, device='meta')
    try:
        with autocast(config, CPU):
            return dry_run(
                module,
                settings.balance,
                tokens,
                tokens,
                partial(training_loss, config),
                mesh={'data': config.data, 'pipe': config.pipe, 'tensor': config.tensor},
                schedule=settings.schedule,
                chunks=config.chunks,
                checkpoint=settings.checkpoint,
                keep=settings.keep or None,
                optimizer=partial(build_optimizer, config),
                devices_per_host=config.devices_per_host,
                memory_limit=config.memory or None,
                places=[*places(settings.schedule, config.pipe, config.virtual)],
                **model_options(config),
            )
    except (RuntimeError, ValueError) as error:
        raise click.UsageError(str(error)) from error
