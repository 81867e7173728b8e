"""Tensors of layers that are written to in odd ways: loaded, resized, and put back."""

import io

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.helpers import assert_same, call, gradients
from torchgpipe import GPipe
from torchgpipe.engine.checkpoint.state import with_grad


def loaded(value):
    """Save and load a value."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@devices
def test_tensors_loaded_from_a_file(devices):
    """Its memory has no allocator, and cannot be resized."""
    for how in ['assign', 'module', 'gpipe']:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
        other = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

        def wrap(module):
            return GPipe(module, [1, 2], devices=devices(2), chunks=2, checkpoint='always')

        if how == 'assign':
            other.load_state_dict(loaded(plain.state_dict()), assign=True)
            gpipe = wrap(other)
        elif how == 'module':
            gpipe = wrap(loaded(plain))
        else:
            gpipe = loaded(wrap(loaded(plain)))
        for _ in range(3):
            x = torch.rand(8, 6, dtype=torch.double)
            expected, actual = torch.cat([plain(c) for c in x.chunk(2)]), call(gpipe, x)
            expected.square().sum().backward()
            actual.square().sum().backward()
            assert_same(
                [actual, *gradients(gpipe), *gpipe.buffers()],
                [expected, *gradients(plain), *plain.buffers()],
            )


@pytest.mark.parametrize('make', [nn.Parameter, torch.Tensor.clone])
def test_with_grad(make):
    x = make(torch.ones(3)).requires_grad_()
    assert with_grad(x, True) is x
    frozen = with_grad(x, False)
    assert not frozen.requires_grad and x.requires_grad and type(frozen) is type(x)
    assert frozen.data_ptr() == x.data_ptr()
