"""ArcFace: the margin by its definition; sharded, it learns the same."""

import json
from math import cos, pi, sin

import pytest
import torch

from benchmarks.experiments.sharded.models import ArcFace
from torchgpipe.trainer.processes import is_available


def test_the_target_alone_gets_the_margin():
    torch.manual_seed(0)
    layer, x = ArcFace(3, 4).double(), torch.randn(2, 3, dtype=torch.double)
    directions = layer.weight / layer.weight.norm(dim=1, keepdim=True)
    angles = torch.stack([torch.acos((row / row.norm()) @ directions.T) for row in x])
    assert torch.allclose(layer(x), 64 * angles.cos())
    angles[0, 2] += 0.5
    angles[1, 0] += 0.5
    assert angles.max() < pi
    assert torch.allclose(layer(x, torch.tensor([2, 0])), 64 * angles.cos())


def test_a_larger_angle_has_a_smaller_score():
    """Without that, the best angle would be the largest one."""
    layer = ArcFace(2, 1)
    angles = torch.linspace(0, pi, 50)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[2.0, 0.0]]))
    x = torch.stack([angles.cos(), angles.sin()], 1).requires_grad_()
    scores = layer(x, torch.zeros(50, dtype=torch.long))
    assert (scores.diff(dim=0) < 0).all()
    assert scores[-1].item() == pytest.approx(64 * (-1 - 0.5 * sin(0.5)))
    assert scores[0].item() == pytest.approx(64 * cos(0.5), abs=0.02)
    scores.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(not is_available(), reason='needs gloo')
def test_arcface(run, tmp_path):
    code, out, err = run('arcface', '--processes', 3, '--steps', 40, '--output', tmp_path)
    assert code == 0, err
    plain, sharded = json.loads((tmp_path / 'arcface.json').read_text())['results']['rows']
    assert sharded['difference'] < 1e-12 and plain['losses'][-1] < plain['losses'][0] / 2
    accuracies = {rank['accuracy'] for row in (plain, sharded) for rank in row['ranks']}
    assert len(accuracies) == 1 and accuracies.pop() > 0.5
    assert 'sharded over 3' in out
    assert (tmp_path / 'arcface.png').exists() and (tmp_path / 'arcface.svg').exists()
