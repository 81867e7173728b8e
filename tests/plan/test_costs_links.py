"""Measured time of copies between devices."""

import pytest
import torch

from tests.devices import devices
from torchgpipe.plan import Costs, Link, StageCosts, costs, measure_links, plan, simulate
from torchgpipe.schedule import make


@pytest.fixture
def seconds(monkeypatch):
    """Let a copy take a second, and one more for each MiB."""
    monkeypatch.setattr(costs, '_seconds', lambda x, target: 1 + x.numel() / 2**20)


@devices
def test_links_of_devices(devices, seconds):
    one, other, *_ = names = devices.distinct(2)
    matrix = measure_links(names)
    assert [matrix[0][0], matrix[1][1]] == [Link(), Link()]
    if not devices.are_accelerators:
        assert matrix[0][1] == matrix[1][0] == Link()
        return
    for link in (matrix[0][1], matrix[1][0]):
        assert link.latency == pytest.approx(1, rel=1e-5)
        assert link.bandwidth == pytest.approx(2**20)
    assert measure_links([one, 'cpu'])[0][1].latency > 0
    assert measure_links(['cpu:3', other])[0][1].latency > 0


@devices
def test_a_copy_takes_time(devices):
    matrix = measure_links(devices.distinct(2))
    assert (matrix[0][1].latency > 0) is devices.are_accelerators


@devices
def test_a_plan_measures_links(devices, seconds):
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    found = plan(model, torch.rand(8, 8), devices=devices.distinct(2), timeout=0.01, chunks=[2])
    assert (found.costs.link(0, 1).latency > 0.9) is devices.are_accelerators


def test_latency_is_paid_by_each_copy():
    schedule, stages = make('gpipe', 2, 3), [StageCosts(1.0, 1.0)] * 2
    slow = simulate(schedule, Costs(stages, links=Link(0.5)))
    assert slow.seconds == simulate(schedule, Costs(stages)).seconds + 2 * 0.5


@devices
def test_both_devices_have_ended_when_the_clock_is_read(devices, monkeypatch):
    log = []

    class Clock:
        def perf_counter(self):
            log.append('clock')
            return 0.0

    monkeypatch.setattr(costs, 'time', Clock())
    monkeypatch.setattr(torch.accelerator, 'synchronize', log.append)
    one, other = map(torch.device, devices.distinct(2))
    costs._seconds(torch.zeros(4, device=one), other)
    ended = [one, other] if devices.are_accelerators else []
    assert log == [*ended, 'clock'] * 2 * costs.COPIES
