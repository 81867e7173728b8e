"""The base of pipelines: names of layers, and layers that are replaced."""

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.helpers import assert_same, call, gradients, small_model
from tests.skip.layers import popping, stashing
from tests.test_gpipe import pipe
from torchgpipe import GPipe


@devices
def test_the_sequence_protocol(devices):
    layers = list(small_model())
    model = pipe(nn.Sequential(*layers), devices=devices(2))
    assert len(model) == 8 and list(model) == layers
    assert model[0] is layers[0] and model[-1] is layers[-1] and model[-8] is layers[0]
    for index in (8, -9):
        with pytest.raises(IndexError):
            model[index]


@devices
def test_names_of_a_wrapped_and_an_unwrapped_module_are_equal(devices):
    module = nn.Sequential(
        OrderedDict(a=nn.Linear(1, 1), b=nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)))
    ).double()
    model = pipe(module, [1, 1], devices=devices(2))
    for names in ('named_modules', 'named_children', 'named_parameters', 'named_buffers'):
        pairs = [(name, value) for name, value in getattr(module, names)() if name]
        assert [(name, value) for name, value in getattr(model, names)() if name] == pairs
    assert model.get_submodule('b.1') is module[1][1] and model.a is module[0]
    assert model.get_parameter('b.1.weight') is module[1][1].weight
    assert model.get_buffer('b.0.running_mean') is module[1][0].running_mean
    assert model.get_submodule('') is model
    outer = dict(nn.Sequential(model).named_modules())
    assert list(outer) == ['', '0', '0.a', '0.b', '0.b.0', '0.b.1']
    assert model.get_submodule('partitions.1.b') is module[1]
    with pytest.raises(AttributeError):
        model.get_submodule('c')


@devices
def test_layers_keep_the_modes_that_they_had(devices):
    model = small_model()
    model[1].eval()
    gpipe = pipe(model, devices=devices(2))
    assert gpipe.training and gpipe.partitions[0].training and not gpipe[1].training


@devices
def test_a_layer_that_is_replaced_is_so_in_its_partition(devices):
    for replace in [setattr, nn.Module.set_submodule, nn.Module.add_module]:
        plain, x = small_model(), torch.rand(4, 4, dtype=torch.double)
        gpipe = pipe(copy.deepcopy(plain), chunks=2, checkpoint='always', devices=devices(2))
        call(gpipe, x)
        for name in ('0', '6'):
            layer = nn.Linear(4, 4).double()
            setattr(plain, name, copy.deepcopy(layer))
            replace(gpipe, name, layer)
        for net in (gpipe, copy.deepcopy(gpipe), pickle.loads(pickle.dumps(gpipe))):
            plain.zero_grad()
            expected, output = plain(x), call(net, x)
            expected.sum().backward(), output.sum().backward()
            assert_same([output], [expected])
            assert_same(gradients(net), gradients(plain))
            assert net.partitions[1]._modules['6'] is net[6] is net.get_submodule('6')
            assert net[6].weight.device == net[4].weight.device
        del net
        assert list(gpipe.partitions[0]) == list(gpipe)[:4]


@devices
def test_skips_go_their_way_when_layers_that_have_them_come_later(devices):
    plain, x = small_model(), torch.rand(4, 4, dtype=torch.double)
    gpipe = pipe(copy.deepcopy(plain), chunks=2, devices=devices(2))
    call(gpipe, x)
    gpipe.set_submodule('1', stashing('alone')())
    gpipe.set_submodule('5', popping('alone')())
    stashed = plain[0](x)
    assert_same([call(gpipe, x)], [plain[6:](plain[2:5](stashed) + stashed)])


@devices
def test_partitions_follow_before_anything_asks_for_them(devices):
    """Each of these is the first to look at a layer that has been replaced."""
    for look in (
        lambda model: model[0],
        lambda model: next(iter(model)),
        lambda model: model.partitions[0][0],
        lambda model: model.get_submodule('0'),
    ):
        model = pipe(devices=devices(2))
        layer = nn.Linear(4, 4).double()
        model.set_submodule('0', layer)
        assert look(model) is layer
    model = pipe(devices=devices(2))
    model.set_submodule('1', nn.Dropout())
    assert not model.eval()[1].training


@devices
def test_a_layer_cannot_be_replaced_in_a_partition_or_by_one_that_does_not_fit(devices):
    """An optimizer made of the parameters of the model would not know of it."""
    x = torch.rand(2, 4, dtype=torch.double, device=devices.first)
    for replace in (
        lambda model: model.partitions[0].__setattr__('0', nn.Identity()),
        lambda model: model.partitions[0].add_module('more', nn.Identity()),
        lambda model: model.partitions[0].__delitem__(0),
    ):
        model = pipe(devices=devices(2))
        replace(model)
        with pytest.raises(RuntimeError, match='has been replaced, added or removed'):
            model(x)
    for layer, error, match in (
        (None, ValueError, "layer '0' is None"),
        (stashing('alone')(), TypeError, 'do not match'),
    ):
        model = pipe(devices=devices(2))
        model.add_module('0', layer)
        for _ in range(2):
            with pytest.raises(error, match=match):
                model(x)
    model = pipe(devices=devices(2))
    inner = GPipe(nn.Sequential(nn.Identity()), [1], devices=['cpu'])
    model.set_submodule('0', inner), model.set_submodule('1', inner[0])
    with pytest.raises(ValueError, match='can stand nowhere else'):
        model(x)


@devices
def test_modules_that_are_added_later(devices):
    gpipe = pipe(chunks=2, devices=devices(2))
    gpipe.criterion = nn.Linear(1, 1)
    gpipe(torch.rand(4, 4, dtype=torch.double, device=devices.first)).sum().backward()
    assert len(gpipe) == 8 and gpipe.criterion.weight.shape == (1, 1)
    assert 'criterion' in dict(gpipe.named_modules())
    assert 'criterion.weight' in gpipe.state_dict() and len(list(gpipe.parameters())) == 10


@devices
def test_layers_with_names_of_its_own(devices):
    """Attribute access returns the attribute. Functions that take names find the layer."""
    names = ['_engine', '_names', 'balance', 'chunks', 'devices', 'checkpoint']
    model = nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in names)).double()
    gpipe = pipe(model, [3, 3], chunks=2, devices=devices(2))
    x = torch.rand(4, 2, device=devices.first).double()
    gpipe(x).sum().backward()
    assert gpipe.chunks == 2 and gpipe.balance == [3, 3]
    assert list(gpipe.state_dict()) == list(model.state_dict())
    assert [name for name, _ in gpipe.named_parameters()] == list(model.state_dict())
    for name in names:
        assert gpipe.get_submodule(name) is model.get_submodule(name)
        assert gpipe.get_parameter(name + '.weight').grad is not None
    # Functions that go from attribute to attribute raise an error.
    with pytest.raises(TypeError):
        torch.func.functional_call(gpipe, model.state_dict(), x)


@devices
def test_the_mode_covers_all_modules(devices):
    model = pipe(small_model().eval(), devices=devices(2))
    assert not any(module.training for module in model.modules())
    assert all(module.training for module in model.train().modules())
    assert not any(module.training for module in model.eval().modules())
