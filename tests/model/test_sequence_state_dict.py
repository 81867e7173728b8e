"""A checkpoint file does not depend on the balance, nor on whether the model was wrapped."""

import copy
import re
from collections import OrderedDict

import pytest
import torch
from torch import nn

from tests.devices import devices
from tests.helpers import assert_same, call
from torchgpipe import GPipe


def make(seed=0):
    """Return a model with parameters and buffers, and layers with names."""
    torch.manual_seed(seed)
    return nn.Sequential(
        OrderedDict(
            first=nn.Linear(3, 4),
            norm=nn.BatchNorm1d(4),
            act=nn.Tanh(),
            block=nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
            last=nn.Linear(4, 2),
        )
    )


def pipe(balance=(2, 3), seed=0, places=lambda n: ['cpu'] * n, **kwargs):
    """Wrap that model."""
    return GPipe(make(seed), balance, devices=places(len(balance)), **kwargs)


def test_keys_order_and_metadata_equal_the_module():
    plain, wrapped = make().state_dict(), pipe().state_dict()
    assert list(plain) == list(wrapped)
    assert plain._metadata == wrapped._metadata
    assert_same(wrapped.values(), plain.values())


@devices
def test_states_move_between_wrapped_and_unwrapped_and_balances(devices):
    for deferred in [False, True]:
        for balance in [[5], [1, 4], [1, 1, 1, 1, 1]]:
            source = pipe(seed=1, places=devices).state_dict()
            for target in (make(), pipe(balance, places=devices, deferred_batch_norm=deferred)):
                result = target.load_state_dict(source)
                assert not result.missing_keys and not result.unexpected_keys, (deferred, balance)
                assert_same(target.state_dict().values(), source.values())
            back = pipe(places=devices)
            back.load_state_dict(make(seed=2).state_dict())
            assert_same(back.state_dict().values(), make(seed=2).state_dict().values())


def test_in_v007_keys_had_the_partition_in_them():
    for nested in [False, True]:
        for old_balance in [[2, 3], [4, 1]]:
            source = make(seed=1)
            names = list(source._modules)
            old = {}
            for key, value in source.state_dict().items():
                j = 0 if names.index(key.partition('.')[0]) < old_balance[0] else 1
                old[f'{"0." if nested else ""}partitions.{j}.{key}'] = value
            target = pipe([1, 4])
            (nn.Sequential(target) if nested else target).load_state_dict(old)
            assert_same(target.state_dict().values(), source.state_dict().values())


def test_within_another_module():
    outer = nn.Sequential(OrderedDict(head=nn.Linear(3, 3), pipe=pipe()))
    plain = nn.Sequential(OrderedDict(head=nn.Linear(3, 3), pipe=make(seed=1)))
    assert list(outer.state_dict()) == list(plain.state_dict())
    outer.load_state_dict(plain.state_dict())
    assert_same(outer.state_dict().values(), plain.state_dict().values())


def test_strictness_and_error_texts_equal_pytorch():
    for spoil in [
        lambda state: state.pop('norm.running_mean'),
        lambda state: state.update({'more.weight': torch.rand(1)}),
        lambda state: state.update({'block.9.weight': torch.rand(1)}),
        lambda state: state.update({'last.weight': torch.rand(3, 3)}),
    ]:
        state = make().state_dict()
        spoil(state)
        with pytest.raises(RuntimeError) as expected:
            make().load_state_dict(state)
        with pytest.raises(RuntimeError) as actual:
            pipe().load_state_dict(state)
        assert str(actual.value) == re.sub('for Sequential', 'for GPipe', str(expected.value))
        if 'size mismatch' not in str(expected.value):
            assert pipe().load_state_dict(state, strict=False) == make().load_state_dict(
                state, strict=False
            ), spoil


def test_loading_leaves_the_given_state_alone():
    old = {f'partitions.0.{key}': value for key, value in make().state_dict().items()}
    keys = list(old)
    pipe().load_state_dict(old)
    assert list(old) == keys


@devices
def test_optimizer_states_move_between_balances(devices):
    for optimizer in [
        lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9),
        lambda ps: torch.optim.Adam(ps, 0.1),
    ]:
        x = torch.rand(8, 3, dtype=torch.double)

        def step(model, optimizer):
            optimizer.zero_grad()
            call(model, x).square().sum().backward()
            optimizer.step()

        a = pipe([2, 3], places=devices).double()
        a_optimizer = optimizer(a.parameters())
        step(a, a_optimizer)
        b = pipe([1, 3, 1], places=devices).double()
        b_optimizer = optimizer(b.parameters())
        b.load_state_dict(a.state_dict())
        b_optimizer.load_state_dict(copy.deepcopy(a_optimizer.state_dict()))
        plain = make().double()
        plain_optimizer = optimizer(plain.parameters())
        plain.load_state_dict(a.state_dict())
        plain_optimizer.load_state_dict(copy.deepcopy(a_optimizer.state_dict()))
        for _ in range(3):
            for pair in ((a, a_optimizer), (b, b_optimizer), (plain, plain_optimizer)):
                step(*pair)
        assert_same(b.parameters(), a.parameters(), 0 if devices.first.type == 'cpu' else 1e-6)
        assert_same(plain.parameters(), a.parameters(), 1e-6)
