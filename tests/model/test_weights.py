"""Weights: tensors of files, found by name and read on request."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.weights import save_sharded
from torchgpipe.model.weights import entries_of, open_weights


def test_a_mapping_is_returned_unchanged():
    weights = {'weight': torch.ones(2)}
    assert open_weights(weights) is weights


@pytest.mark.parametrize('name', ['model.pt', 'pytorch_model.bin'])
def test_a_file_of_torch_save_is_found_by_its_path_or_its_folder(tmp_path, name):
    state = nn.Linear(2, 3).state_dict()
    torch.save(state, tmp_path / name)
    for place in (tmp_path, tmp_path / name, str(tmp_path)):
        found = open_weights(place)
        assert all(found[key].equal(state[key]) for key in state) and len(found) == len(state)


def test_a_folder_without_weights_or_with_several_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match='has no weights'):
        open_weights(tmp_path)
    for name in ('a.pt', 'b.pt'):
        torch.save({}, tmp_path / name)
    with pytest.raises(ValueError, match=r'2 files \*\.pt, such as a\.pt'):
        open_weights(tmp_path)


def test_other_types_and_other_contents_raise(tmp_path):
    with pytest.raises(TypeError, match='not int'):
        open_weights(3)
    torch.save([torch.ones(1)], tmp_path / 'list.pt')
    with pytest.raises(TypeError, match='holds no state dict, but list'):
        open_weights(tmp_path / 'list.pt')


def test_damaged_folders_raise(tmp_path):
    index = tmp_path / 'model.safetensors.index.json'
    save_sharded({'a': torch.ones(1), 'b': torch.ones(1)}, tmp_path, 2)
    text = index.read_text()
    index.write_text(text[:-3])
    with pytest.raises(ValueError, match='index.json is damaged'):
        open_weights(tmp_path)
    index.write_text(text.replace('"a"', '"c"'))
    with pytest.raises(ValueError, match="model-0.safetensors does not have 'c', which"):
        open_weights(tmp_path)
    index.write_text(text)
    (tmp_path / 'model-1.safetensors').unlink()
    with pytest.raises(FileNotFoundError, match='model-1.safetensors is missing, but model'):
        open_weights(tmp_path)


def test_a_folder_of_a_model_with_an_adapter(tmp_path):
    save_file({'a': torch.ones(1)}, tmp_path / 'model.safetensors')
    save_file({'b': torch.ones(1)}, tmp_path / 'adapter_model.safetensors')
    assert [*open_weights(tmp_path)] == ['a']


def test_parts_of_entries(tmp_path):
    x = torch.arange(24.0).view(4, 6)
    save_file({'x': x}, tmp_path / 'model.safetensors')
    ranges = slice(1, 3), slice(2, 6)
    for weights in (tmp_path, {'x': x}):
        entry = entries_of(open_weights(weights))['x']
        assert entry.shape == (4, 6)
        assert torch.equal(entry.read(ranges), x[1:3, 2:])
        assert torch.equal(entry.read(), x)


def test_several_files_of_torch_save_with_an_index(tmp_path):
    state = nn.Linear(2, 3).state_dict()
    files = {}
    for k, (name, x) in enumerate(state.items()):
        files[name] = f'pytorch_model-{k}.bin'
        torch.save({name: x}, tmp_path / files[name])
    index = tmp_path / 'pytorch_model.bin.index.json'
    index.write_text(json.dumps({'weight_map': files}))
    weights = open_weights(tmp_path)
    assert all(weights[name].equal(x) for name, x in state.items())
    (tmp_path / 'pytorch_model-1.bin').write_bytes(b'junk')
    with pytest.raises(ValueError, match='pytorch_model-1.bin is damaged, or has the format'):
        open_weights(tmp_path)
    index.write_text('[]')
    with pytest.raises(ValueError, match='index.json is damaged'):
        open_weights(tmp_path)
