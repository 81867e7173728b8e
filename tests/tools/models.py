"""A model, its batches, and a plain PyTorch loop that gives the expected results."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from torchgpipe import GPipe

STEPS, RATE = 3, 0.1


def plain():
    """Return the model, which is always the same."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 3)
    ).double()


def wrapped(balance=(2, 2)):
    """Give it in a pipeline, with a worker for each partition."""
    return GPipe(plain(), balance, devices=[f'cpu:{j}' for j in range(len(balance))], chunks=3)


def samples():
    """Return all batches as one: inputs and labels."""
    generator = torch.Generator().manual_seed(1)
    return (
        torch.rand(STEPS * 5, 4, generator=generator, dtype=torch.double),
        torch.randint(3, (STEPS * 5,), generator=generator),
    )


def batches():
    """Return a batch for each step."""
    inputs, labels = samples()
    return zip(inputs.split(5), labels.split(5))


def train(model, optimizer, backward=torch.Tensor.backward):
    """Take all steps; give the losses."""
    losses = []
    for input, label in batches():
        optimizer.zero_grad()
        loss = cross_entropy(model(input), label)
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def sgd(model):
    """Return an optimizer that has a state."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE, momentum=0.9)


def trained():
    """Return the unwrapped model after all steps."""
    model = plain()
    train(model, sgd(model))
    return model


def assert_equal(actual, expected):
    """Compare two models by their state dicts."""
    actual, expected = actual.state_dict(), expected.state_dict()
    assert [*actual] == [*expected]
    for name, value in expected.items():
        assert (actual[name].cpu() - value.cpu()).abs().max() <= 1e-12, name
