"""Modes that a model runs in: autocast around it, grad mode, and training or evaluation."""
import pickle

import pytest
import torch
from torch import nn

from tests.devices import cpu_only
from tests.sequential.test_record import Model, sample
from torchgpipe.sequential import to_sequential

pytestmark = cpu_only('what is recorded does not depend on devices')


@pytest.mark.parametrize('asks', [
    lambda x: torch.is_autocast_enabled('cpu'), lambda x: torch.is_autocast_enabled(x.device.type),
    lambda x: torch.get_autocast_dtype('cpu') == torch.float16], ids=range(3))
def test_a_program_that_goes_by_autocast_around_the_call(asks):
    """In v0.8.2, it went the way of the conversion in each call."""
    model = Model(lambda m, x: x * (2 if asks(x) else 3))
    x, autocast = sample(), torch.autocast('cpu', dtype=torch.float16)
    layers = pickle.loads(pickle.dumps(to_sequential(model, x)))
    assert torch.equal(layers(x), model(x))
    with autocast, pytest.raises(ValueError, match='autocast_.* was False; it is True now'):
        layers(x)
    with autocast:
        layers = to_sequential(model, x)
        assert torch.equal(layers(x), model(x))
    with pytest.raises(ValueError, match='autocast_.* was True; it is False now'):
        layers(x)


def test_pytorch_s_own_modules_ask_for_autocast_without_a_guard():
    block = nn.TransformerEncoderLayer(6, 2, 8, dropout=0, batch_first=True)
    model = nn.TransformerEncoder(block, 2)
    x = torch.randn(4, 5, 6)
    layers = to_sequential(model, x)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert torch.equal(layers(x), model(x))
