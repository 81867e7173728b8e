"""Models in the shapes that people build: the numbers of the unwrapped model, with no adapters."""

import copy

import pytest
import torch

from tests.devices import devices
from tests.helpers import assert_same, gradients
from tests.models import MODELS, mean_square
from torchgpipe import Arguments, GPipe
from torchgpipe.base.structure import flatten, flatten_nested
from torchgpipe.testing import check_parity

models = pytest.mark.parametrize('case', MODELS.values(), ids=list(MODELS))


def moved(value, device):
    """Copy a value to a device, with its marks."""
    tensors = flatten_nested(value)[0]
    return copy.deepcopy(
        value,
        {id(x): x.detach().to(device, copy=True).requires_grad_(x.requires_grad) for x in tensors},
    )


def run(net, sample):
    """Call a model."""
    if isinstance(net, GPipe):
        return net(*sample.args, **sample.kwargs)
    tensors, kind = flatten_nested(sample)
    sample = kind(tensors)  # without marks
    first, *rest = net
    value = first(*sample.args, **sample.kwargs)
    for layer in rest:
        value = layer(value)
    return value


def step(net, case, sample):
    """Return outputs and gradients."""
    net.zero_grad()
    sample = sample if isinstance(sample, Arguments) else Arguments(sample)
    sample = moved(sample, net.devices[0] if isinstance(net, GPipe) else 'cpu')
    output = run(net, sample)
    getattr(case, 'loss', mean_square)(output).backward()
    return [*flatten(output)[0], *(x.grad for x in flatten_nested(sample)[0]), *gradients(net)]


@models
@devices
def test_three_steps_of_uneven_batches(devices, case):
    plain = case.make().double()
    gpipe = GPipe(
        copy.deepcopy(plain),
        case.balance,
        devices=devices(3),
        chunks=3,
        checkpoint='except_last',
        **getattr(case, 'options', {}),
    )
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, 0.9) for net in (plain, gpipe)]
    for size in (7, 5, 2):
        sample = case.sample(size)
        assert_same(step(gpipe, case, sample), step(plain, case, sample))
        for optimizer in optimizers:
            optimizer.step()
        assert_same(gpipe.state_dict().values(), plain.state_dict().values())


@models
def test_check_parity_says_so(case):
    parity = check_parity(
        case.make(),
        case.sample(5),
        case.balance,
        steps=2,
        loss_fn=getattr(case, 'loss', None),
        **getattr(case, 'options', {}),
    )
    assert parity.equal and parity.reasons == []
