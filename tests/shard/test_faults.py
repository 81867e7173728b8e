"""A fault of TorchShard 0.1.0 without a test in another file."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchgpipe.shard as ts
from tests.shard.processes import run


def trained(features, classes):
    """Compare the loss and gradients of a split embedding and two linear layers to one process."""
    double = {'dtype': torch.double}
    torch.manual_seed(1)
    plain = nn.Sequential(
        nn.Embedding(classes, features, **double),
        nn.Linear(features, features, **double),
        nn.Linear(features, classes, **double),
    )
    torch.manual_seed(1)
    model = nn.Sequential(
        ts.nn.ParallelEmbedding(classes, features, dim=0, **double),
        ts.nn.ParallelLinear(features, features, dim=0, **double),
        ts.nn.ParallelLinear(features, classes, dim=1, **double),
    )
    x, y = torch.arange(2 * classes) % classes, torch.arange(2 * classes) // 2
    expected = F.cross_entropy(plain(x), y)
    expected.backward()
    loss = ts.nn.functional.parallel_cross_entropy(model(x), y)
    loss.backward()
    assert abs(loss.item() - expected.item()) < 1e-12
    for one, other in zip(model.parameters(), plain.parameters()):
        whole = ts.dtensor(one, one.grad).full_tensor()
        assert (whole - other.grad).abs().max() < 1e-12


@pytest.mark.parametrize('features, classes', [(5, 7), (3, 31)])
def test_sizes_that_the_group_does_not_divide(features, classes):
    run(2, trained, features, classes, group=2)
    run(4, trained, features, classes, group=4)
