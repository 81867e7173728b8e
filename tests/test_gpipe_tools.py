"""PyTorch's own tools on a pipeline: their results fit the module, and any balance."""

import copy
from collections import OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

from tests.helpers import assert_same, gradients
from torchgpipe import GPipe


def module(seed=0):
    """Return a model with parameters and buffers, and layers with names."""
    torch.manual_seed(seed)
    return nn.Sequential(
        OrderedDict(
            first=nn.Linear(3, 4),
            norm=nn.BatchNorm1d(4),
            act=nn.Tanh(),
            block=nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
            last=nn.Linear(4, 2),
        )
    ).double()


def pipe(balance=(2, 3), seed=0, **options):
    """Wrap that model."""
    devices = [f'cpu:{j}' for j in range(len(balance))]
    return GPipe(module(seed), balance, devices=devices, chunks=2, **options)


def chunked(net, x):
    """Run the unwrapped module as the pipeline runs it."""
    return torch.cat([net(chunk) for chunk in x.tensor_split(2)])


def input():
    """Return a mini-batch."""
    return torch.rand(6, 3, dtype=torch.double)


def train(net, optimizer):
    """Make two steps."""
    torch.manual_seed(1)
    for _ in range(2):
        optimizer.zero_grad()
        x = input()
        (net(x) if isinstance(net, GPipe) else chunked(net, x)).square().sum().backward()
        optimizer.step()


def adam(net):
    """Return an optimizer with a state."""
    return torch.optim.Adam(net.parameters(), 0.1)


@pytest.mark.filterwarnings('ignore::UserWarning')  # There is one process.
@pytest.mark.parametrize(
    'make', [module, lambda seed: pipe([1, 1, 3], seed)], ids=['unwrapped', 'another balance']
)
def test_distributed_checkpoint(make, tmp_path):
    """Written to files and read again, model and optimizer go on as if nothing had been."""
    source = pipe()
    optimizer = adam(source)
    train(source, optimizer)
    model_state, optimizer_state = get_state_dict(source, optimizer)
    assert list(model_state) == list(module().state_dict())
    assert set(optimizer_state['state']) == {name for name, _ in module().named_parameters()}
    dcp.save(
        {'model': model_state, 'optimizer': optimizer_state}, checkpoint_id=tmp_path, no_dist=True
    )
    target = make(seed=2)
    other = adam(target)
    states = get_state_dict(target, other)
    state = {'model': states[0], 'optimizer': states[1]}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(
        target, other, model_state_dict=state['model'], optim_state_dict=state['optimizer']
    )
    for net, of_net in ((source, optimizer), (target, other)):
        train(net, of_net)
    assert_same(target.state_dict().values(), source.state_dict().values())


def test_distributed_checkpoint_from_the_unwrapped_module():
    source, target = module(), pipe(seed=1)
    optimizer, other = adam(source), adam(target)
    train(source, optimizer)
    train(target, other)
    set_model_state_dict(target, get_model_state_dict(source))
    # Loaded as it is, an optimizer's state would be the very same tensors.
    state = copy.deepcopy(get_optimizer_state_dict(source, optimizer))
    set_optimizer_state_dict(target, other, state)
    for net, of_net in ((source, optimizer), (target, other)):
        train(net, of_net)
    assert_same(target.state_dict().values(), source.state_dict().values())


def test_functional_call():
    """The recomputation also uses the given parameters."""
    plain, gpipe = module(), pipe(checkpoint='except_last')
    given = {
        name: tensor.detach().clone().requires_grad_(name.endswith(('weight', 'bias')))
        for name, tensor in module(seed=1).state_dict().items()
    }
    x = input()
    results = []
    for run in (
        lambda state: torch.cat(
            [torch.func.functional_call(plain, state, c) for c in x.tensor_split(2)]
        ),
        lambda state: torch.func.functional_call(gpipe, state, x),
    ):
        state = {
            name: tensor.detach().clone().requires_grad_(tensor.requires_grad)
            for name, tensor in given.items()
        }
        output = run(state)
        output.square().sum().backward()
        results.append(
            [
                output,
                *(tensor.grad for tensor in state.values() if tensor.requires_grad),
                *state.values(),
            ]
        )
    assert_same(results[1], results[0])
    assert all(parameter.grad is None for parameter in gpipe.parameters())


def test_averages_are_saved_and_loaded():
    plain, gpipe = module(), pipe()
    averages = AveragedModel(plain), AveragedModel(gpipe)
    for net, average in zip((plain, gpipe), averages):
        optimizer = adam(net)
        for _ in range(2):
            train(net, optimizer)
            average.update_parameters(net)
    assert list(averages[0].state_dict()) == list(averages[1].state_dict())
    assert_same(averages[1].state_dict().values(), averages[0].state_dict().values())
    for other in (AveragedModel(module(seed=1)), AveragedModel(pipe([1, 4], seed=1))):
        other.load_state_dict(averages[1].state_dict())
        other.eval()
        averages[0].eval()
        x = input()
        assert_same([other(x)], [averages[0](x)])


def test_layers_that_are_changed():
    for wrapped_first in [True, False]:
        for change in [
            lambda net: prune.l1_unstructured(net.get_submodule('block.0'), 'weight', amount=0.5),
            lambda net: prune.global_unstructured(
                [(layer, 'weight') for layer in net.modules() if isinstance(layer, nn.Linear)],
                pruning_method=prune.L1Unstructured,
                amount=3,
            ),
            lambda net: parametrizations.weight_norm(net.get_submodule('first')),
            lambda net: parametrize.register_parametrization(
                net.get_submodule('last'), 'weight', Twice()
            ),
        ]:
            plain, other = module(), module()
            change(plain)
            if not wrapped_first:
                change(other)
            gpipe = GPipe(other, [1, 4], devices=['cpu'] * 2, chunks=2, checkpoint='except_last')
            if wrapped_first:
                change(gpipe)
            for net in (plain, gpipe):
                train(net, adam(net))
            assert [name for name, _ in gpipe.named_parameters()] == [
                name for name, _ in plain.named_parameters()
            ]
            assert_same(
                [*gradients(gpipe), *gpipe.state_dict().values()],
                [*gradients(plain), *plain.state_dict().values()],
            )
            plain.load_state_dict(gpipe.state_dict())


class Twice(nn.Module):
    """A parametrization."""

    def forward(self, x):
        return x * 2
