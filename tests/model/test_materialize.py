"""Models built on the meta device: their values, and how much of them is anywhere at a time."""

import copy
import json
import subprocess
import sys
from collections.abc import Mapping
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from benchmarks.harness.memory import LiveTensors
from tests.devices import DEVICES, devices
from tests.helpers import assert_same, call, gradients
from torchgpipe import GPipe
from torchgpipe.sequential import original_names, to_sequential
from torchgpipe.skip import pop, skippable, stash


class Table(nn.Module):
    """Add a table that no state dict has, as rotary embeddings do."""

    def __init__(self, width=4, resets=True):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))
        self.register_buffer('table', torch.empty(width), persistent=False)
        if resets:
            self.reset_parameters = self.set
            self.reset_parameters()

    def set(self):
        """Make another table, and write to the scale."""
        self.table = torch.arange(len(self.table)).to(self.table)
        nn.init.normal_(self.scale)

    def forward(self, x):
        return x + self.scale * self.table


class Scaled(nn.Module):
    """A module with parts that resets some of their values."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.reset_parameters()

    def reset_parameters(self):
        """Draw weights of its own, the old way, and in place of the parameter."""
        self.linear.weight.data.normal_()
        self.linear.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return self.norm(self.linear(x))


class Last(nn.Module):
    """Return the first of several."""

    def forward(self, xs):
        return xs[0]


@skippable(stash=['x'])
class Stash(nn.Linear):
    """A layer whose names in a state dict have a level of their own."""

    def forward(self, x):
        yield stash('x', x)
        return super().forward(x)


@skippable(pop=['x'])
class Pop(nn.Module):
    """Add the stashed tensor."""

    def forward(self, x):
        return x + (yield pop('x'))


def network():
    """Return a model of most kinds of layers."""
    return nn.Sequential(
        nn.Linear(4, 4),
        Stash(4, 4),
        Scaled(),
        Pop(),
        Table(),
        nn.Unflatten(1, (2, 2)),
        nn.LSTM(2, 4, num_layers=2, batch_first=True),
        Last(),
        nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        nn.Unflatten(2, (1, 4)),
        nn.Conv2d(2, 3, 1),
        nn.GroupNorm(3, 3),
        nn.PReLU(),
        nn.Flatten(),
        nn.Linear(12, 2),
    )


BALANCE = [2, 6, 7]


def on_meta(make=network):
    """Build a model without memory."""
    with torch.device('meta'):
        return make()


def values(module):
    """Return all parameters and buffers by their names, on the CPU."""
    return {
        name: x.detach().cpu() for name, x in (*module.named_parameters(), *module.named_buffers())
    }


def assert_equal(actual, expected):
    """Compare all values of two modules."""
    actual, expected = values(actual), values(expected)
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@devices
def test_initial_values_equal_the_model_built_on_the_cpu(devices):
    torch.manual_seed(1)
    plain = network()
    after = torch.rand(1)
    module = on_meta()
    torch.manual_seed(1)
    gpipe = GPipe(module, BALANCE, devices=devices(3), chunks=2)
    assert torch.equal(torch.rand(1), after)
    assert_equal(gpipe, plain)
    for partition, device in zip(gpipe.partitions, devices(3)):
        place = 'cpu' if device.startswith('cpu') else device
        assert {str(x.device) for x in partition.state_dict().values()} <= {place}
    x = torch.randn(5, 4, dtype=torch.double)
    assert_same([call(gpipe.double().eval(), x)], [plain.double().eval()(x)])


@devices
def test_within_the_context_of_another_device(devices):
    torch.manual_seed(1)
    plain = network()
    with torch.device('meta'):
        module = network()
        torch.manual_seed(1)
        gpipe = GPipe(module, BALANCE, devices=devices(3))
    assert_equal(gpipe, plain)


@devices
def test_training_goes_on_as_usual(devices):
    torch.manual_seed(1)
    plain = network()
    module = on_meta()
    torch.manual_seed(1)
    gpipe = GPipe(module, BALANCE, devices=devices(3), deferred_batch_norm=True)
    for net in (plain.double(), gpipe.double()):
        torch.manual_seed(2)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            call(net, torch.randn(5, 4, dtype=torch.double)).square().sum().backward()
            optimizer.step()
    assert_same(gradients(gpipe), gradients(plain), 1e-10)
    assert_same([x.cpu() for x in gpipe.buffers()], plain.buffers(), 1e-10)


@devices
def test_tensors_that_have_a_value_keep_it(devices):
    real = nn.Linear(4, 4)
    expected = real.weight.detach().clone()
    module = nn.Sequential(
        on_meta(lambda: nn.Linear(4, 4)), nn.Sequential(real, on_meta(lambda: nn.Linear(4, 4)))
    )
    GPipe(module, [1, 1], devices=devices(2))
    assert module[1][0] is real and torch.equal(real.weight.cpu(), expected)
    assert not any(x.is_meta for x in module.parameters())


@devices
def test_a_module_whose_reset_would_overwrite_a_value_is_not_reset(devices):
    scaled = on_meta(Scaled)
    scaled.norm = nn.BatchNorm1d(4)
    with torch.no_grad():
        scaled.norm.weight.fill_(3)
    torch.manual_seed(1)
    expected = nn.Linear(4, 4).weight
    with pytest.raises(ValueError, match='init=lambda module: None keeps the values of reset_p'):
        GPipe(nn.Sequential(copy.deepcopy(scaled)), [1], devices=devices(1))
    torch.manual_seed(1)
    GPipe(nn.Sequential(scaled), [1], devices=devices(1), init=lambda module: None)
    assert torch.equal(scaled.linear.weight.cpu(), expected)
    assert (scaled.norm.weight == 3).all()


def tied():
    """Return a model with a parameter, a buffer and a module in two places each."""
    layer = nn.Sequential(nn.Linear(4, 4), Table(), nn.Linear(4, 4), Table(), nn.PReLU())
    layer.append(nn.Sequential(layer[0]))
    layer[0].weight.tag = 'kept'
    layer[2].weight, layer[3].table = layer[0].weight, layer[1].table
    model = nn.Sequential(layer, nn.Linear(4, 4), Table(0), nn.Linear(4, 4), layer, layer[4])
    model[3].weight = layer[0].weight
    return model


@devices
def test_shared_tensors_stay_one(devices):
    torch.manual_seed(1)
    plain = tied()
    module = on_meta(tied)
    torch.manual_seed(1)
    gpipe = GPipe(module, [1, 5], devices=devices(2))
    assert gpipe[0][0].weight is gpipe[0][2].weight and gpipe[0][1].table is gpipe[0][3].table
    assert gpipe[3].weight is gpipe[0][0].weight and gpipe[4] is gpipe[0]
    assert gpipe[0][0].weight.tag == 'kept'
    assert_equal(gpipe, plain)


@devices
def test_a_shared_tensor_is_loaded_by_any_of_its_names(devices):
    for name in ['0.0.weight', '0.2.weight', '3.weight']:
        plain = tied()
        state = plain.state_dict()
        del state[name]
        gpipe = GPipe(on_meta(tied), [1, 5], devices=devices(2), weights=state)
        assert gpipe[0][0].weight is gpipe[0][2].weight, name
        assert_equal(gpipe, plain)


@devices
def test_requires_grad_strides_and_mode_stay(devices):
    module = on_meta(lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.Linear(4, 4)))
    module[0].requires_grad_(False).to(memory_format=torch.channels_last)
    module.eval()
    gpipe = GPipe(module, [1, 1], devices=devices(2))
    assert [x.requires_grad for x in gpipe.parameters()] == [False, False, True, True]
    assert gpipe[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert not gpipe.training


WITHOUT_VALUE = {
    'no reset': (lambda: Table(resets=False), "'1.table' of a Table"),
    'nothing that a reset reaches': (lambda: Forgetful(), "'1.extra' of a Forgetful"),
    'parametrized': (
        lambda: weight_norm(nn.Linear(4, 4)),
        "'1.parametrizations.weight.original0'",
    ),
    'of another type': (lambda: Other(), "'1.weight' of a Other"),
    'nested': (lambda: nn.Sequential(nn.Linear(4, 4), Table(resets=False)), "'1.1.table'"),
}


class Other(nn.Linear):
    """A module with a tensor of which only its author knows how to make another."""

    def __init__(self):
        super().__init__(4, 4)
        self.weight = nn.Parameter(self.weight.detach().as_subclass(Type))


class Type(torch.Tensor):
    """Another type of tensors."""


class Forgetful(nn.Linear):
    """A module whose reset leaves a buffer out."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer('extra', torch.ones(4))


def test_tensors_without_a_value_are_named():
    for make, name in WITHOUT_VALUE.values():
        with pytest.raises(ValueError, match='nothing gives a value to') as error:
            GPipe(
                on_meta(lambda: nn.Sequential(nn.Linear(4, 4), make())),
                [1, 1],
                devices=['cpu'] * 2,
            )
        assert name in str(error.value) and "'0." not in str(error.value)


def test_a_reset_that_writes_where_pytorch_does_not_count():
    class Data(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4))
            self.reset_parameters()

        def reset_parameters(self):
            self.weight.data.fill_(2)

    assert GPipe(on_meta(lambda: nn.Sequential(Data())), [1], devices=['cpu'])[0].weight[0] == 2


def test_tensors_that_cannot_be_initialized_are_named_even_with_weights():
    with pytest.raises(ValueError, match="nothing gives a value to '0.weight'"):
        GPipe(
            on_meta(lambda: nn.Sequential(Other())),
            [1],
            devices=['cpu'],
            weights=nn.Linear(4, 4).state_dict(prefix='0.'),
        )


def test_a_module_half_on_meta_is_named():
    layer = on_meta(lambda: nn.Linear(4, 4))
    layer.bias = nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match="'0.weight' of a Linear"):
        GPipe(nn.Sequential(layer), [1], devices=['cpu'])
    assert (layer.bias == 1).all()


def save(folder, state, kind):
    """Save a state dict in one of the ways."""
    if kind == 'mapping':
        return state
    if kind == 'torch':
        torch.save(state, folder / 'model.pt')
        return str(folder / 'model.pt')
    save_file = pytest.importorskip('safetensors.torch').save_file
    state = {name: x.contiguous().clone() for name, x in state.items()}
    if kind == 'safetensors':
        save_file(state, folder / 'model.safetensors')
        return folder / 'model.safetensors'
    names, shards = list(state), {}
    for k in range(3):
        file = f'model-{k}-of-3.safetensors'
        save_file({name: state[name] for name in names[k::3]}, folder / file)
        shards.update(dict.fromkeys(names[k::3], file))
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': shards}))
    return folder / 'model.safetensors.index.json'


KINDS = ['mapping', 'torch', 'safetensors', 'sharded']


@devices
def test_weights(devices, tmp_path):
    plain = network()
    plain(torch.randn(5, 4))  # moves running statistics
    for kind in KINDS:
        folder = tmp_path / kind
        folder.mkdir()
        weights = save(folder, plain.state_dict(), kind)
        for make in (network, on_meta):
            assert_equal(GPipe(make(), BALANCE, devices=devices(3), weights=weights), plain)
        if kind != 'mapping':
            (folder / 'config.json').write_text('{}')
            assert_equal(GPipe(on_meta(), BALANCE, devices=devices(3), weights=folder), plain)


class Narrow(nn.Linear):
    """A layer whose constructor draws other values than its reset."""

    def __init__(self, *args):
        super().__init__(*args)
        nn.init.normal_(self.weight, std=0.02)


def draw(module):
    """Draw the values of a layer."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def test_values_of_a_constructor_are_not_replaced_silently():
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Narrow(4, 4)))
    with pytest.raises(ValueError, match="constructor of the model gives to '1.weight' of a Na"):
        GPipe(model, [2], devices=['cpu'])
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 4), Narrow(4, 4)))
    gpipe = GPipe(model, [1, 1], devices=['cpu'] * 2, init=draw)
    assert all(layer.weight.std() < 0.05 and not layer.bias.any() for layer in gpipe)


class Scale(nn.Module):
    """A layer that nothing resets."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))


def zeros():
    """Return a layer with a parameter of zeros in place of its own."""
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.zeros(4, 4))
    return layer


def test_values_that_took_the_place_of_the_first_ones():
    """On the meta device they are lost, and a reset would give others."""
    for make in [
        zeros,
        lambda: copy.deepcopy(nn.Linear(4, 4)),
        lambda: nn.Linear(4, 4, device='cpu').to('meta'),
        lambda: nn.Embedding.from_pretrained(torch.zeros(4, 4)),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, batch_first=True), 1),
    ]:
        model = on_meta(lambda: nn.Sequential(make()))
        with pytest.raises(ValueError, match='other initial values than the constructor'):
            GPipe(model, [1], devices=['cpu'])


def test_buffers_that_weights_leave_out_begin_at_zero():
    """Batch normalization of older checkpoints has no number of mini-batches."""
    state = nn.Sequential(nn.BatchNorm1d(400)).state_dict()
    del state['0.num_batches_tracked']
    kept = [torch.full((1,), -7 - k) for k in range(2000)]
    del kept  # So memory that is not initialized has other values.
    model = on_meta(lambda: nn.Sequential(nn.BatchNorm1d(400)))
    assert GPipe(model, [1], devices=['cpu'], weights=state)[0].num_batches_tracked == 0


class Reads(Mapping):
    """Weights that count how often each of them is read."""

    def __init__(self, weights):
        self.weights = weights
        self.counts = dict.fromkeys(weights, 0)

    def __getitem__(self, name):
        self.counts[name] += 1
        return self.weights[name]

    def __iter__(self):
        return iter(self.weights)

    def __len__(self):
        return len(self.weights)


def test_each_tensor_is_read_once():
    """Also a buffer that is in no state dict: such files may be large and far away."""
    plain = nn.Sequential(Table(), nn.Linear(4, 4))
    weights = Reads({**dict(plain.named_buffers()), **plain.state_dict()})
    model = on_meta(lambda: nn.Sequential(Table(), nn.Linear(4, 4)))
    gpipe = GPipe(model, [1, 1], devices=['cpu'] * 2, weights=weights)
    assert set(weights.counts.values()) == {1} and '0.table' in weights.counts
    assert torch.equal(gpipe[0].table, plain[0].table)


def test_a_function_gives_values_that_no_reset_gives():
    def ones(module):
        if isinstance(module, Scale):
            nn.init.ones_(module.scale)

    def nothing(module):
        pass

    model = on_meta(lambda: nn.Sequential(Scale()))
    with pytest.raises(ValueError, match="nothing gives a value to '0.scale' of a Scale"):
        GPipe(model, [1], devices=['cpu'], init=nothing)
    model = on_meta(lambda: nn.Sequential(Scale()))
    assert GPipe(model, [1], devices=['cpu'], init=ones)[0].scale.eq(1).all()
    assert GPipe(nn.Sequential(Scale()), [1], devices=['cpu'], init=ones)[0].scale.eq(1).all()


def test_a_seed_gives_each_layer_its_own_values():
    def made(n, seed):
        model = on_meta(lambda: nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))))
        return GPipe(model, [4 - n, n], devices=['cpu'] * 2, seed=seed).state_dict()

    before = torch.get_rng_state()
    one, two, other = made(1, 5), made(2, 5), made(1, 6)
    assert torch.equal(torch.get_rng_state(), before)
    for name, x in one.items():
        assert torch.equal(x, two[name]) and not torch.equal(x, other[name])
    assert not torch.equal(one['0.weight'], one['1.weight'])


@pytest.fixture
def pretrained(monkeypatch):
    """Return a class of models that initialize their modules, like Transformers models."""

    class PreTrainedModel(nn.Module):
        def _init_weights(self, module):
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 0.25)
                nn.init.zeros_(module.bias)

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.empty(4))
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(x + self.table).relu()

    class Model(PreTrainedModel):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.empty(4))
            self.first, self.last = Table(), nn.Linear(4, 2)

        def forward(self, x):
            return self.last(self.first(x) * self.scale)

        def _init_weights(self, module):
            super()._init_weights(module)
            if isinstance(module, Table):
                nn.init.constant_(module.table, 3.0)
                nn.init.constant_(module.inner.weight, 0.5)
            if module.__class__ is Model:
                nn.init.constant_(module.scale, 2.0)

    files = {'transformers.modeling_utils': [PreTrainedModel], 'models_of_a_test': [Table, Model]}
    for name, classes in files.items():
        module = ModuleType(name)
        for each in classes:
            each.__module__ = name
            setattr(module, each.__name__, each)
        monkeypatch.setitem(sys.modules, name, module)
    return Model


@pytest.mark.parametrize('grain', ['layer', 'operation'])
def test_a_model_that_initializes_its_modules(pretrained, grain):
    """Also modules that the conversion takes apart, by their classes in the model."""
    layers = on_meta(lambda: to_sequential(pretrained(), torch.zeros(4, 4), grain=grain))
    n = len(layers)
    model = GPipe(layers, [1, n - 1], devices=['cpu'] * 2)
    found = original_names(model.state_dict())
    assert {name: {*x.flatten().tolist()} for name, x in found.items()} == {
        'scale': {2.0},
        'first.table': {3.0},
        'first.inner.weight': {0.5},
        'first.inner.bias': {0.0},
        'last.weight': {0.25},
        'last.bias': {0.0},
    }
    assert not any('original' in layer.__dict__ for layer in model)


def test_a_model_that_was_changed_after_it_initialized_its_modules(pretrained):
    with torch.device('meta'):
        model = nn.Sequential(pretrained())
        nn.init.zeros_(model[0].last.weight)
    with pytest.raises(ValueError, match="other initial values .* to '0.last.weight' of a Linear"):
        GPipe(model, [1], devices=['cpu'])


def test_modules_without_the_model_that_initializes_them(pretrained):
    model = on_meta(lambda: nn.Sequential(pretrained().first))
    with pytest.raises(ValueError, match='nothing gives a value|other initial values'):
        GPipe(model, [1], devices=['cpu'])
    whole = on_meta(lambda: nn.Sequential(pretrained()))
    assert GPipe(whole, [1], devices=['cpu'])[0].first.table.eq(3).all()


def test_modules_of_a_file_that_imports_such_a_model(pretrained, monkeypatch):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

    file = ModuleType('file_of_a_user')
    Block.__module__, file.Model, file.Block = file.__name__, pretrained, Block
    monkeypatch.setitem(sys.modules, file.__name__, file)
    own = on_meta(lambda: nn.Sequential(Block()))
    GPipe(own, [1], devices=['cpu'])


def test_weights_of_another_module():
    state = network().state_dict()
    state['0.scale'] = state['99.weight'] = state.pop('2.linear.weight')
    state['14.weight.old'] = torch.ones(1)
    with pytest.raises(ValueError, match='the weights are not those of the module') as error:
        GPipe(on_meta(), BALANCE, devices=['cpu'] * 3, weights=state)
    assert "missing ['2.linear.weight']" in str(error.value)
    assert "unexpected ['0.scale', '14.weight.old', '99.weight']" in str(error.value)


def test_weights_of_another_size():
    state = network().state_dict()
    state['2.linear.weight'] = torch.ones(5, 5)
    with pytest.raises(ValueError, match=r"'2.linear.weight' has shape \(5, 5\) in them"):
        GPipe(on_meta(), BALANCE, devices=['cpu'] * 3, weights=state)
    with pytest.raises(RuntimeError, match='size mismatch for linear.weight') as error:
        GPipe(network(), BALANCE, devices=['cpu'] * 3, weights=state)
    assert error.value.__notes__ == ["in layer '2'"]


def test_safetensors_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'safetensors', None)
    (tmp_path / 'model.safetensors').touch()
    with pytest.raises(ImportError, match='pip install safetensors'):
        GPipe(on_meta(), BALANCE, devices=['cpu'] * 3, weights=tmp_path / 'model.safetensors')


WIDTH = 64
SIZE = (WIDTH + 1) * WIDTH * 4


def wide(layers=12):
    """Return a model of equal layers."""
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


class OnHost(LiveTensors):
    """Count tensors in host memory."""

    total = 0

    def _add(self, tensor):
        if tensor.device.type == 'cpu':
            self.total += tensor.nbytes
            super()._add(tensor)


class Source(Mapping):
    """Weights that are made when they are asked for."""

    names = list(on_meta(wide).state_dict())

    def __getitem__(self, name):
        return torch.ones((WIDTH, WIDTH) if name.endswith('weight') else (WIDTH,))

    def __iter__(self):
        return iter(self.names)

    def __len__(self):
        return len(self.names)


@pytest.mark.accelerator
def test_the_host_never_has_more_than_a_layer():
    for weights in [None, Source()]:
        places = DEVICES['accelerators'](3)
        module = on_meta(wide)
        with OnHost().watched() as live:
            gpipe = GPipe(module, [4, 4, 4], devices=places, weights=weights)
        assert SIZE <= live.peak <= 1.5 * SIZE and live.now == 0, weights
        if weights is not None:  # only the selected parameters
            assert live.total == 12 * SIZE, weights
        assert sum(x.nbytes for x in gpipe.parameters()) == 12 * SIZE, weights

        # The counterpart: built on the CPU, all of it is there.
        with OnHost().watched() as live:
            GPipe(wide(), [4, 4, 4], devices=places)
        assert live.peak >= 12 * SIZE, weights


RESIDENT = '''
import re
import sys

import torch
from torch import nn

from torchgpipe import GPipe


def resident():
    """Return the bytes of memory that no file stands for."""
    with open('/proc/self/status') as status:
        return int(re.search(r'RssAnon:\\s+(\\d+)', status.read())[1]) << 10


class Last(nn.Linear):
    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        if not self.weight.is_meta:  # as in the comparison of shapes before
            print(resident() - before)


with torch.device('meta'):
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(15)], Last(1024, 1024))
torch.ones(100) @ torch.ones(100)
before = resident()
GPipe(model, [8, 8], devices=['cpu'] * 2, weights=sys.argv[1])
'''


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != 'linux', reason='reads what Linux says of a process')
@pytest.mark.parametrize('kind', ['torch', 'sharded'])
def test_a_file_is_not_read_into_memory_beside_the_model(kind, tmp_path):
    state = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)]).state_dict()
    path = save(tmp_path, state, kind)
    size = sum(x.nbytes for x in state.values())
    output = subprocess.run(
        [sys.executable, '-c', RESIDENT, path], check=True, capture_output=True, text=True
    )
    assert 0.9 < int(output.stdout) / size < 1.3  # It is 1.9 with what torch.load returns.
