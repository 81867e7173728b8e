"""The monitor of divisors, without a pipeline: it records them, and compares them with weights."""

from math import isnan

import pytest
import torch
from torch.nn import functional as F

from torchgpipe.divisors import LossMonitor

SIZES = [3, 2]
LABELS = [torch.tensor([1, -100, 2]), torch.tensor([0, 1])]


def monitored(function, **options):
    """Call a function for two micro-batches under a monitor, and return it."""
    monitor = LossMonitor(SIZES, **options)
    for i, target in enumerate(LABELS):
        monitor.call(i, function, torch.ones(len(target), 4, requires_grad=True), target)
    return monitor


def by_hand(output, target):
    losses = F.cross_entropy(output, target, reduction='none')
    return losses.sum() / (target != -100).sum()


def of_all(output, target):
    return F.cross_entropy(output, target.clamp(0), reduction='none').mean()


def of_each(output, target):
    return sum(F.cross_entropy(output[i], target[i].clamp(0)) for i in range(len(target)))


def of_parameters(output, target):
    return F.mse_loss(torch.ones(4, requires_grad=True), torch.zeros(4), reduction='sum') / 4


def of_a_metric(output, target):
    return F.cross_entropy(output.detach(), target)


@pytest.mark.parametrize('function', [F.cross_entropy, by_hand])
def test_a_divisor_is_proportional_to_its_weight(function):
    monitored(function, weights=[2, 2]).check()
    with pytest.raises(ValueError, match='divides by what it counts'):
        monitored(function).check()


def test_other_forms_are_means_over_samples():
    for function in [of_all, of_each, of_parameters, of_a_metric]:
        monitored(function).check()


def test_a_sum_is_known():
    monitor = LossMonitor([3])
    output = torch.ones(3, 4, requires_grad=True)
    for function, is_sum in [
        (lambda x, y: F.cross_entropy(x, y, reduction='none').sum(), True),
        (lambda x, y: F.cross_entropy(x, y, reduction='sum'), True),
        (lambda x, y: F.cross_entropy(x, y, reduction='none').sum(0, keepdim=True), False),
        (lambda x, y: F.cross_entropy(x, y, reduction='sum') * 2, False),
    ]:
        assert monitor.call(0, function, output, LABELS[0])[1] is is_sum


def test_equal_summaries_need_equal_elements():
    """Replicas with the same divisors may have other numbers of samples."""
    same, ratio = monitored(of_parameters).summary()
    assert not isnan(same) and ratio == 4 * 2 / 5
    same, ratio = monitored(F.cross_entropy).summary()
    assert isnan(same) and ratio == (2 + 2) / 5


def test_a_weighted_mean_is_trusted_with_a_normalizer():
    def weighted(output, target):
        return F.cross_entropy(output, target) / len(target) * (target != -100).sum()

    monitored(weighted, trusts=True).check()
    with pytest.raises(ValueError):
        monitored(weighted).check()


@pytest.mark.parametrize(
    'function',
    [
        lambda x, y: ((x - y) ** 2).sum(),
        lambda x, y: (2 - x).sum() + (2**x).sum(),
        lambda x, y: (x // 2).sum() + (3 // (x + 9)).sum() + (x % 2).sum(),
    ],
)
def test_operators_in_a_loss_that_python_functions_wrap(function):
    """In v0.32, a loss with the operator ``**`` raised "no signature found for builtin"."""
    loss, x, y = LossMonitor([4]), torch.rand(4, 2), torch.rand(4, 2)
    assert torch.equal(loss.call(0, function, x, y)[0], function(x, y))
