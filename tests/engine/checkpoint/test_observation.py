"""The observed behaviour of layers, tested on its own."""

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.engine.checkpoint.layers import Layer, count
from tests.helpers import assert_same, call, gradients
from torchgpipe import GPipe
from torchgpipe.engine.checkpoint.observation import Observed
from torchgpipe.engine.checkpoint.random import Drawing


def test_false_alarms_are_looked_into_less_and_less_often():
    observed, looked_into = Observed(), []
    for alarm in range(1, 20):
        observed.draws = Drawing.NO
        observed.watch_draws()
        if observed.draws is Drawing.UNKNOWN:
            looked_into.append(alarm)
    assert looked_into == [1, 2, 4, 8, 16]


def test_a_partition_that_draws_is_not_observed_again():
    observed = Observed()
    observed.draws = Drawing.YES
    observed.watch_draws()
    assert observed.draws is Drawing.YES


def test_layers_that_did_something_new_are_watched_as_at_first():
    observed = Observed()
    observed.draws, observed.watched = Drawing.YES, True
    observed.watch_again()
    assert observed.draws is Drawing.UNKNOWN and not observed.watched


def draw(layer, x):
    """Draw in training only."""
    return nn.functional.dropout(x, 0.5) if torch.is_grad_enabled() else x


@devices
@pytest.mark.parametrize('layer', [lambda: Layer(count, calls=0), lambda: Layer(draw)])
def test_layers_that_ran_without_a_graph_are_watched_when_they_are_checkpointed(devices, layer):
    found = []
    for mode in ('never', 'always'):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), layer()).double()
        gpipe = GPipe(model, [1, 1], devices=devices(2), chunks=2, checkpoint=mode)
        x = torch.rand(4, 4, dtype=torch.double)
        with torch.no_grad():
            call(gpipe, x)
        for _ in range(2):
            call(gpipe, x).square().sum().backward()
        found.append(gradients(gpipe))
    assert_same(*found)
