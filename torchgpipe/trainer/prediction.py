"""Predicted time and memory of a training, by measuring an embedding, a block and a head.

::

    measured     embedding   block                 head and loss
    predicted    embedding   block block block …   head and loss    over the ranks of a pipeline
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchgpipe.balance import LayerProfile, Profile, profile
from torchgpipe.base.settings import Settings
from torchgpipe.plan import MACHINES, Costs, Plan, Transformer, measure_overhead, plan
from torchgpipe.schedule import NAMES
from torchgpipe.schedule.generators import places
from torchgpipe.trainer.blocks import share_of
from torchgpipe.trainer.config import Config
from torchgpipe.trainer.ranks import from_first_rank

#: Bytes of a parameter, its gradient and the state of Adam, relative to the parameter.
ADAM = 4


def settings_of(config: Config) -> Settings:
    """Return the settings of a training without a plan, and of its dry run."""
    # Layers of the host's memory are stages of one rank, through which all micro-batches run.
    schedule = 'looped-bfs' if config.offload else config.schedule
    devices = tuple(f'cpu:{place}' for place in places(schedule, config.pipe, config.virtual))
    if config.checkpoint == 'selective':
        return Settings(
            schedule, config.balance, devices, config.chunks, 'always', (), keep='products'
        )
    return Settings(schedule, config.balance, devices, config.chunks, config.checkpoint, ())


def predict(
    config: Config,
    build_layers: Callable[[Config, int], nn.Sequential],
    loss: Callable[[Any, Tensor], Tensor],
    device: torch.device,
) -> Plan:
    """Return schedule, balance and micro-batches, with their predicted time and memory.

    The first rank measures for all of them. Predictions leave out the optimizer and messages.

    Args:
        config: The options. With ``--plan auto``, a plan chooses the settings.
        build_layers: Returns the layers of a model with a number of blocks.
        loss: Returns the loss of an output and the next tokens.
        device: Where to measure.
    """
    text = None
    if dist.get_rank() == 0:
        few = build_layers(config, 1)
        settings = None if config.plan else settings_of(config)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == 'bfloat16'):
            text = plan_blocks(few, loss, config, device, settings).to_dict()
    return Plan.from_dict(from_first_rank(text, device))


class LayerWithLoss(nn.Module):
    """The last layer and the loss, so that both are measured.

    Args:
        layer: The last layer.
        loss: Returns the loss of its output and the next tokens.
    """

    def __init__(self, layer: nn.Module, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self._layer = layer
        self._loss = loss

    def forward(self, x: Any) -> Tensor:
        # Layers of experts also pass on the losses of these.
        features: Tensor = x if isinstance(x, Tensor) else x[0]
        target = torch.zeros(features.shape[:2], dtype=torch.long, device=features.device)
        return self._loss(self._layer(x), target).expand(len(target))


def plan_blocks(
    few: nn.Sequential,
    loss: Callable[[Any, Tensor], Tensor],
    config: Config,
    device: torch.device,
    settings: Settings | None = None,
) -> Plan:
    """Return the predictions for some settings, or the fastest plan.

    Args:
        few: The first layer, one block and the last layer.
        loss: Returns the loss of an output and the next tokens.
        config: The options.
        device: Where to measure.
        settings: The settings; by default, the fastest plan has them.
    """
    batch = config.global_batch_size // config.data
    first, block, last = few
    measured = nn.Sequential(first, block, LayerWithLoss(last, loss)).to(device)
    samples = min(batch, 4 * config.micro_batch_size)
    tokens = torch.zeros(samples, config.block_size, dtype=torch.long, device=device)
    whole = profile(measured, tokens, device=device, timeout=0.5).scaled(batch)
    costs = divide_layers(whole, config) if config.tensor > 1 else whole
    costs = repeat_block(costs, config.n_layer)
    # By these the model checks that a plan is its own. It has whole layers.
    layers = []
    for layer in repeat_block(whole, config.n_layer).layers:
        layers.append((layer.name, layer.parameter_bytes))
    overhead = measure_overhead([device])
    if settings is None:
        fastest = plan(
            costs,
            devices=[f'cpu:{rank}' for rank in range(config.pipe)],
            param_scale=ADAM,
            overhead=overhead,
            virtual=config.virtual,
            schedules=[*NAMES],
            chunks=[m for m in range(1, batch + 1) if batch % m == 0],
        )
        return replace(fastest, layers=tuple(layers))

    layer_devices = []
    for stage_device, count in zip(settings.devices, settings.balance):
        layer_devices += [stage_device] * count
    stages = Costs.of(
        costs.counted_once(layer_devices),
        settings.balance,
        settings.chunks,
        settings.checkpoint,
        param_scale=ADAM,
        overhead=overhead,
        keep=settings.keep or None,
    )
    return Plan(
        settings.schedule,
        settings.balance,
        settings.devices,
        settings.chunks,
        settings.checkpoint,
        tuple(layers),
        batch,
        sum(layer.forward_seconds + layer.backward_seconds for layer in costs.layers),
        stages,
        keep=settings.keep,
    )


def repeat_block(costs: Profile, depth: int) -> Profile:
    """Return the costs of all layers, from one embedding, one block and one head."""
    first, block, last = costs.layers
    blocks = [replace(block, name=str(index + 1)) for index in range(depth)]
    layers = (first, *blocks, replace(last, name=str(depth + 1)))
    # The last layer may have the weight of the first one.
    indices = {0: 0, 2: depth + 1}
    ties = []
    for tie in costs.ties:
        ties.append(replace(tie, layers=tuple(indices[index] for index in tie.layers)))
    return replace(costs, layers=layers, ties=tuple(ties))


def divide_layers(costs: Profile, config: Config) -> Profile:
    """Return the costs of the first layer, one block and the last on a rank of the tensor axis.

    Each rank takes its part of the time. Sizes change by the ratio that formulas have.
    """
    sizes = config.sizes
    formula = Transformer(
        1,
        sizes.width,
        sizes.heads,
        sizes.vocabulary,
        config.block_size,
        tied=sizes.tied,
        dtype=config.dtype if config.dtype == 'bfloat16' else 'float32',
        sequence_parallel=config.sequence_parallel,
        eager=True,
    )
    machine = MACHINES['H100']  # sizes are the same on all machines
    whole = formula.profile(machine, 1)
    part = formula.profile(machine, config.tensor)
    layers = []
    for layer, whole_layer, part_layer in zip(costs.layers, whole.layers, part.layers):
        layers.append(_divide(layer, whole_layer, part_layer, config.tensor))
    ties = []
    for tie in costs.ties:
        ties.append(replace(tie, bytes=tie.bytes // config.tensor))
    return replace(costs, layers=tuple(layers), ties=tuple(ties))


#: The sizes of a layer that are smaller on a rank of the tensor axis.
DIVIDED_SIZES = 'parameter_bytes', 'activation_bytes', 'output_bytes', 'backward_bytes'


def _divide(
    layer: LayerProfile, whole: LayerProfile, part: LayerProfile, ranks: int
) -> LayerProfile:
    """Return a layer that several ranks share, by the formulas of it and of a rank's part."""
    changes: dict[str, Any] = {}
    for name, value in vars(layer).items():
        if name.endswith(('seconds', 'overhead')):
            changes[name] = value / ranks
    for name in DIVIDED_SIZES:
        size = getattr(whole, name)
        if size:
            changes[name] = getattr(layer, name) * getattr(part, name) // size
    changes['operations'] = share_of(layer, layer.forward_seconds / ranks)
    return replace(layer, **changes)
