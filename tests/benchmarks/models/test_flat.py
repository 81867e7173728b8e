"""The models of the benchmarks: sizes to the digit, and the numbers of independent references."""

import copy

import pytest
import torch
from torch import nn

from benchmarks.models import amoebanetd, resnet101, unet
from tests.helpers import assert_same, gradients
from tests.sequential.convnets import ResNet
from torchgpipe import GPipe
from torchgpipe.balance import balance_by_size


@pytest.mark.slow
def test_sizes():
    for make, layers, parameters in (
        (resnet101, 370, 44_549_160),
        *(
            (lambda a=a, b=b: amoebanetd(num_layers=a, num_filters=b), layers, parameters)
            for a, b, layers, parameters in [
                (18, 208, 24, 81_505_540),
                (18, 256, 24, 122_470_120),
                (18, 416, 24, 319_024_120),
                (18, 544, 24, 542_734_840),
                (36, 544, 42, 1_055_832_376),
                (72, 512, 78, 1_844_858_344),
            ]
        ),
        *(
            (lambda a=a, b=b: unet(num_convs=a, base_channels=b), layers, parameters)
            for a, b, layers, parameters in [
                (5, 64, 241, 232_687_328),
                (6, 72, 285, 362_157_516),
                (11, 128, 505, 2_213_834_176),
                (24, 128, 1_077, 4_993_859_008),
                (24, 160, 1_077, 7_802_903_600),
                (48, 160, 2_133, 15_822_206_000),
            ]
        ),
    ):
        with torch.device('meta'):
            model = make()
        assert (len(model), sum(p.numel() for p in model.parameters())) == (layers, parameters)


@pytest.mark.slow
def test_resnet101_against_one_that_is_not_flat():
    torch.manual_seed(0)
    reference, model = (
        ResNet((3, 4, 23, 3), num_classes=10).double(),
        resnet101(num_classes=10).double(),
    )
    # Both have their layers in the order of the forward pass.
    model.load_state_dict(dict(zip(model.state_dict(), reference.state_dict().values())))
    x = torch.rand(2, 3, 64, 64, dtype=torch.double)
    expected, actual = reference(x), model(x)
    assert_same([actual], [expected], 1e-10)
    expected.square().sum().backward()
    actual.square().sum().backward()
    assert_same([model[0].weight.grad], [reference.conv1.weight.grad], 1e-6)


def test_initialisation_of_resnet101():
    torch.manual_seed(0)
    model = resnet101()
    conv = model[5]
    fan_out = conv.out_channels * conv.kernel_size[0] * conv.kernel_size[1]
    assert conv.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)
    assert torch.equal(model[1].weight, torch.ones(64)) and not model[1].bias.any()


def small(name):
    """Return a small model of a kind, a batch for it, and the shape of its output."""
    torch.manual_seed(0)
    if name == 'resnet101':
        return resnet101(num_classes=10), torch.rand(4, 3, 32, 32), (4, 10)
    if name == 'amoebanetd':
        return amoebanetd(10, 3, 16), torch.rand(4, 3, 224, 224), (4, 10)
    return unet(2, 1, 4), torch.rand(4, 3, 17, 21), (4, 1, 17, 21)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['resnet101', 'amoebanetd', 'unet'])
def test_a_training_step_in_a_pipeline(name):
    """In evaluation mode of norms and dropout, the numbers of the model itself."""
    model, x, shape = small(name)
    model.double()
    x = x.double()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.Dropout2d)):
            module.eval()
    balance = balance_by_size(3, model, x, device='meta')
    reference = copy.deepcopy(model)
    gpipe = GPipe(model, balance, devices=['cpu:0', 'cpu:1', 'cpu:2'], chunks=2)
    for module in gpipe.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.Dropout2d)):
            module.eval()
    expected, actual = reference(x), gpipe(x)
    assert actual.shape == shape
    expected.mean().backward()
    actual.mean().backward()
    assert_same([actual, *gradients(gpipe)], [expected, *gradients(reference)], 1e-9)


def test_amoebanetd_refuses_other_sizes():
    with pytest.raises(ValueError, match='divisible by 3'):
        amoebanetd(num_layers=4)
