"""Which modules are leaves, called as one and not looked into."""

import pickle
import re
import time
from functools import partial

import pytest
import torch
from torch import nn

from tests.sequential.test_cuts import of
from tests.sequential.test_record import Inner, Model, check, halves, sample
from torchgpipe import GPipe
from torchgpipe.sequential import ConversionError, original_names, to_sequential


def test_blocks_that_are_named_are_leaves():
    model = of(
        lambda m, x: m.head(m.body(x)),
        body=nn.Sequential(
            *(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3))
        ),
        head=nn.Linear(4, 4),
    )
    x = torch.randn(4, 4)
    assert len(to_sequential(model, x, grain='layer')) == 7
    layers = to_sequential(model, x, leaves=['body.?'])
    assert len(layers) == len(to_sequential(model, x, leaves=[*model.body])) == 4
    assert len(to_sequential(model, x, leaves=nn.Sequential)) == 2
    assert 'self.body[0](args_0' in layers[0].code


def test_leaves_that_are_none():
    for leaf, error, match in [
        ('c', ValueError, "no submodule 'c'"),
        (nn.Conv2d, ValueError, 'no submodule'),
        (3, TypeError, 'name of a submodule, a class or a module'),
        (nn.Linear(1, 1), ValueError, 'no submodule'),
    ]:
        with pytest.raises(error, match=match):
            to_sequential(Model(halves), sample(), leaves=[leaf])


def test_a_region_of_a_mode_that_is_so_anyway_stays_one():
    for region in [
        lambda: torch.autocast('cpu', enabled=False),
        torch.enable_grad,
        lambda: torch.inference_mode(False),
    ]:

        def function(m, x):
            with region():
                return (x[:, None] @ x[:, :, None])[:, 0] * x

        with pytest.raises(ConversionError, match='changes grad mode, inference mode or autocast'):
            to_sequential(Model(function), sample())
        model = nn.Sequential(nn.Linear(6, 6), Inner(function), nn.Linear(6, 6))
        layers = to_sequential(model, sample())
        with torch.no_grad(), torch.autocast('cpu', dtype=torch.bfloat16):
            assert torch.equal(layers(sample()), model(sample())), region
            assert layers(sample()).requires_grad == model(sample()).requires_grad, region


def test_a_region_of_autocast_for_the_device_of_a_tensor():
    def function(m, x):
        with torch.autocast(x.device.type, enabled=False):
            return (x[:, None] @ x[:, :, None])[:, 0] * x

    model = nn.Sequential(nn.Linear(6, 6), Inner(function), nn.Linear(6, 6))
    assert 'Inner' in [type(m).__name__ for m in check(model, sample()).modules()]


def test_whether_a_tensor_has_a_gradient_is_left_to_the_module_that_asks():
    def asked(m, x):
        return x * 2 if x.requires_grad else x * 3

    with pytest.raises(ConversionError, match='by whether a tensor has a gradient'):
        to_sequential(Model(asked), sample())
    model = nn.Sequential(nn.Linear(6, 6), Inner(asked), nn.Linear(6, 6))
    layers = check(model, sample())
    with torch.no_grad():
        assert torch.equal(layers(sample()), model(sample()))


def test_a_module_with_backward_hooks_is_a_leaf():
    """And no other one of its class."""
    for register in ['register_full_backward_hook', 'register_full_backward_pre_hook']:

        def tripled(module, *grads):
            return tuple(3 * grad for grad in grads[0])

        model = nn.Sequential(*(nn.Linear(6, 6) if k % 2 else Inner(halves) for k in range(4)))
        getattr(model[2], register)(tripled)
        names = [type(m).__name__ for m in check(model, sample()).modules()]
        assert names.count('Inner') == 1, register


def test_modules_with_more_in_their_state_dicts_are_leaves():
    class Extra(Inner):
        def get_extra_state(self):
            return torch.ones(1)

        def set_extra_state(self, state):
            pass

    model = nn.Sequential(nn.Linear(6, 6), Extra(halves), nn.Linear(6, 6))
    layers = check(model, sample())
    layers.load_state_dict(model.state_dict())


class Renamed(Inner):
    """A module that loads state dicts of an older version, with another name of the weight."""

    def __init__(self, function):
        super().__init__(function)
        self._register_load_state_dict_pre_hook(self.rename)
        self._register_load_state_dict_pre_hook(scale)

    def rename(self, state_dict, prefix, *_):
        name = f'{prefix}old_weight'
        if name in state_dict:
            state_dict[f'{prefix}weight'] = state_dict.pop(name)


def scale(state_dict, prefix, *_):
    state_dict[f'{prefix}weight'] = 3 * state_dict[f'{prefix}weight']


def test_hooks_before_loading_a_module_run_on_its_layers():
    """In v0.9.0, such a module was a leaf, and in place of a large one's blocks was one layer."""
    model = nn.Sequential(nn.Linear(6, 6), Renamed(halves), nn.Linear(6, 6), Renamed(halves))
    layers = to_sequential(model, sample(), leaves=['3'])
    assert [type(m).__name__ for m in layers.modules()].count('Renamed') == 1
    small = pickle.dumps(layers[0])
    assert b'2.weight' not in small and len(small) < len(pickle.dumps(layers))
    old = {
        name.replace('weight', 'old_weight') if name[0] == '1' else name: torch.ones(x.shape)
        for name, x in model.state_dict().items()
    }
    for each in (
        layers,
        GPipe(
            pickle.loads(pickle.dumps(layers)), [1, len(layers) - 1], devices=['cpu:0', 'cpu:1']
        ),
    ):
        each.load_state_dict(old)
        weights = original_names(each.state_dict())
        assert [weights[f'{k}.weight'].mean() for k in range(4)] == [1, 3, 1, 3]
    layers.load_state_dict(layers.state_dict(), strict=True)
    assert model[1].weight.mean() == 3


def sees(module, *_):
    """Be told of the module."""


class Seen(Inner):
    """A module with a hook for loading that reads or changes it."""

    def __init__(self, kind):
        super().__init__(halves)
        if kind == 'self':
            self._register_load_state_dict_pre_hook(self.note)
        elif kind == 'closure':
            self._register_load_state_dict_pre_hook(lambda *_: setattr(self, 'told', True))
        elif kind == 'module':
            self.register_load_state_dict_pre_hook(sees)
        else:
            self._register_load_state_dict_pre_hook(partial(sees, self))

    def note(self, *_):
        self.told = self.weight.shape


def test_a_module_that_its_hook_for_loading_sees_stays_whole():
    for kind in ['self', 'closure', 'module', 'partial']:
        model = nn.Sequential(nn.Linear(6, 6), Seen(kind), nn.Linear(6, 6))
        layers = to_sequential(model, sample())
        assert [whole.name for whole in layers.wholes] == ['1'], kind
        layers.load_state_dict(model.state_dict())


# --- modules that stayed whole
# -------------------------------------------------------------------------------------------------


def by_the_mode(m, x):
    return x * 2 if m.training else x + 1


class Body(Inner):
    """A module that depends on the training mode, and contains layers."""

    def __init__(self, function, width):
        super().__init__(function)
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, x):
        return self.down(self.up(super().forward(x)))


def test_modules_that_stay_whole_are_reported():
    model = nn.Sequential(nn.Linear(6, 6), Body(by_the_mode, 2), Inner(halves), Inner(halves))
    model[3].register_full_backward_hook(lambda *_: None)
    body, named, hooked = to_sequential(model, sample(), leaves=['2']).wholes
    assert re.match(
        r"'1' \(Body\) stays whole, with 41% of the parameters and \d+% of the time: "
        r'its program goes by the training mode \(',
        str(body),
    )
    assert str(body).endswith('in by_the_mode: return x * 2 if m.training else x + 1)')
    assert 'named as a leaf' in str(named) and 'backward hooks' in str(hooked)
    assert to_sequential(nn.Sequential(nn.Linear(6, 6), Inner(halves)), sample()).wholes == []


def test_the_time_of_modules_that_stay_whole_is_reported():
    def slow(m, x):
        time.sleep(0.05)
        return by_the_mode(m, x)

    model = nn.Sequential(nn.Linear(6, 6), Body(by_the_mode, 2), Inner(slow), nn.Linear(6, 6))
    body, short = to_sequential(model, sample(), leaves=['1', '2']).wholes
    assert 0 < body.time < 0.2 < 0.8 < short.time < 1
    assert [whole.time for whole in to_sequential(model, leaves=['1', '2']).wholes] == [None] * 2
    layers = to_sequential(model.to('meta'), sample().to('meta'), leaves=['1', '2'])
    assert layers.wholes[0].time is None and 'time' not in str(layers.wholes[0]).split(':')[0]


@pytest.mark.filterwarnings('error:most of')
def test_a_module_with_most_of_the_model_gives_a_warning():
    """In v0.9.0, nothing was said: two layers, and all of the model in one."""
    model = nn.Sequential(nn.Linear(6, 6), Body(by_the_mode, 60))
    with pytest.warns(
        UserWarning,
        match="most of Sequential is in one of its 2 layers.*'1' "
        r'\(Body\) stays whole, with 95% .*training mode \(',
    ):
        to_sequential(model, sample())
    to_sequential(model, sample(), leaves=['1'])  # It was asked for.
    to_sequential(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 60)), sample())


def test_a_leaf_with_most_of_the_model_is_no_way_out():
    def by_an_element(m, x):
        return x * 2 if x.sum() > 0 else x

    for width in (2, 60):
        model = nn.Sequential(nn.Linear(6, 6), Body(by_an_element, width))
        with pytest.raises(ConversionError, match=r"'1' \(Body\) cannot") as caught:
            to_sequential(model, sample())
        assert ("leaves=['1']" in str(caught.value)) == (width == 2)
        assert 'write that part of ' in str(caught.value)
