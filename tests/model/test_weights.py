"""Weights: tensors of files, found by name and read on request."""

import pytest
import torch
from torch import nn

from torchgpipe.model.weights import open_weights


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
