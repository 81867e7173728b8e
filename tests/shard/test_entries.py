"""Entries of state dicts and checkpoints: an optimizer by the names of its parameters."""

import re

import pytest
import torch
from torch import nn

from torchgpipe.shard.entries import NamedOptimizer, by_names, check_names, under


def stepped(module, **options):
    """Return an optimizer by names after a step, and the optimizer."""
    optimizer = torch.optim.Adam(module.parameters(), **options)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return NamedOptimizer(optimizer, names), optimizer


def test_states_are_loaded_by_names():
    """The other optimizer has the parameters in another order."""
    module = nn.Linear(2, 3)
    named, optimizer = stepped(module)
    parameters = dict(module.named_parameters())
    other = torch.optim.Adam([parameters['bias'], parameters['weight']])
    reordered = NamedOptimizer(other, {id(x): name for name, x in parameters.items()})
    assert reordered.names == ['bias', 'weight']
    assert reordered.states() == {}

    groups = [{'lr': 0.5, 'params': ['weight', 'bias']}]
    reordered.load(named.states(), groups)
    for parameter in parameters.values():
        torch.testing.assert_close(other.state[parameter], optimizer.state[parameter])
    assert other.param_groups[0]['lr'] == 0.5
    assert reordered.groups()[0]['params'] == ['bias', 'weight']


def test_a_state_of_no_parameter_has_no_name():
    """L-BFGS, for one, may keep such a state."""
    named, optimizer = stepped(nn.Linear(2, 3))
    optimizer.state['calls'] = {'count': 2}
    assert [*named.states()] == ['weight', 'bias']


def test_parameters_of_another_model_are_refused():
    with pytest.raises(ValueError, match=re.escape('2 parameters of the optimizer are not in')):
        NamedOptimizer(torch.optim.SGD(nn.Linear(2, 3).parameters(), 0.1), {})


def test_names_with_dots_are_split_at_the_last_one():
    saved = {'state.0.weight.step': 1, 'state.0.weight.exp_avg': 2, 'other.0.bias.step': 3}
    assert by_names(under(saved, 'state.')) == {'0.weight': {'step': 1, 'exp_avg': 2}}


def test_missing_and_foreign_names_are_listed_with_similar_ones():
    names = ['weight', 'bias', 'scale']
    check_names('differs', 'model', names, [*reversed(names)])
    with pytest.raises(ValueError) as raised:
        check_names('differs', 'model', names, ['weights', 'bias'], 1, '. See x')
    assert str(raised.value) == (
        "differs: it misses 'weight' (like 'weights') and 1 more; "
        "the model does not have 'weights' (like 'weight'). See x"
    )
