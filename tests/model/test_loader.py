"""Loaders: names and shapes of weights are checked before the first value is read."""

from collections import ChainMap

import pytest
import torch
from torch import nn

from tests.weights import BytesRead, save_sharded
from torchgpipe import GPipe
from torchgpipe.model.loader import Loader
from torchgpipe.model.weights import open_weights


def on_meta(make):
    with torch.device('meta'):
        return make()


def model():
    """Return a model with one tensor in two layers."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 3))
    layers[2].weight = layers[0].weight
    return layers


@pytest.mark.parametrize('name', ['0.weight', '2.weight'])
def test_a_shared_tensor_is_read_once(tmp_path, name):
    expected = model()
    state = expected.state_dict()
    del state[name]
    save_sharded(state, tmp_path, 2)
    with BytesRead() as read:
        gpipe = GPipe(on_meta(model), [4], devices=['cpu'], weights=tmp_path)
    assert gpipe[0].weight is gpipe[2].weight
    assert read.number == sum(x.nbytes for x in state.values())
    for key, x in expected.state_dict().items():
        assert torch.equal(x, gpipe.state_dict()[key])


@pytest.mark.parametrize('wrong', ['name', 'shape'])
def test_weights_of_another_model_are_refused_before_a_value_is_read(tmp_path, wrong):
    state = model().state_dict()
    if wrong == 'name':
        state['3.other'] = state.pop('3.bias')
        match = r"missing \['3.bias'\], unexpected \['3.other'\]"
    else:
        state['3.bias'] = torch.ones(4)
        match = r"'3.bias' has shape \(4,\) in them, and \(3,\) in the module"
    save_sharded(state, tmp_path, 2)
    with BytesRead() as read, pytest.raises(ValueError, match=match):
        Loader(tmp_path, on_meta(model))
    assert read.number == 0


def test_an_error_has_the_first_names_only():
    state = {f'{k}.weight': torch.ones(1) for k in range(7, 27)}
    with pytest.raises(ValueError) as error:
        Loader(state, on_meta(model))
    assert "'9.weight', '10.weight', '11.weight'] and 15 more" in str(error.value)
    assert 'and 5 more' in str(error.value)


class Renamed(nn.Linear):
    """A layer that loads the names of an earlier version."""

    def _load_from_state_dict(self, state, prefix, *args):
        if f'{prefix}kernel' in state:
            state[f'{prefix}weight'] = state.pop(f'{prefix}kernel')
        super()._load_from_state_dict(state, prefix, *args)


def test_a_layer_that_renames_its_weights():
    state = nn.Sequential(nn.Linear(2, 3)).state_dict()
    state['0.kernel'] = state.pop('0.weight')
    gpipe = GPipe(
        on_meta(lambda: nn.Sequential(Renamed(2, 3))), [1], devices=['cpu'], weights=state
    )
    assert torch.equal(gpipe[0].weight, state['0.kernel'])


def test_a_buffer_of_no_state_dict_in_addition_to_a_file(tmp_path):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(2))
            self.register_buffer('table', torch.empty(2), persistent=False)

    save_sharded({'0.weight': torch.ones(2)}, tmp_path, 1)
    weights = ChainMap({'0.table': torch.tensor([3.0, 4.0])}, open_weights(tmp_path))
    gpipe = GPipe(on_meta(lambda: nn.Sequential(Table())), [1], devices=['cpu'], weights=weights)
    assert gpipe[0].table.tolist() == [3, 4] and gpipe[0].weight.tolist() == [1, 1]


def test_two_values_for_one_tensor(tmp_path):
    """Files of a model that ties its weights may have both names, if they are equal."""
    state = model().state_dict()
    state['2.weight'] = state['2.weight'].clone()
    save_sharded(state, tmp_path, 2)
    gpipe = GPipe(on_meta(model), [4], devices=['cpu'], weights=tmp_path)
    assert torch.equal(gpipe[2].weight, state['0.weight'])
    state['2.weight'] += 1
    save_sharded(state, tmp_path, 2)
    with pytest.raises(ValueError, match="'0.weight' and '2.weight' are one tensor in the module"):
        GPipe(on_meta(model), [4], devices=['cpu'], weights=tmp_path)
