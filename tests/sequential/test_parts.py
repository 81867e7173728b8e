"""The parts of a model in layers, and their names: the names in the model."""

import copy
from collections import ChainMap, OrderedDict

import pytest
import torch
from torch import nn

from tests.sequential.test_cuts import linears
from tests.sequential.test_record import Model, check, halves, sample
from torchgpipe import GPipe
from torchgpipe.sequential import original_names, to_sequential


class Tied(nn.Module):
    """A table under two names and in a third place, unused layers, buffers of each kind."""

    def __init__(self, persistent=False):
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.stack = nn.ModuleDict({'words': self.words, 'body': linears(2)})
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.words.weight
        self.unused = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.body = nn.Module()
        self.body.forgotten, self.body.used = nn.Linear(1, 1), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer('kept', torch.ones(4))
        self.register_buffer('lost', torch.ones(4), persistent=persistent)
        self.register_buffer('none', None)

    def forward(self, ids):
        x = self.words(ids) * self.scale + self.kept * self.lost
        for layer in self.stack['body']:
            x = layer(x)
        return self.head(self.body.used(x))


def test_names_equal_the_model():
    model, ids = Tied(), torch.randint(9, (4, 3))
    layers = to_sequential(copy.deepcopy(model), ids)
    pipe = GPipe(layers, [2, len(layers) - 2], devices=['cpu', 'cpu'], chunks=2)
    state = model.state_dict()
    for converted in (layers, pipe):
        found = original_names(converted.state_dict())
        assert found.keys() == state.keys()
        model.load_state_dict(found)
        other = {
            name: torch.rand_like(x) if x.is_floating_point() else x for name, x in state.items()
        }
        tied = other['words.weight']
        other.update({name: tied for name in ('stack.words.weight', 'head.weight')})
        converted.load_state_dict(other)
        again = original_names(converted.state_dict())
        assert all(torch.equal(again[name], x) for name, x in other.items())
        converted.load_state_dict(
            {f'{20 + k}.{name}': x for k, (name, x) in enumerate(state.items())}
        )
        again = original_names(converted.state_dict())
        assert all(torch.equal(again[name], x) for name, x in state.items())
    with pytest.raises(RuntimeError, match='Missing key.*scale'):
        pipe.load_state_dict({name: x for name, x in state.items() if name != 'scale'})
    with pytest.raises(RuntimeError, match='Unexpected key.*foreign'):
        pipe.load_state_dict({**state, 'foreign.weight': torch.ones(1)})
    with pytest.raises(ValueError, match='begin with the number of a layer'):
        original_names(state)
    assert [name for name, x in layers.named_buffers() if 'lost' in name]


def test_a_sequential_model_keeps_its_names_apart():
    """``0.weight`` may be of the model, and of a layer in it."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    layers = to_sequential(copy.deepcopy(model), torch.randn(4, 3))
    assert [*layers.state_dict()][:3] == ['0.0.weight', '0.0.bias', '1.1.0.weight']
    x = torch.randn(4, 3)
    layers.load_state_dict(model.state_dict())
    assert torch.equal(layers(x), model(x))
    layers.load_state_dict({name: x * 2 for name, x in layers.state_dict().items()})
    assert torch.equal(layers[0].state_dict()['0.weight'], 2 * model[0].weight)


class Numbered(nn.Module):
    """A model with a name that a layer has as well, for another parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))
        self.add_module('0', nn.Linear(4, 4, bias=False))

    def forward(self, x):
        return self.get_submodule('0')(x @ self.weight)


def test_a_name_of_a_layer_that_is_one_of_the_model_as_well():
    """All names together decide which one is meant."""
    model, x = Numbered(), torch.randn(4, 4)
    layers = to_sequential(copy.deepcopy(model), x)
    assert [*layers.state_dict()] == ['0.weight', '1.0.weight']
    other = Numbered()
    for state in (other.state_dict(), to_sequential(other, x).state_dict()):
        layers.load_state_dict(to_sequential(model, x).state_dict())
        assert torch.equal(layers(x), model(x))
        layers.load_state_dict(state)
        assert torch.equal(layers(x), other(x))


def test_weights_have_the_names_of_the_model(tmp_path):
    model, ids = Tied(persistent=True), torch.randint(9, (4, 3))
    torch.save(model.state_dict(), tmp_path / 'model.pt')
    with torch.device('meta'):
        empty = Tied(persistent=True)
    layers = to_sequential(empty, ids.to('meta'))
    pipe = GPipe(
        layers,
        [2, len(layers) - 2],
        devices=['cpu', 'cpu'],
        chunks=2,
        weights=tmp_path / 'model.pt',
    )
    torch.testing.assert_close(pipe(ids), model(ids))  # Kernels differ by the number of rows.
    mine = {'1.' + name: x for name, x in model.state_dict().items()}
    layers = to_sequential(Tied(persistent=True), ids)
    pipe = GPipe(layers, [2, len(layers) - 2], devices=['cpu', 'cpu'], weights=mine)
    assert torch.equal(pipe(ids), model(ids))


def test_weights_may_have_buffers_that_are_in_no_state_dict():
    """As tables that a constructor computes. They are taken by the names of the model, too."""
    model, ids = Tied(), torch.randint(9, (4, 3))
    model.lost.fill_(3)
    more = ChainMap({'lost': model.lost}, model.state_dict())
    for weights in (more, {'0.lost': model.lost, **model.state_dict()}):
        with torch.device('meta'):
            layers = to_sequential(Tied(), ids.to('meta'))
        with pytest.raises(ValueError, match="value to '0.lost' of .* in no state dict: Ch"):
            GPipe(layers, [len(layers)], devices=['cpu'], weights=model.state_dict())
        pipe = GPipe(layers, [2, len(layers) - 2], devices=['cpu', 'cpu'], weights=weights)
        torch.testing.assert_close(pipe(ids), model(ids))
    layers = to_sequential(Tied(), ids)
    with pytest.raises(ValueError, match="unexpected .'foreign'."):
        GPipe(layers, [len(layers)], devices=['cpu'], weights={**more, 'foreign': model.lost})
    for other in (model.lost[..., :1], model.lost.to(torch.double)):
        with pytest.raises(ValueError, match="'lost' of the weights is torch.float"):
            GPipe(layers, [len(layers)], devices=['cpu'], weights={**more, 'lost': other})
    plain = nn.Sequential(to_sequential(Tied(), ids)[0])
    plain[0].lost.zero_()
    plain = nn.Sequential(nn.Sequential(OrderedDict(inside=plain[0])))
    state = plain.state_dict()
    pipe = GPipe(plain, [1], devices=['cpu'], weights={**state, '0.inside.lost': model.lost})
    assert pipe[0].inside.lost[0] == 3
    with pytest.raises(ValueError, match="unexpected .'inside.lost'."):
        GPipe(plain, [1], devices=['cpu'], weights={**state, 'inside.lost': model.lost})


def test_shared_modules_stay_shared():
    """In layers that have it in common, when they are loaded, moved or get another type."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.body = nn.Embedding(6, 4), nn.Linear(4, 4)
            self.register_buffer('scale', torch.ones(4))

        def forward(self, ids):
            x = self.body(self.words(ids) * self.scale)
            return (x * self.scale) @ self.words.weight.t()

    ids = torch.randint(6, (4, 3))
    for change in (
        lambda m, state: m.load_state_dict(state, assign=True),
        lambda m, state: m.double(),
        lambda m, state: m.to_empty(device='cpu'),
    ):
        model = Tied()
        state = copy.deepcopy(model.state_dict())
        layers = to_sequential(model, ids)
        change(layers, state)
        assert len([*layers.parameters()]) == 3 and len([*layers.buffers()]) == 1
    pipe = GPipe(to_sequential(Tied(), ids), [1, 2], devices=['cpu', 'cpu'], chunks=2)
    pipe.load_state_dict(state, assign=True)
    assert len([*pipe.parameters()]) == 3


def test_one_name_of_a_tied_parameter_is_enough():
    """Files of safetensors have one name, and PyTorch asks for all."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.body, self.head = nn.Embedding(6, 4), nn.Linear(4, 4), nn.Linear(4, 6)
            self.head.weight = self.words.weight

        def forward(self, ids):
            return self.head(self.body(self.words(ids)))

    ids = torch.randint(6, (4, 3))
    model, layers = Net(), to_sequential(Net(), ids)
    pipe = GPipe(to_sequential(Net(), ids), [2, 1], devices=['cpu', 'cpu'], chunks=2)
    for left in ('words.weight', 'head.weight'):
        state = {name: x for name, x in model.state_dict().items() if name != left}
        for numbers in ('', '7.'):
            for each in (layers, pipe):
                each.load_state_dict({numbers + name: x for name, x in state.items()})
                torch.testing.assert_close(each(ids), model(ids))
                torch.nn.init.zeros_(each[0].words.weight)
        del state['body.bias']
        with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "1.body.bias"'):
            pipe.load_state_dict(state)
    del state['words.weight']
    with pytest.raises(RuntimeError, match='"0.words.weight", "1.body.bias", "2.head.weight"'):
        layers.load_state_dict(state)


def test_states_that_are_no_tensors_are_not_tied():
    class Keeps(nn.Linear):
        def get_extra_state(self):
            return 1

        def set_extra_state(self, state):
            assert state == 1

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = Keeps(3, 3), Keeps(3, 3)

        def forward(self, x):
            return self.last(self.first(x))

    model = Net()
    layers, state = to_sequential(model, torch.rand(4, 3)), model.state_dict()
    layers.load_state_dict(state)
    del state['last._extra_state']
    with pytest.raises(RuntimeError, match='"1.last._extra_state"'):
        layers.load_state_dict(state)


def test_submodules_may_have_the_names_of_attributes_of_layers():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.code, self.stashable = nn.Linear(6, 6), nn.Linear(6, 6)
            self.register_buffer('_code', torch.ones(6))

        def forward(self, x):
            return self.stashable(self.code(x) * self._code)

    layers = check(Named(), sample())
    assert len(layers) == 2


def test_a_converted_model_can_be_converted():
    model = Model(halves)
    layers = to_sequential(to_sequential(model, sample()), sample())
    assert torch.equal(layers(sample()), model(sample()))
    whole = nn.Sequential(to_sequential(model, sample()), nn.Linear(6, 6))
    inside = to_sequential(whole, sample())
    pipe = GPipe(inside, [1, len(inside) - 1], devices=['cpu', 'cpu'], chunks=2)
    assert torch.allclose(pipe(sample()), whole(sample()), atol=1e-6)


def test_buffers_that_nothing_uses_are_there():
    model = Model(halves)
    model.register_buffer('unused', torch.ones(3), persistent=False)
    layers = to_sequential(model, sample())
    assert layers[-1].unused is model.unused
    assert '1.unused' not in layers.state_dict()


class Configured(nn.Module):
    """A module that looks up attributes in a dictionary, as models of diffusers do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.settings = {'act': 'relu'}

    def __getattr__(self, name):
        """Return an entry if a dictionary has an attribute of that name."""
        if 'settings' in self.__dict__ and hasattr(self.__dict__['settings'], name):
            return self.__dict__['settings'][name]
        return super().__getattr__(name)

    def forward(self, x):
        return self.second(self.first(x).relu())


def test_in_v0_22_a_module_that_raises_a_key_error_for_an_attribute_was_not_converted():
    model, x = nn.Sequential(Configured(), Configured()), torch.rand(4, 4)
    with pytest.raises(KeyError):
        hasattr(model[0], '__getitem__')
    layers = to_sequential(model, x, grain='layer')
    assert len(layers) == 4
    assert torch.equal(layers(x), model(x))
