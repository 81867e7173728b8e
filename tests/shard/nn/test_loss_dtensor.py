"""The cross entropy of logits that are DTensors, as split layers of a model return them."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from tests.shard.processes import run
from torchgpipe.shard.nn import ParallelCrossEntropyLoss
from torchgpipe.shard.nn.functional import parallel_cross_entropy

#: Numbers of classes that two and three ranks share evenly, unevenly, and with an empty part.
CLASSES = (4, 7, 12)


def targets_of(kind, classes):
    """Return targets for logits of shape (3, 5, classes)."""
    if kind == 'probabilities':
        return torch.rand(3, 5, classes, dtype=torch.double)
    target = torch.randint(classes, (3, 5))
    if kind == 'padded':
        target[:, 3:] = -100
        target[0] = -100
    return target


def compared():
    """Compare loss and gradient with the loss of whole logits, for all options."""
    mesh = init_device_mesh('cpu', (torch.distributed.get_world_size(),), mesh_dim_names=('t',))
    torch.manual_seed(0)
    for classes, reduction, smoothing, is_weighted, kind, placement in itertools.product(
        CLASSES,
        ('mean', 'sum', 'none'),
        (0.0, 0.3),
        (False, True),
        ('numbers', 'padded', 'probabilities'),
        (Shard(2), Replicate()),
    ):
        logits = 3 * torch.randn(3, 5, classes, dtype=torch.double)
        target = targets_of(kind, classes)
        weight = torch.linspace(0.5, 2, classes, dtype=torch.double) if is_weighted else None
        options = {'reduction': reduction, 'label_smoothing': smoothing, 'weight': weight}

        whole = logits.clone().requires_grad_()
        is_probable = kind == 'probabilities'
        expected = F.cross_entropy(
            whole.movedim(-1, 1), target.movedim(-1, 1) if is_probable else target, **options
        )
        expected.sum().backward()

        split = distribute_tensor(logits, mesh, [placement]).requires_grad_()
        loss = parallel_cross_entropy(split, target, **options)
        loss.sum().backward()
        assert not isinstance(loss, DTensor)
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(split.grad.full_tensor(), whole.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize('ranks', [2, 3])
def test_all_options_equal_one_process(ranks):
    run(ranks, compared)


def refused():
    """Return the errors for logits that are split otherwise."""
    mesh = init_device_mesh('cpu', (2,), mesh_dim_names=('t',))
    target = torch.zeros(4, dtype=torch.long)
    texts = []
    for placement in (Shard(0), Partial()):
        logits = DTensor.from_local(
            torch.randn(4 if placement.is_partial() else 2, 6), mesh, [placement]
        )
        with pytest.raises(ValueError) as caught:
            parallel_cross_entropy(logits, target)
        texts.append(str(caught.value))
    logits = distribute_tensor(torch.randn(4, 6), mesh, [Shard(1)])
    with pytest.raises(IndexError, match='is 6, but there are 6 classes'):
        parallel_cross_entropy(logits, target + 6)
    with pytest.raises(ValueError, match=r'not \(3,\) for logits of \(4, 6\)'):
        parallel_cross_entropy(logits, target[:3])
    return texts


def test_logits_that_are_split_otherwise_are_refused():
    for text in run(2, refused)[0]:
        assert 'use_local_output=False' in text
        assert 'logits are whole or split in their last dimension' in text


def module_on_a_mesh():
    """Return the loss of a module, of logits on a mesh with a further axis."""
    mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('d', 't'))
    torch.manual_seed(0)
    logits = torch.randn(4, 6, dtype=torch.double)
    target = torch.tensor([5, 2, 1, 1])
    split = distribute_tensor(logits, mesh, [Replicate(), Shard(1)])
    placed = distribute_tensor(target, mesh, [Replicate(), Replicate()])
    loss = ParallelCrossEntropyLoss(ignore_index=1)
    expected = nn.CrossEntropyLoss(ignore_index=1)(logits, target)
    return loss(split, placed).item(), loss(logits, target).item(), expected.item()


def test_a_module_on_a_mesh_with_two_axes():
    for split, plain, expected in run(4, module_on_a_mesh):
        assert math.isclose(split, expected, rel_tol=1e-12)
        assert plain == expected
