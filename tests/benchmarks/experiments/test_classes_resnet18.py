"""Classes behind a ResNet-18: the table once, and the sizes of its layers."""

import json

import pytest
import torch

from benchmarks.experiments.sharded.models import FEATURES, resnet18
from torchgpipe.trainer.processes import is_available


def test_resnet18_has_the_published_parameters():
    model = resnet18()
    number = sum(x.numel() for x in model.parameters())
    assert number + (FEATURES + 1) * 1000 == 11_689_512
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, FEATURES)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(not is_available(), reason='needs gloo')
def test_classes_resnet18(run, tmp_path):
    code, out, err = run(
        'classes-resnet18', '--classes', 1001, '--processes', 2, '--steps', 2, '--output', tmp_path
    )
    assert code == 0, err
    results = json.loads((tmp_path / 'classes-resnet18.json').read_text())['results']
    (case,) = results['cases']
    plain, sharded = case['rows']
    assert plain['losses'][1] < 0.9 * plain['losses'][0]
    assert sharded['difference'] < 3e-3 * max(plain['losses'])
    # Each process has the convolutions, and about half of the classes.
    head = [rank['parameters'] - _backbone() for rank in sharded['ranks']]
    assert head == [4 * (FEATURES + 1) * classes for classes in (501, 500)]
    assert '1,001 ' in out and 'sharded over 2' in out
    assert (tmp_path / 'classes-resnet18.svg').exists()


def _backbone():
    """Return the bytes of parameters and buffers."""
    model = resnet18()
    return sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
