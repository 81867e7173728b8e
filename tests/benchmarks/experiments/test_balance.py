"""Balance: each model once, in two partitions, by a clock that the test moves."""

import json

import pytest
import torch
from torch import nn

from benchmarks.experiments import balance
from benchmarks.harness.options import load
from tests.clock import Timed
from tests.marks import modes


@pytest.mark.slow
def test_balance(run, tmp_path, monkeypatch, clock):
    clock.tick = 1
    monkeypatch.setattr(balance, 'time', clock)
    monkeypatch.setattr(balance, 'STEPS', 1)
    monkeypatch.setattr(balance, 'SIZES', (2,))
    monkeypatch.setattr(balance, 'MODES', ('except_last',))
    code, out, _ = run('balance', '--rounds', 1, '--output', tmp_path)
    assert code == 0 and all(name in out for name in balance.MODELS)
    results = json.loads((tmp_path / 'balance.json').read_text())['results']
    assert len(results) == 3 and all(
        0 < result['ratio'] == result['measured_seconds'] / result['predicted_seconds']
        for result in results
    )
    code, _, err = run('balance', '--device', 'cuda:99')
    assert code == 1 and '--device cuda:99' in err and err.count('\n') == 1


@pytest.mark.sim
def test_partitions_on_an_accelerator_take_as_long_as_on_the_cpu(monkeypatch, clock):
    """Backward runs in another thread there."""
    monkeypatch.setattr(balance, 'time', clock)
    layers = [Timed(clock, lambda number: 1, lambda number: 2) for _ in range(4)]
    model, sample = nn.Sequential(*layers), torch.rand(32, 1)
    on_cpu, on_accelerator = (
        balance.measure(model, sample, [1, 3], 'except_last', device)
        for device in ('cpu', load()[0])
    )
    assert on_accelerator == on_cpu and on_cpu[0] < on_cpu[1]


@modes
def test_a_partition_takes_as_long_as_predicted_if_layers_do(mode, monkeypatch, clock):
    layers = [
        Timed(clock, lambda number: 1 + number / 8, lambda number, k=k: 2 + k * number / 8)
        for k in range(4)
    ]
    monkeypatch.setattr(balance, 'time', clock)
    monkeypatch.setitem(
        balance.MODELS, 'timed', lambda: (nn.Sequential(*layers), torch.rand(32, 1))
    )
    assert balance.compare('timed', 2, mode, 'cpu')['ratio'] == 1
