"""Plan a model whose blocks are equal, by measuring one of them.

::

    measured    embedding   block                 head
    planned     embedding   block block block …   head      over the ranks of a pipeline
"""
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.gpt import GPT, Sizes, layers
from torchgpipe.balance import Profile, profile
from torchgpipe.plan import Costs, Machine, Plan, measure_overhead, plan

__all__ = ['plan_blocks', 'profiles_of']

#: Bytes of a parameter, its gradient and the state of Adam, relative to the parameter.
ADAM = 4


def profiles_of(sizes: Sizes, tensors: Iterable[int], sample: Tensor, device: torch.device,
                machine: Machine) -> dict[int, Profile]:
    """Measure the layers of a GPT as each rank of the tensor axis has them.

    A rank has rows or columns of a weight, by the styles of ``tensor_plan``. Collectives are added
    by the machine's link.

    Args:
        sizes: The sizes.
        tensors: Numbers of ranks along the tensor axis.
        sample: Tokens, of the samples of a micro-batch.
        device: Where to measure.
        machine: The machine.

    Returns:
        The profile of all layers, by the number of ranks.
    """
    found = {}
    for tensor in tensors:
        model = GPT(sizes._replace(depth=1, vocabulary=-(-sizes.vocabulary // tensor)))
        for module in model.transformer['h'][0].modules():
            _narrow(module, tensor)
        costs = profile(layers(model).to(device), sample.to(device), device=device, timeout=1.)
        size = sample.numel() * sizes.width * 4
        exchange = machine.all_reduce(size, tensor)
        scores = machine.gather(sample.numel() * sizes.vocabulary * 4, tensor)
        first, block, last = (replace(x, forward_seconds=x.forward_seconds + more,
                                      backward_seconds=x.backward_seconds + less)
                              for x, more, less in zip(costs.layers, (
                                  exchange, 2 * exchange, scores), (0., 2 * exchange, exchange)))
        found[tensor] = replace(costs, layers=(
            first, *(replace(block, name=str(k + 1)) for k in range(sizes.depth)),
            replace(last, name=str(sizes.depth + 1), output_bytes=4)))
    return found


def _narrow(module: nn.Module, tensor: int) -> None:
    """Give a linear layer of a block the weight that it has on one of the ranks."""
    name = {id(x): name for name, x in module.named_children()}
    for child in module.children():
        if isinstance(child, nn.Linear):
            dim = 1 if name[id(child)] == 'c_proj' else 0
            child.weight = nn.Parameter(child.weight.detach().chunk(tensor, dim)[0].clone())
            if dim == 0:
                child.bias = nn.Parameter(child.bias.detach().chunk(tensor)[0].clone())


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
