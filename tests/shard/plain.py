"""The plain layers of one process, and the parts of their tensors that belong to a rank."""

import torch
import torch.distributed as dist
from torch import nn

import torchgpipe.shard as ts


def in_turn(*functions):
    """Call functions on the ranks of one group, each from the same seed."""
    for function in functions:
        torch.manual_seed(0)
        function()


def pair(make):
    """Return a plain model and a sharded one with its values.

    Args:
        make: Makes either, from functions that make a linear layer and an embedding.
    """
    torch.manual_seed(5)
    plain = make(
        lambda *args, dim, **options: nn.Linear(*args, **options),
        lambda *args, dim, **options: nn.Embedding(*args, **options),
    ).double()
    sharded = make(ts.nn.ParallelLinear, ts.nn.ParallelEmbedding).double()
    sharded.load_state_dict(ts.relocate_state_dict(sharded, plain.state_dict()))
    return plain, sharded


def part(tensors, i, parts):
    """Return one of the parts of a batch."""
    return [tensor.chunk(parts)[i] for tensor in tensors]


def replicas():
    """Say which replica this is, and how many there are."""
    return ts.distributed.get_data_rank(), dist.get_world_size() // ts.distributed.get_group_size()


def give_gradients(plain, sharded, scale=1.0):
    """Give random gradients to a plain model, and their parts to a sharded one."""
    torch.manual_seed(7)
    for parameter in plain.parameters():
        parameter.grad = torch.randn_like(parameter) * scale
    mine = ts.relocate_state_dict(
        sharded,
        {name: gradient.clone() for name, gradient in gradients(plain).items()},
        strict=False,
    )
    for name, parameter in sharded.named_parameters():
        parameter.grad = mine[name]


def gradients(module):
    """Return all gradients by their names."""
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def whole_gradients(module):
    """Collect the gradients of a sharded model."""
    return ts.collect_state_dict(module, gradients(module))


def whole(module):
    """Collect the values of a sharded model."""
    return ts.collect_state_dict(module, module.state_dict())


def close(these, those, within=1e-12):
    """See that tensors of two dicts, of the same names, are close to each other."""
    assert {*these} == {*those}
    for name, one in these.items():
        torch.testing.assert_close(
            one, those[name], rtol=within, atol=within, msg=lambda text: f'{name}: {text}'
        )
