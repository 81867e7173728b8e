"""Ties: parameters that stand in stages of several ranks, with one value and one gradient."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional as F

from tests.distributed.models import Block, Head, batch, tied
from tests.shard.processes import outcomes, run
from torchgpipe.distributed import DistributedGPipe, init_mesh
from torchgpipe.distributed.ties import Ties


def tied_values():
    """Give the values of tied weights that differed."""
    torch.manual_seed(torch.distributed.get_rank())
    model = DistributedGPipe(tied(), [4, 4], mesh=init_mesh(pipe=2))
    return {name: x.detach() for name, x in model.named_parameters(remove_duplicate=False)}


def test_tied_weights_take_the_values_of_the_first_stage():
    first, second = run(2, tied_values)
    assert torch.equal(first['0.weight'], second['4.weight'])
    assert torch.equal(first['0.weight'], second['7.weight'])


def own_tie():
    """Return whether a tie of stages of one rank leaves a gradient as it is."""
    layer = nn.Linear(2, 2)
    ties = Ties(
        nn.Sequential(layer)._modules, [((0, '0.weight'), (1, '1.weight'))], [0, 0], None, 0
    )
    grad = torch.ones(2, 2)
    ((_, found),) = ties.sum([(layer.weight, grad)])
    return found is grad and not ties.first_names


def test_stages_of_one_rank_share_a_gradient_as_it_is():
    assert run(1, own_tie) == [True]


def split_apart():
    """Split a tied weight on one of its ranks only."""
    DistributedGPipe(
        tied(), [4, 4], mesh=init_mesh(pipe=2, tensor=2), tensor_plan={'0': ColwiseParallel()}
    )


def test_a_tied_weight_that_is_split_in_two_ways_is_refused():
    for each in outcomes(4, split_apart):
        assert "{'0.weight': '(Shard(dim=0),)', '4.weight': 'whole'}" in each.text


def behind_another():
    """Tie a weight behind another one, where the first place is on another rank."""
    with torch.device('meta'):
        first = nn.Linear(6, 6, bias=False)
        module = nn.Sequential(first, nn.Sequential(nn.Linear(6, 6), Head(first.weight)))
    model = DistributedGPipe(module, [1, 1], mesh=init_mesh(pipe=2))
    return {name: x.detach() for name, x in model.named_parameters()}


def test_a_tied_weight_is_made_where_it_stands_first():
    first, second = run(2, behind_another)
    assert torch.equal(first['0.weight'], second['1.1.weight'])


class Spare(Block):
    """A layer with a weight that it does not use."""

    def __init__(self, weight):
        super().__init__()
        self.spare = weight


def spare():
    """Tell which parameters have a gradient."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    model = DistributedGPipe(
        nn.Sequential(Spare(weight), Spare(weight)), [1, 1], mesh=init_mesh(pipe=2)
    )
    model.step(*batch(0, 4), F.mse_loss)
    return {name: x.grad is not None for name, x in model.named_parameters()}


def test_an_unused_tied_parameter_has_no_gradient():
    for found in run(2, spare):
        assert len(found) == 5
        assert all(there is not name.endswith('spare') for name, there in found.items())


def frozen_on_one():
    """Return the errors of two steps after a tied weight is frozen on one rank."""
    model = DistributedGPipe(tied(), [4, 4], mesh=init_mesh(pipe=2))
    if torch.distributed.get_rank() == 1:
        model.get_parameter('4.weight').requires_grad_(False)
    found = []
    for step in range(2):
        with pytest.raises(RuntimeError) as error:
            model.step(*batch(step, 4), F.mse_loss)
        found.append(str(error.value))
    return found


def test_a_tied_weight_that_is_frozen_on_one_rank_is_refused():
    """And a model goes on no more when it has raised something in the middle of a step."""
    for first, second in run(2, frozen_on_one):
        assert 'requires grad on 1 of them; freeze it on all, or on none' in first
        assert second.startswith('this model cannot go on')
        assert second.endswith(f'It had raised RuntimeError: {first}')


class Sometimes(nn.Module):
    """A layer that uses its weight for large inputs only."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x @ self.weight if x.sum() > 1e6 else x * 2


def unused_copy(axes, policy):
    """Return the gradient of a tied weight that one of its stages does not use."""
    first = nn.Linear(6, 6, bias=False)
    module = nn.Sequential(first, nn.Linear(6, 6), Sometimes(first.weight))
    for x in module.parameters():
        nn.init.constant_(x, 0.125)
    model = DistributedGPipe(
        module,
        [2, 1],
        mesh=init_mesh(**axes),
        data='shard',
        mp_policy=policy,
    )
    model.step(torch.ones(4, 6), torch.zeros(4, 6), F.mse_loss)
    return [x.grad.full_tensor() for name, x in model.named_parameters() if 'weight' in name]


def test_in_v0_28_ranks_summed_gradients_of_a_tied_weight_in_different_types():
    """A rank without a gradient sent zeros in the type of parameters."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ((expected, _),) = run(1, unused_copy, {}, policy)
    first, last = run(2, unused_copy, {'pipe': 2}, policy)
    for grad in (first[0], last[0]):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, expected)
