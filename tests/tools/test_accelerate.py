"""Accelerate: a model that has its devices already."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from tests.tools.models import assert_equal, plain, samples, sgd, trained, wrapped
from tests.tools.rows import works
from torchgpipe import GPipe


@pytest.fixture
def accelerator(no_state):
    """Yield an accelerator."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    yield accelerator
    accelerator.free_memory()


def train(accelerator, model):
    """Train a model as Accelerate's guide does, and return the result of `prepare`."""
    loader = DataLoader(TensorDataset(*samples()), 5)
    model, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    for input, label in loader:
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(input), label))
        optimizer.step()
    return model, optimizer


@works(
    'Accelerate',
    '`prepare` of a model, its optimizer and loader; `backward`, `save_state`, '
    '`load_state`, `unwrap_model`, `save_model`',
    'accelerate',
)
def test_prepare(accelerator, tmp_path):
    from safetensors.torch import load_file

    gpipe = wrapped()
    model, optimizer = train(accelerator, gpipe)
    assert accelerator.unwrap_model(model) is gpipe
    assert_equal(model, trained())
    accelerator.save_state(tmp_path / 'state')
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(tmp_path / 'state')
    assert_equal(model, trained())
    accelerator.save_model(model, tmp_path / 'model')
    loaded = plain()
    loaded.load_state_dict(load_file(tmp_path / 'model' / 'model.safetensors'))
    assert_equal(loaded, trained())


@works(
    'Accelerate', 'a `GPipe` on several devices with `hf_device_map` is not moved', 'accelerate'
)
def test_a_device_map(accelerator, monkeypatch):
    model = wrapped()
    monkeypatch.setattr(GPipe, 'to', lambda self, *args: pytest.fail('it is moved'))
    model.hf_device_map = {str(k): f'cuda:{k // 2}' for k in range(4)}
    assert_equal(train(accelerator, model)[0], trained())
