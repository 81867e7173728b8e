"""A model with whatever goes between partitions, and its training by steps beside itself."""

import pytest
import torch
from torch import nn

from tests.equivalence import loss_of
from tests.helpers import assert_same, gradients, on_first
from tests.skip.layers import Pop, Stash
from tests.zoo.computing import Branch, Merge
from torchgpipe.schedule import NAMES
from torchgpipe.schedule.generators import V_SHAPED

schedules = pytest.mark.parametrize('schedule', NAMES)


def layers(width=4):
    """Return a model of eight layers with whatever goes between partitions."""
    return nn.Sequential(
        nn.Linear(width, width),
        Stash(lambda x: (x, x * 2)),
        nn.Linear(width, width).requires_grad_(False),
        Branch(),
        Merge(),
        nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)),
        Pop(),
        nn.Linear(width, 3),
    ).double()


def placed(places, schedule):
    """Return the devices of four partitions, which a V-shaped schedule has there and back."""
    return [*places[:2], *reversed(places[:2])] if schedule in V_SHAPED else places


def train(model, gpipe, size, *, steps=2, loss_fn=loss_of, expected_loss=loss_of, **options):
    """Train both, and compare losses, outputs, gradients and buffers."""
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in (model, gpipe)]
    for k in range(steps):
        x = torch.randn(size, 4, dtype=torch.double, requires_grad=k % 2 == 0)
        target = torch.randn(size, 3, dtype=torch.double)
        y = on_first(gpipe, x).requires_grad_(x.requires_grad)
        output = model(x)
        loss = expected_loss(output, target)
        loss.backward()
        found, result = gpipe.step(
            y, target.to(gpipe.devices[-1]), loss_fn, return_output=True, **options
        )
        assert not found.requires_grad and not result.requires_grad and found.shape == ()
        assert_same([found, result, y.grad], [loss.detach(), output.detach(), x.grad])
        assert_same(gradients(gpipe), gradients(model))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(gpipe.state_dict().values(), model.state_dict().values())
