"""Concurrency: once, with few rows."""
import pytest

from benchmarks.experiments import concurrency


@pytest.mark.slow
def test_concurrency(run, tmp_path, monkeypatch):
    monkeypatch.setattr(concurrency, 'ROWS', 2)
    code, out, _ = run('concurrency', '--rounds', 1, '--output', tmp_path)
    assert code == 0 and 'speed-up' in out and (tmp_path / 'concurrency.json').exists()
