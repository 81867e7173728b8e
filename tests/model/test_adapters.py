"""Adapters: their names in a model, without PEFT. `tests/tools/test_folders.py` has PEFT's own."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from torchgpipe.model.adapters import (
    base_names,
    exported_names,
    is_adapter_layer,
    merge,
    part_of_adapter,
)


class Tuned(nn.Module):
    """A layer of another library around a linear layer."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(2, 2)
        self.lora_A = nn.ModuleDict({'default': nn.Linear(2, 1, bias=False)})

    active_adapters = ('default',)

    def get_base_layer(self):
        return self.base_layer

    def merge(self):
        self.base_layer.weight.data += self.lora_A['default'].weight.sum()


class Copied(nn.Module):
    """A layer of another library with trained copies of a layer."""

    active_adapters = ('default',)

    def __init__(self):
        super().__init__()
        self.original_module = nn.Linear(2, 3)
        self.modules_to_save = nn.ModuleDict({'default': nn.Linear(2, 3)})


@pytest.fixture
def model(monkeypatch):
    for name, key, kind in (
        ('peft.tuners.tuners_utils', 'BaseTunerLayer', Tuned),
        ('peft.utils.other', 'AuxiliaryTrainingWrapper', Copied),
    ):
        library = ModuleType(name)
        setattr(library, key, kind)
        monkeypatch.setitem(sys.modules, name, library)
    body = nn.Sequential(Tuned(), nn.Linear(2, 2), Copied())
    return nn.Sequential(body)


def test_names_of_the_base_model(model):
    names = base_names(model, model[0])
    assert names == {
        '0.0.base_layer.weight': '0.weight',
        '0.0.base_layer.bias': '0.bias',
        '0.1.weight': '1.weight',
        '0.1.bias': '1.bias',
        '0.2.original_module.weight': '2.weight',
        '0.2.original_module.bias': '2.bias',
        '0.2.modules_to_save.default.weight': '2.weight',
        '0.2.modules_to_save.default.bias': '2.bias',
    }


def test_parts_of_adapters(model):
    modules = dict(model.named_modules())
    assert [path for path in modules if part_of_adapter(modules, path)] == [
        '0.0.lora_A',
        '0.0.lora_A.default',
        '0.2.modules_to_save',
        '0.2.modules_to_save.default',
    ]
    assert [path for path in modules if is_adapter_layer(modules[path])] == ['0.0', '0.2']


def test_merged_weights(model):
    layers = {'0.0': model[0][0], '0.2': model[0][2]}
    names = exported_names(layers, base_names(model, model[0]))
    # An adapter that is not active may be in another layer.
    model[0][0].lora_A['other'] = nn.Linear(2, 1)
    before = {name: x.detach().clone() for name, x in model.state_dict().items()}
    del before['0.0.lora_A.other.weight']
    tensors = merge(layers, names, before)
    shift = before['0.0.lora_A.default.weight'].sum()
    assert torch.equal(tensors['0.weight'], before['0.0.base_layer.weight'] + shift)
    assert torch.equal(tensors['2.weight'], before['0.2.modules_to_save.default.weight'])
    assert {*tensors} == {f'{k}.{name}' for k in range(3) for name in ('weight', 'bias')}
    for name, x in model.state_dict().items():
        assert name not in before or torch.equal(x, before[name])

    on_meta = {name: x.to('meta') for name, x in before.items()}
    assert merge(layers, names, on_meta).keys() == tensors.keys()
    for state in (before, on_meta):
        del state['0.0.lora_A.default.weight']
        with pytest.raises(ValueError, match="'0.0' cannot be merged, because 'lora_A.default.we"):
            merge(layers, names, state)


def test_a_copy_takes_the_place_of_its_module_in_all_layers(model, monkeypatch):
    """In files, the module itself is left out, also if it is in another layer than its copy."""
    layers = {'0.2': model[0][2]}
    names = exported_names(layers, base_names(model, model[0]))
    assert names['0.2.modules_to_save.default.weight'] == '2.weight'
    assert not [name for name in names if 'original_module' in name]
    monkeypatch.setattr(Copied, 'active_adapters', ())
    names = exported_names(layers, base_names(model, model[0]))
    assert names['0.2.original_module.weight'] == '2.weight'
    assert not [name for name in names if 'modules_to_save' in name]
