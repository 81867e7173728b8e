"""In-place changes in a step, of tensors that another cell also has: an error or right results."""

import copy

import pytest
import torch
from torch import nn

from tests.devices import cpus, devices
from tests.engine.steps import loss_of
from tests.skip.layers import Pop, Stash
from torchgpipe import GPipe


@devices
@pytest.mark.parametrize('view', [False, True])
def test_a_change_in_place_that_another_tensor_should_see(devices, view):
    """Two tensors of one memory have graphs of their own in the next cell."""

    class Two(nn.Module):
        def forward(self, x):
            return x, x[:, 1:] if view else x[:, :]

    class Change(nn.Module):
        def forward(self, pair):
            return pair[0].mul_(2)[:, 1:] + pair[1][:, -3:]

    gpipe = GPipe(
        nn.Sequential(nn.Linear(4, 4), Two(), Change()),
        [2, 1],
        devices=devices(2),
        chunks=2,
        checkpoint='never',
    )
    x = torch.randn(4, 4, device=devices.first)
    with pytest.raises(RuntimeError, match='another one lay in its memory'):
        gpipe.step(x, x[:, 1:].to(gpipe.devices[-1]), loss_of)


@devices
def test_a_change_in_place_of_the_input_of_a_recomputation(devices):
    class Through(nn.Linear):
        def forward(self, x):
            return x, super().forward(x).tanh()

    class Change(nn.Module):
        def forward(self, pair):
            return pair[0].mul_(2) + pair[1]

    gpipe = GPipe(
        nn.Sequential(nn.Linear(4, 4), Through(4, 4), Change()),
        [1, 1, 1],
        devices=[devices(1)[0]] * 3,
        chunks=2,
        checkpoint=['never', 'always', 'never'],
    )
    x = torch.randn(4, 4, device=devices.first)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        gpipe.step(x, x, loss_of)


@cpus
def test_a_change_in_place_of_a_batch_beside_a_skip(devices):
    layers = nn.Sequential(
        nn.Linear(4, 4), Stash(lambda x: (x, x * 2)), nn.ReLU(inplace=True), Pop()
    )
    gpipe = GPipe(layers, [2, 2], devices=devices(2), chunks=2, checkpoint='always')
    x = torch.randn(4, 4)
    with pytest.raises(RuntimeError, match='or a skip tensor that it popped, was changed'):
        gpipe.step(x, x, loss_of)


@devices
@pytest.mark.parametrize('mode', ['always', 'never'])
def test_tensors_that_share_a_memory_may_be_popped(devices, mode):
    """A cell removes its skips from its inputs, which does not change them."""
    model = nn.Sequential(
        nn.Linear(4, 4),
        Stash(lambda x: (x, (x, x[:]))),
        Pop(lambda values, skip: values[0] + values[1] + skip),
    ).double()
    gpipe = GPipe(copy.deepcopy(model), [2, 1], devices=devices(2), chunks=2, checkpoint=mode)
    x = torch.randn(4, 4, dtype=torch.double)
    (model(x).square().mean()).backward()
    y = torch.zeros(4, 4, dtype=torch.double)
    loss = gpipe.step(
        x.to(devices.first),
        y.to(gpipe.devices[-1]),
        lambda output, target: (output - target).square().mean(),
    )
    assert torch.isfinite(loss)
    for expected, found in zip(model.parameters(), gpipe.parameters()):
        assert torch.allclose(expected.grad, found.grad.cpu())
