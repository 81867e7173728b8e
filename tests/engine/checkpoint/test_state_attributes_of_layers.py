"""Attributes of layers come from the first pass, also after Ctrl-C in a recomputation."""

import itertools
from unittest import mock

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.engine.checkpoint.layers import Decay, Layer
from tests.helpers import assert_same, in_partitions
from torchgpipe import GPipe, is_recomputing
from torchgpipe.engine.checkpoint import state


@devices
def test_an_output_that_a_layer_keeps_is_the_one_of_the_first_pass(devices):
    """An example is an auxiliary loss. The recomputation's would keep a useless graph alive."""

    def keep(layer, x):
        layer.aux = x.sum()
        return x * 2

    gpipe = in_partitions(devices, nn.Linear(4, 4), Layer(keep), chunks=2, checkpoint='always')
    output = gpipe(torch.rand(4, 4, device=devices.first))
    kept = gpipe[1].aux
    output.sum().backward()
    assert gpipe[1].aux is kept


@devices
def test_a_layer_that_asks_which_pass_it_is_in_deals_with_its_attributes_itself(devices):
    seen = []

    def see(layer, x):
        if is_recomputing():
            layer.recomputations += 1
            seen.append(layer.kept)
        else:
            layer.kept = len(x)
        return x * 2

    layer = Layer(see, recomputations=0, kept=0)
    gpipe = in_partitions(devices, nn.Linear(4, 4), layer, chunks=2, checkpoint='always')
    for step in (1, 2):
        gpipe(torch.rand(5, 4, device=devices.first)).sum().backward()
        assert layer.recomputations == 2 * step
    assert seen == [2] * 4  # the last micro-batch's value


@devices
def test_ctrl_c_while_attributes_are_put_back(devices):
    """In v0.3.0, copies stayed behind as the model's buffers."""
    for at in range(12):
        model = nn.Sequential(nn.Linear(4, 4), Decay(True), nn.BatchNorm1d(4)).double()
        gpipe = GPipe(model, [3], devices=devices(1), chunks=2, checkpoint='always')
        gpipe(torch.rand(4, 4, dtype=torch.double, device=devices.first)).sum().backward()
        output = gpipe(torch.rand(4, 4, dtype=torch.double, device=devices.first))
        before = {module: module.__dict__ for module in model.modules()}
        buffers = [buffer.clone() for buffer in model.buffers()]
        # Two recomputations, in each four modules get other attributes and get back their own.
        calls = itertools.count()

        def interrupt(module, name, value):
            object.__setattr__(module, name, value)
            if next(calls) == at:
                raise KeyboardInterrupt

        with mock.patch.object(state, 'assign', interrupt), pytest.raises(KeyboardInterrupt):
            output.sum().backward()
        assert all(module.__dict__ is before[module] for module in model.modules())
        assert_same(model.buffers(), buffers, 0)
        gpipe(torch.rand(4, 4, dtype=torch.double, device=devices.first)).sum().backward()
