"""Measured time of an action outside its layers."""

import torch
from torch import nn

from tests.devices import devices
from torchgpipe.plan import costs, measure_overhead, plan


@devices
def test_only_workers_on_the_cpu_share_the_interpreter(devices):
    found = measure_overhead(devices.distinct(2))
    assert [*found] == ([] if devices.are_accelerators else [*'FBIWR'])
    assert devices.are_accelerators or min(found['F'], found['B']) > 0


@devices
def test_a_plan_counts_it(devices, monkeypatch):
    monkeypatch.setattr(costs, '_each', lambda run: 2.0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    found = plan(model, torch.rand(8, 8), devices=devices.distinct(2), timeout=0.01, chunks=[2])
    assert (found.seconds > 1.0) is not devices.are_accelerators


def test_overhead_is_the_time_of_one_more_micro_batch(monkeypatch):
    seconds = {
        'layers': 2.0,
        ('1f1b', 'never'): 7.0,
        ('zb-h1', 'never'): 13.0,
        ('1f1b', 'always'): 12.0,
    }
    monkeypatch.setattr(costs, '_step', lambda devices, *what: what)
    monkeypatch.setattr(
        costs,
        '_each',
        lambda run: seconds.get(run, 2.0) if isinstance(run, tuple) else seconds['layers'],
    )
    # Of each of two devices the layers take 1: F + B 6, F + I + W 12, F + B with R 11.
    assert measure_overhead(['cpu:0', 'cpu:1']) == {'F': 3, 'B': 3, 'I': 4.5, 'W': 4.5, 'R': 5}


def test_the_global_generator_stays_where_it_was():
    before = torch.get_rng_state()
    measure_overhead(['cpu:0', 'cpu:1'])
    assert torch.equal(torch.get_rng_state(), before)
