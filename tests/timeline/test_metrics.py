"""Metrics of a step, of one process and of all ranks."""

import math
import sys

import pytest
import torch
from torch import nn

from tests import accelerator
from tests.devices import devices
from tests.shard.processes import Failure, outcomes, run
from torchgpipe import GPipe
from torchgpipe.timeline import StepMetrics, gathered_mean, measure
from torchgpipe.timeline import metrics as metrics_file


def loss_of(output, target):
    return (output - target).square().mean()


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def train(model, x, **options):
    """Measure a step."""
    with measure(model, tokens=64, **options) as metrics:
        assert math.isnan(metrics.seconds)
        model.step(x, x, loss_of)
    return metrics


@devices
def test_a_step_of_one_process(devices):
    model = GPipe(layers(), [2, 2], devices=devices(2), chunks=4)
    number = len({*model.devices})
    x = torch.rand(16, 8, device=model.devices[0])
    with measure(model, tokens=64, flops=1e9, peak_flops=1e12) as metrics:
        model.step(x, x.to(model.devices[-1]), loss_of)
    assert 0 <= metrics.bubble < 1 and metrics.peak_bytes > 0
    assert metrics.tokens_per_second == 64 / metrics.seconds
    assert metrics.tokens_per_second_per_device == 64 / metrics.seconds / number
    assert metrics.tflops_per_device == pytest.approx(1e-3 / number / metrics.seconds)
    assert metrics.mfu == pytest.approx(metrics.tflops_per_device)


@pytest.mark.sim
def test_queued_work_counts_within_the_context_only():
    """The optimizer's, but not work that was queued before."""
    model = GPipe(layers(), [2, 2], devices=['sim:0', 'sim:1'], chunks=4)
    x = torch.rand(16, 8, device='sim:0')
    accelerator.sleep(600_000)
    with measure(model, tokens=64) as metrics:
        model.step(x, x.to('sim:1'), loss_of)
    before = metrics.seconds
    with measure(model, tokens=64) as metrics:
        model.step(x, x.to('sim:1'), loss_of)
        accelerator.sleep(600_000)
    assert before < 0.6 <= metrics.seconds


def test_without_flops_or_a_peak():
    model = GPipe(layers(), [2, 2], devices=['cpu:0', 'cpu:1'], chunks=4)
    x = torch.rand(16, 8)
    metrics = train(model, x)
    assert metrics.tflops_per_device is None and metrics.mfu is None
    metrics = train(model, x, flops=1e9)
    assert metrics.tflops_per_device > 0 and metrics.mfu is None
    assert train(model, x, peak_flops=1e12).mfu is None


def test_a_device_with_several_partitions_counts_once():
    model = GPipe(layers(), [1, 1, 1, 1], devices=['cpu:0', 'cpu:1'] * 2, chunks=4)
    metrics = train(model, torch.rand(16, 8))
    assert metrics.tokens_per_second == 2 * metrics.tokens_per_second_per_device
    assert 0 < metrics.bubble < 1


def test_an_error_leaves_the_metrics_empty():
    model = GPipe(layers(), [2, 2], devices=['cpu:0', 'cpu:1'], chunks=4)
    with pytest.raises(ValueError, match='stop'):
        with measure(model, tokens=64) as metrics:
            raise ValueError('stop')
    assert math.isnan(metrics.seconds) and metrics.peak_bytes == 0
    train(model, torch.rand(16, 8))  # it can be recorded again


def test_numbers_are_checked_before_the_step():
    for name in ['tokens', 'flops', 'peak_flops']:
        for number in [0, -1, math.nan, math.inf]:
            model = GPipe(layers(), [2, 2], devices=['cpu:0', 'cpu:1'], chunks=4)
            with pytest.raises(ValueError, match=f'{name} must be a finite number above zero'):
                with measure(model, **{'tokens': 1, name: number}):
                    raise AssertionError


def test_nothing_within_the_context():
    model = GPipe(layers(), [2, 2], devices=['cpu:0', 'cpu:1'], chunks=4)
    with measure(model, tokens=64) as metrics:
        pass
    assert math.isnan(metrics.bubble) and metrics.seconds > 0


@pytest.mark.parametrize('platform, factor', [('linux', 1024), ('darwin', 1)])
def test_the_unit_of_the_memory_of_a_process(platform, factor, monkeypatch):
    import resource

    class Usage:
        ru_maxrss = 5000

    monkeypatch.setattr(resource, 'getrusage', lambda who: Usage)
    monkeypatch.setattr(metrics_file.sys, 'platform', platform)
    assert metrics_file._peak_bytes([torch.device('cpu')]) == 5000 * factor


def test_no_memory_of_a_process_on_windows(monkeypatch):
    monkeypatch.setitem(sys.modules, 'resource', None)
    assert metrics_file._peak_bytes([torch.device('cpu')]) == 0


def test_as_text():
    metrics = StepMetrics(0.5, 2000.0, 1000.0, 12.34, 0.125, 2**30, 0.25)
    assert str(metrics) == (
        '500 ms, 2,000 tokens/s, 12.3 TFLOP/s per device, 12.5% MFU, 1.00 GiB, bubble 25.0%'
    )
    metrics = StepMetrics(0.5, 2000.0, 1000.0, peak_bytes=2**30, bubble=0.25)
    assert str(metrics) == '500 ms, 2,000 tokens/s, 1.00 GiB, bubble 25.0%'


def on_a_rank(data, pipe):
    """Return the metrics of a step, and means of metrics of the last stage's ranks."""
    from torchgpipe.distributed import DistributedGPipe, init_mesh

    mesh = init_mesh(data=data, pipe=pipe)
    model = DistributedGPipe(layers(), [4 // pipe] * pipe, mesh=mesh, chunks=4)
    x = torch.rand(16, 8)
    with measure(model, tokens=64, flops=1e9, peak_flops=1e12) as metrics:
        model.step(x, x, loss_of)
    replica, stage = mesh.get_local_rank('data'), mesh.get_local_rank('pipe')
    is_last = stage == pipe - 1
    # Replicas with means of 1 and of 3 samples.
    mean = gathered_mean(
        model, float(replica) if is_last else math.nan, 1 + 2 * replica if is_last else 0
    )
    return metrics, mean, gathered_mean(model, math.nan, 0)


def on_a_mesh_of_one_rank():
    """Return the mean of a metric in a model that other processes do not have."""
    from torch.distributed import get_rank
    from torch.distributed.device_mesh import init_device_mesh

    from torchgpipe.distributed import DistributedGPipe

    mesh = init_device_mesh('cpu', (2, 1), mesh_dim_names=('other', 'pipe'))['pipe']
    model = DistributedGPipe(layers(), [4], mesh=mesh, chunks=4)
    return gathered_mean(model, float(get_rank()), 1)


def test_a_mesh_of_one_rank_among_other_processes():
    assert run(2, on_a_mesh_of_one_rank) == [0.0, 1.0]


def fails_on_the_second_rank():
    from torchgpipe.distributed import DistributedGPipe, init_mesh

    mesh = init_mesh(pipe=2)
    model = DistributedGPipe(layers(), [2, 2], mesh=mesh, chunks=4)
    x = torch.rand(16, 8)
    with measure(model, tokens=64):
        model.step(x, x, loss_of)
        if mesh.get_rank() == 1:
            raise ValueError('broken')


@pytest.mark.slow
def test_a_rank_that_waits_for_the_metrics_of_another_one_names_it():
    texts = [
        outcome.text
        for outcome in outcomes(2, fails_on_the_second_rank)
        if isinstance(outcome, Failure)
    ]
    assert any('a reduction of metrics' in text and 'rank 1' in text for text in texts), texts


def test_metrics_of_all_ranks():
    for data, pipe in [(1, 1), (1, 2), (2, 1), (2, 2)]:
        found = run(data * pipe, on_a_rank, data, pipe)
        first, mean, none = found[0]
        assert [metrics for metrics, *_ in found] == [first] * len(found), (data, pipe)
        assert first.tokens_per_second_per_device == pytest.approx(
            64 / first.seconds / data / pipe
        )
        assert first.tflops_per_device == pytest.approx(1e-3 / data / pipe / first.seconds)
        assert 0 <= first.bubble < 1 and first.peak_bytes > 0, (data, pipe)
        assert mean == (0.75 if data == 2 else 0.0)
        assert {each for _, each, _ in found} == {mean} and math.isnan(none), (data, pipe)
