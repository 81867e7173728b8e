"""Digits: GPipe learns the same as the model without it, also by a schedule."""

import re

import pytest
import torch

from benchmarks.experiments import digits
from benchmarks.harness.options import choose_devices
from torchgpipe.base.devices import accelerators


@pytest.fixture(autouse=True)
def more_steps(monkeypatch):
    """Let two epochs be enough to learn."""
    monkeypatch.setattr(digits, 'BATCH', 64)


@pytest.mark.slow
def test_digits(run, tmp_path, monkeypatch):
    """By a plan; the unwrapped model with all threads of the CPU, and with one."""
    alone = ['unwrapped'] if accelerators() else ['unwrapped, 2 threads', 'unwrapped, 1 thread']
    numbers = []
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 2)
    monkeypatch.setattr(torch, 'set_num_threads', numbers.append)
    words = 'digits --epochs 2 --chunks 2 --checkpoint always --schedule 1f1b'.split()
    code, out, _ = run(*words, '--output', tmp_path)
    assert code == 0
    accuracies = re.findall(r'^(.+?)  +([\d.]+)%', out, re.M)
    assert [name for name, _ in accuracies] == [*alone, 'GPipe, plain call', 'GPipe, 1f1b']
    assert all(float(accuracy) > 80 for _, accuracy in accuracies)
    assert numbers[0] == 1 and numbers[-1] == 2
    assert 'by a plan' in out and "2 chunks, checkpoint 'always'" in out
    assert re.search(rf'^{alone[-1]} .* 1\.00 ', out, re.M)
    assert (tmp_path / 'digits.png').read_bytes().startswith(b'\x89PNG')


@pytest.mark.slow
def test_digits_by_a_schedule(run, tmp_path):
    words = ['--epochs', 2, '--schedule', 'zb-v', '--balance', '3,3,3,7', '--output', tmp_path]
    code, out, _ = run('digits', *words)
    assert code == 0 and 'by a plan' not in out
    accuracy = re.search(r'GPipe, zb-v +([\d.]+)%', out)
    assert float(accuracy[1]) > 85


def test_partitions_are_where_a_schedule_has_them():
    devices = choose_devices(4)
    for schedule, places in (
        (None, [0, 1, 2, 3]),
        ('1f1b', [0, 1, 2, 3]),
        ('interleaved', [0, 1, 0, 1]),
        ('zb-v', [0, 1, 1, 0]),
    ):
        assert choose_devices(4, schedule) == [devices[j] for j in places], schedule
