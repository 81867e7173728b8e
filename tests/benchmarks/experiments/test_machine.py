"""The machine: measured with small sizes, and its file."""

import json

import pytest

from benchmarks.experiments import machine
from torchgpipe.plan import Machine
from torchgpipe.trainer import measuring
from torchgpipe.trainer.processes import is_available

pytestmark = [pytest.mark.skipif(not is_available(), reason='this takes gloo')]


@pytest.mark.slow
def test_machine(run, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, 'SIZES', ((), (16, 64)))
    monkeypatch.setattr(machine, 'BLOCKS', ((), ((32, 4, 16, 2),)))
    monkeypatch.setattr(machine, 'accelerator', lambda: None)  # another test may simulate one
    code, out, _ = run('machine', '--output', tmp_path)
    assert code == 0 and 'of size 64' in out and 'fused attention' in out
    results = json.loads((tmp_path / 'machine.json').read_text())['results']
    found = Machine.from_dict(results['machine'])
    assert [size for size, _ in found.shares] == [16, 64]
    assert max(share for _, share in found.shares) == 1 and found.memory > 1e8
    assert found.host.bandwidth > 1e6 and found.host.latency > 0
    assert results['blocks'][0]['predicted']['forward'] > 0
    header, rows = machine.block_rows(results['blocks'])
    assert len(rows) == 1 and rows[0][:2] == ['32', '32']
