"""The layers of one rank: made here, of seeds, functions or weights."""

import pytest
import torch
from torch import nn

from tests.distributed.models import tied
from tests.shard.processes import outcomes, run
from torchgpipe.distributed import DistributedGPipe, init_mesh


def layer(width):
    """Make a layer whose function draws its weight, and sets its bias."""
    made = nn.Linear(width, width)
    if not made.weight.is_meta:
        nn.init.normal_(made.weight)
        nn.init.constant_(made.bias, width)
    return made


def of_functions(axes, stages):
    """Give the values and names of layers that functions make."""
    functions = [lambda width=width: layer(width) for width in (2, 3, 4, 5)]
    model = DistributedGPipe(functions, [4 // stages] * stages, mesh=init_mesh(**axes), seed=3)
    return {name: x.detach() for name, x in model.named_parameters()}


def test_functions_make_the_same_layers_on_all_meshes():
    (expected,) = run(1, of_functions, {}, 1)
    first, second = run(2, of_functions, {'pipe': 2}, 2)
    assert [*first] == ['0.weight', '0.bias', '1.weight', '1.bias'] and len(second) == 4
    assert first['0.bias'].tolist() == [2, 2]
    for name, x in {**first, **second}.items():
        assert torch.equal(x, expected[name])


def of_weights(path, makes):
    """Give the values of layers that are read from a file."""
    if makes:
        module = [lambda: nn.Linear(2, 2), nn.ReLU, lambda: nn.Linear(2, 3)]
        balance = [2, 1]
    else:
        with torch.device('meta'):
            module = tied()
        balance = [4, 4]
    model = DistributedGPipe(module, balance, mesh=init_mesh(pipe=2), weights=path)
    return {name: x.detach() for name, x in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize('makes', [True, False])
def test_each_rank_reads_the_weights_of_its_own_layers(tmp_path, makes):
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3)) if makes else tied()
    torch.save(module.state_dict(), tmp_path / 'weights.pt')
    first, second = run(2, of_weights, tmp_path / 'weights.pt', makes)
    for name, x in module.state_dict().items():
        assert torch.equal((first if name in first else second)[name], x)
    assert not first.keys() & second.keys() and len(first | second) == len(module.state_dict())


def test_weights_of_another_module_are_refused(tmp_path):
    torch.save({'0.weight': torch.ones(2, 2), '7.weight': torch.ones(1)}, tmp_path / 'other.pt')
    for each in outcomes(2, of_weights, tmp_path / 'other.pt', True, timeout=20):
        assert 'the weights are not those of the module' in each.text
