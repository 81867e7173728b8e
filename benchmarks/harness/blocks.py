"""Plan a model whose blocks are equal, by measuring one of them.

::

    measured    embedding   block                 head
    planned     embedding   block block block …   head      over the ranks of a pipeline
"""
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchgpipe.balance import profile
from torchgpipe.plan import Costs, Plan, measure_overhead, plan

__all__ = ['plan_blocks']

#: Bytes of a parameter, its gradient and the state of Adam, relative to the parameter.
ADAM = 4


def plan_blocks(few: nn.Sequential, sample: Tensor, device: torch.device, *, depth: int,
                batch: int, ranks: int, tensor: int, virtual: int,
                choices: Mapping[str, Sequence[Any]]) -> Plan:
    """Return the fastest plan among some.

    Predictions leave out the loss, the optimizer and messages.

    Args:
        few: The first layer, one block and the last layer.
        sample: The input of some samples.
        device: Where to measure.
        depth: The number of blocks.
        batch: The number of samples of a replica.
        ranks: The ranks of the pipeline.
        tensor: The ranks that share each layer; each takes its part of the time.
        virtual: The most stages on a rank. With one rank, it is the number of stages, through
            each of which all micro-batches run before the next one.
        choices: The ``schedules``, ``chunks`` and ``checkpoints`` of :func:`torchgpipe.plan.plan`.
    """
    costs = profile(few.to(device), sample.to(device), device=device, timeout=.5).scaled(batch)
    first, block, last = (replace(x, **{
        name: value / tensor for name, value in vars(x).items()
        if name.endswith(('seconds', 'overhead'))}) for x in costs.layers)
    blocks = [replace(block, name=str(k + 1)) for k in range(depth)]
    costs = replace(costs, layers=(first, *blocks, replace(last, name=str(depth + 1))))
    overhead = measure_overhead([device])
    found = plan(costs, devices=[f'cpu:{k}' for k in range(ranks)], param_scale=ADAM,
                 overhead=overhead, virtual=virtual, **choices)
    if ranks == 1 < virtual:
        balance = costs.balance(virtual, chunks=found.chunks, checkpoint=found.checkpoint)
        found = replace(found, schedule='looped-bfs', balance=tuple(balance),
                        devices=found.devices * virtual, costs=Costs.of(
                            costs, balance, found.chunks, found.checkpoint, param_scale=ADAM,
                            overhead=overhead))
    return found
