"""Models of Transformers: their names in files, without Transformers itself.

`tests/tools/test_folders.py` has the models.
"""

from types import ModuleType

import pytest
import torch
from torch import nn

from torchgpipe import GPipe
from torchgpipe.model import pretrained
from torchgpipe.model.pretrained import original_of
from torchgpipe.sequential import to_sequential


class Net(nn.Module):
    """A model that another library saves."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x)

    def save_pretrained(self, folder):
        pass


def test_layers_keep_the_original_of_a_model_of_transformers(monkeypatch):
    layers = to_sequential(Net(), torch.ones(2, 2))
    gpipe = GPipe(layers, [len(layers)], devices=['cpu'])
    assert original_of(layers) is None
    library = ModuleType('transformers.modeling_utils')
    library.PreTrainedModel = Net
    monkeypatch.setitem(pretrained.sys.modules, library.__name__, library)
    for module in (layers, gpipe):
        original = original_of(module)
        assert isinstance(original.base, Net) and original.base.linear.weight.is_meta
        assert '_original' not in dict(module.named_modules())


@pytest.mark.parametrize('name', ['original', '_original'])
def test_a_layer_of_that_name(name):
    module = nn.Sequential()
    module.add_module(name, nn.Linear(2, 2))
    gpipe = GPipe(module, [1], devices=['cpu'])
    assert original_of(gpipe) is None
    assert gpipe.get_submodule(name) is module.get_submodule(name)
